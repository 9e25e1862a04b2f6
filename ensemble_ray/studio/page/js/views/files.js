// The files of a folder: graphs, traces and exported runs, each opened as a run of which nothing more is known.

import { h, fill, icon, syncChildren } from "../dom.js";
import { countOf, formatAgo, formatBytes, formatCount, formatDuration, formatTime } from "../format.js";
import { formatRoute } from "../router.js";
import { fileRun } from "../source/folder.js";
import { oneLine, visible } from "../text.js";
import { emptyState, failureState, line } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").FileEntry} FileEntry */
/** @typedef {import("../types.js").View} View */

/** How often the folder is looked at, ms. */
const EVERY = 3000;
const WORDS = /** @type {Record<string, string>} */ ({ dag: "GRAPH", trace: "TRACE", run: "RUN" });
const COLUMNS = ["", "File", "Tasks", "Duration", "Size", "Changed"];

/**
 * @param {App} app
 * @returns {View}
 */
export function filesView(app) {
  const head = h("div", { class: "run-columns", "aria-hidden": "true" }, COLUMNS.map((word) => h("span", {}, word)));
  const list = h("div", { class: "runs", role: "list", "aria-label": "Files" });
  const foot = h("div", { class: "list-foot" });
  const total = h("p", { class: "num clip" });
  const element = h("div", { class: "page" }, h("div", { class: "content files" }, h("div", { class: "page-head" }, h("h1", {}, "Files"), total), h("div", { class: "card" }, head, list, foot)));
  let asked = 0;

  /** @param {FileEntry} file */
  function make(file) {
    const row = file.kind ? h("a", { class: "run", href: formatRoute({ view: "run", run: fileRun(file.name) }) }) : h("div", { class: "run" });
    const item = h("div", { role: "listitem" }, row);
    update(item, file);
    return item;
  }

  /**
   * @param {HTMLElement} item
   * @param {FileEntry} file
   */
  function update(item, file) {
    const now = Date.now();
    const state = JSON.stringify(file) + Math.floor(now / 5000);
    if (item.dataset.drawn === state) return;
    item.dataset.drawn = state;
    const about = file.problem ? line(file.problem, "run-summary clip bad", 300) : h("span", { class: "run-summary clip" }, oneLine([file.workflow, file.kind === "run" && file.tasks !== null ? countOf(file.tasks, "step") : ""].filter(Boolean).join(" · ") || "–", 100));
    fill(/** @type {HTMLElement} */ (item.firstElementChild),
      h("span", { class: file.kind ? "glyph" : "glyph is-failed", "aria-hidden": "true" }, icon(file.kind === "dag" ? "fork" : file.kind ? "list" : "failed")),
      h("span", { class: "run-what", title: file.problem ? visible(file.problem) : null }, h("span", { class: "row" }, line(file.name, "run-name clip", 160), file.kind && h("span", { class: "badge" }, WORDS[file.kind])), about),
      h("span", { class: "num" }, formatCount(file.tasks)),
      h("span", { class: "num" }, formatDuration(file.duration_ms)),
      h("span", { class: "num" }, formatBytes(file.size_bytes)),
      h("time", { class: "num", datetime: new Date(file.modified_at).toISOString(), title: formatTime(file.modified_at) }, formatAgo(file.modified_at, now)));
  }

  async function load() {
    asked += 1;
    const mine = asked;
    try {
      const found = await app.source.files();
      if (mine !== asked) return;
      total.textContent = `${countOf(found.files.length + found.left_out, "file")} in ${visible(found.folder)}`;
      // What a file is decides whether it can be opened, so that another kind is another row.
      syncChildren(list, found.files, (file) => `${file.kind ?? ""}:${file.name}`, make, update);
      head.hidden = found.files.length === 0;
      if (!found.files.length) fill(foot, emptyState({ title: "No graphs and no traces", text: "Put .json files into this folder, for example with:", command: "ensemble-ray plan team.yaml --dag team.dag.json" }));
      else fill(foot, found.left_out > 0 && `${formatCount(found.left_out)} older files are not listed`);
      foot.hidden = foot.childNodes.length === 0;
    } catch (error) {
      if (mine !== asked) return;
      fill(list);
      head.hidden = true;
      foot.hidden = false;
      fill(foot, failureState(error, () => void load()));
    }
  }

  app.setTitle("Files");
  void load();
  const timer = window.setInterval(() => document.hidden || void load(), EVERY);
  return { element, update: () => undefined, close: () => window.clearInterval(timer) };
}
