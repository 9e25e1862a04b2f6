// Steps as a tree: parts under what they are part of. Searched and filtered; ten thousand rows stay fast.

import { fill, h, icon } from "../dom.js";
import { countOf, formatCost, formatDuration, formatShort, formatCount, statusWord } from "../format.js";
import { durationOf, tokensOf, treeOf } from "../model/run.js";
import { oneLine } from "../text.js";
import { agentName, emptyState, line, statusMark } from "../ui/parts.js";
import { moveKeys, rowList } from "../ui/rows.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../model/run.js").RunModel} RunModel */
/** @typedef {{step: Step, depth: number, children: number}} TreeRow */

/** Height of a row, px; on a telephone a title has two lines, and its id a third. */
const [HEIGHT, HIGH] = [36, 64];
const STATUSES = ["running", "waiting", "completed", "failed", "interrupted", "exited", "cancelled", "skipped", "pending"];

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {Route} route
 * @returns {import("./run.js").Tab}
 */
export function stepsTab(app, model, route) {
  let params = route.params;
  /** @type {Set<string>} */
  const folded = new Set();
  /** @type {TreeRow[]} */
  let shown = [];
  let version = -1;

  const field = h("input", { class: "field", type: "search", "data-search": "", placeholder: "Search steps", "aria-label": "Search steps", value: params.get("q") ?? "", oninput: () => app.go({ params: { q: field.value || null } }, true) });
  const status = h("select", { class: "field", "aria-label": "Status", onchange: () => app.go({ params: { status: status.value || null } }, true) }, h("option", { value: "" }, "Any status"), STATUSES.map((word) => h("option", { value: word }, statusWord(word))));
  const level = h("span", { class: "row", hidden: true });
  const count = h("span", { class: "muted num", role: "status" });
  const height = window.matchMedia("(max-width: 640px)").matches ? HIGH : HEIGHT;
  const head = h("div", { class: "step-columns", "aria-hidden": "true" }, ["Step", "Agent", "Duration", "Tokens", "Cost"].map((word) => h("span", {}, word)));
  const box = h("div", { class: "scroll step-rows", role: "tree", tabindex: 0, "aria-label": "Steps", vars: { "--row": `${height}px` } });
  const empty = h("div", { hidden: true });
  const element = h("div", { class: "steps" }, h("div", { class: "toolbar" }, h("div", { class: "search" }, icon("search"), field), status, level, h("span", { class: "grow" }), count), head, empty, box);
  const list = rowList({ box, height, make });

  /**
   * @param {TreeRow} row
   * @param {number} at
   */
  function make({ step, depth, children }, at) {
    const isChosen = params.get("step") === step.id;
    const tools = step.tools.length;
    const failedTools = step.tools.filter(([, outcome]) => outcome !== "success" && !outcome.startsWith("skipped")).length;
    const row = h("div", { class: "step-row", id: `row-${at}`, role: "treeitem", "aria-level": depth + 1, "aria-setsize": shown.length, "aria-posinset": at + 1, "aria-selected": String(isChosen), "aria-expanded": children ? String(!folded.has(step.id)) : null, vars: { "--depth": String(Math.min(depth, 8)) }, onclick: () => choose(at) },
      h("span", { class: "step-what" },
        children ? h("button", { class: "fold", type: "button", tabindex: -1, "aria-hidden": "true", onclick: (/** @type {Event} */ event) => {
          event.stopPropagation();
          fold(step.id);
        } }, icon(folded.has(step.id) ? "right" : "down")) : h("span", { class: "fold" }),
        statusMark(step.status),
        line(step.title || step.id, "step-title clip", 160),
        h("span", { class: "step-id mono muted clip", "aria-hidden": "true" }, step.id),
        step.kind !== "task" && h("span", { class: "badge" }, step.kind.toUpperCase()),
        step.number !== null && h("span", { class: "muted num" }, `#${step.number}`),
        step.attempts > 1 && h("span", { class: "badge", title: "Started more than once" }, `${step.attempts} ATTEMPTS`),
        tools > 0 && h("span", { class: failedTools ? "badge bad" : "badge", title: oneLine(step.tools.map(([name]) => name).join(", ")) }, countOf(tools, "TOOL", "TOOLS")),
        step.reviewed && h("span", { class: "badge" }, "REVIEWED"),
        step.effect && step.effect !== "recorded" && h("span", { class: "badge bad", title: "Outcome of its calls" }, step.effect.toUpperCase()),
        step.error && line(step.error, "step-error clip", 160)),
      h("span", { class: "step-agent clip" }, step.agent ? agentName(step.agent) : ""),
      h("span", { class: "num" }, formatDuration(durationOf(step, Date.now()))),
      h("span", { class: "num" }, formatShort(tokensOf(step))),
      h("span", { class: "num" }, formatCost(step.cost)));
    return row;
  }

  /** @param {string} id */
  function fold(id) {
    if (!folded.delete(id)) folded.add(id);
    draw(true);
  }

  /** @param {number} at */
  function choose(at) {
    const row = shown[at];
    if (row) app.go({ params: { step: row.step.id } }, true);
  }

  /** @param {number} by */
  function move(by) {
    const at = chosenAt();
    const next = Math.max(0, Math.min(shown.length - 1, at < 0 && by > 0 ? by - 1 : at + by));
    choose(next);
    list.reveal(next);
  }

  function chosenAt() {
    const id = params.get("step");
    return id === null ? -1 : shown.findIndex((row) => row.step.id === id);
  }

  /** @param {boolean} [isNew] */
  function draw(isNew = false) {
    if (!isNew && version === model.version) return list.redraw();
    version = model.version;
    const words = (params.get("q") ?? "").toLowerCase();
    const wanted = params.get("status");
    const wantedLevel = params.get("level");
    const all = treeOf(model.steps.values());
    const isFiltered = Boolean(words || wanted || wantedLevel);
    if (isFiltered) {
      shown = all.filter(({ step }) => (!wanted || step.status === wanted) && (!wantedLevel || String(step.level) === wantedLevel) && (!words || `${step.id} ${step.title} ${step.agent} ${step.error ?? ""}`.toLowerCase().includes(words))).map(({ step }) => ({ step, depth: 0, children: 0 }));
    } else {
      let under = Infinity;
      shown = all.filter((row) => {
        if (row.depth > under) return false;
        under = folded.has(row.step.id) ? row.depth : Infinity;
        return true;
      });
    }
    count.textContent = isFiltered ? `${formatCount(shown.length)} of ${countOf(all.length, "step")}` : countOf(all.length, "step");
    empty.hidden = shown.length > 0;
    head.hidden = box.hidden = shown.length === 0;
    if (!shown.length) fill(empty, all.length ? emptyState({ symbol: "search", title: "No matching step", text: "Use fewer words, or select another status." }) : emptyState({ title: "No steps yet", text: "Steps appear when they are planned or started." }));
    list.set(shown);
    const at = chosenAt();
    if (at >= 0) box.setAttribute("aria-activedescendant", `row-${at}`);
    else box.removeAttribute("aria-activedescendant");
  }

  function drawFilters() {
    status.value = params.get("status") ?? "";
    const wanted = params.get("level");
    level.hidden = wanted === null;
    fill(level, wanted !== null && h("button", { class: "chip", type: "button", "aria-pressed": "true", onclick: () => app.go({ params: { level: null } }, true) }, `Level ${wanted} ×`));
  }

  box.addEventListener("keydown", (event) => {
    const at = chosenAt();
    const row = shown[at];
    /** @type {Record<string, () => void>} */
    const moves = {
      ...moveKeys(move, shown.length),
      ArrowLeft: () => {
        if (row?.children && !folded.has(row.step.id)) fold(row.step.id);
        else for (let up = at - 1; row && up >= 0; up -= 1) if ((shown[up]?.depth ?? 0) < row.depth) return move(up - at);
      },
      ArrowRight: () => row?.children && folded.has(row.step.id) && fold(row.step.id),
      Enter: () => document.querySelector(".side")?.querySelector("button")?.focus(),
    };
    const act = moves[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });
  drawFilters();
  draw(true);
  window.requestAnimationFrame(() => {
    const at = chosenAt();
    if (at >= 0) list.reveal(at);
  });
  return {
    element,
    draw: () => draw(),
    update(now) {
      const isNew = ["q", "status", "level"].some((key) => params.get(key) !== now.params.get(key));
      params = now.params;
      drawFilters();
      draw(isNew);
      const at = chosenAt();
      if (at >= 0) box.setAttribute("aria-activedescendant", `row-${at}`);
      if (!isNew) list.redraw();
    },
    close: () => list.close(),
    keys: { j: () => move(1), k: () => move(-1) },
  };
}
