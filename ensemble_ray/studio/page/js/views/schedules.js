// The schedules of an endpoint: when they start runs, what they have started, and buttons to control them.

import { fill, h } from "../dom.js";
import { countOf, formatAgo, formatDuration, formatTime } from "../format.js";
import { formatRoute } from "../router.js";
import { oneLine, visible } from "../text.js";
import { emptyState, failureState, line, messageOf, staleNotice, statusPill, toast } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").ScheduleRow} ScheduleRow */
/** @typedef {import("../types.js").ScheduleFire} ScheduleFire */
/** @typedef {import("../types.js").View} View */

/** How often it looks again, ms. */
const EVERY = 3000;
const TRIGGERS = /** @type {Record<string, string>} */ ({ time: "Scheduled", file: "New file", manual: "Requested" });

const UNITS = /** @type {[number, string][]} */ ([[604_800, "w"], [86_400, "d"], [3600, "h"], [60, "m"], [1, "s"]]);

/**
 * An interval as team files write it.
 * @param {number} seconds
 */
function interval(seconds) {
  const [size, unit] = UNITS.find(([each]) => seconds % each === 0) ?? [1, "s"];
  return `${seconds / size}${unit}`;
}

/** @param {ScheduleRow} one */
function whenOf(one) {
  if (one.cron !== null) return `${one.cron} (${one.timezone})`;
  if (one.folder !== null) return `New files: ${one.folder.replace(/\/$/, "")}/${one.pattern ?? "*"}`;
  return `Every ${interval(one.every_s ?? 0)}`;
}

/**
 * @param {ScheduleRow} one
 * @param {number} now
 */
function nextOf(one, now) {
  if (one.is_paused) return "Paused";
  if (one.next_at === null) return one.folder === null ? "No further time" : "Watching the folder";
  const left = one.next_at - now;
  return `Next ${formatTime(one.next_at)}${left > 0 ? `, in ${formatDuration(Math.ceil(left / 1000) * 1000)}` : ""}`;
}

/** @param {ScheduleFire} fire */
function outcome(fire) {
  if (fire.run_id === null) return h("span", { class: "muted" }, fire.times > 1 ? `skipped ${fire.times} times` : "skipped");
  return fire.status === null ? h("span", { class: "muted" }, "deleted") : statusPill(fire.status);
}

/**
 * @param {App} app
 * @returns {View}
 */
export function schedulesView(app) {
  const content = h("div", { class: "content actors schedules" }, h("p", { class: "loading" }, "Loading…"));
  const notice = staleNotice();
  let isDrawn = false;
  let drawn = "";

  async function load() {
    try {
      const found = await app.source.schedules();
      notice.clear();
      const state = JSON.stringify(found) + Math.floor(Date.now() / 5000);
      if (state === drawn) return;
      drawn = state;
      isDrawn = true;
      const key = /** @type {HTMLElement|null} */ (document.activeElement)?.dataset.key;
      draw(found);
      if (key) /** @type {HTMLElement|null} */ (content.querySelector(`[data-key="${CSS.escape(key)}"]`))?.focus({ preventScroll: true });
    } catch (error) {
      if (isDrawn) notice.tell(error);
      else fill(content, failureState(error, () => void load()));
    }
  }

  /**
   * @param {ScheduleRow} one
   * @param {string} action
   */
  async function control(one, action) {
    try {
      const run = await app.source.controlSchedule(one, action);
      app.announce(`${one.name}: ${run ? `run ${run} was accepted` : action === "pause" ? "paused" : "resumed"}`);
      await load();
    } catch (error) {
      toast(messageOf(error), true);
    }
  }

  /**
   * @param {ScheduleRow} one
   * @param {string} action
   * @param {string} word
   */
  function button(one, action, word) {
    return h("button", { class: "button small", type: "button", "data-key": `${one.ensemble}/${one.name} ${action === "run" ? action : "pause"}`, "aria-label": `${word}: ${oneLine(one.name, 80)}`, onclick: () => void control(one, action) }, word);
  }

  /** @param {ScheduleFire} fire */
  function row(fire) {
    const about = fire.run_id === null ? line(fire.reason, "", 300) : h("a", { class: "mono", href: formatRoute({ view: "run", run: fire.run_id }) }, oneLine(fire.run_id, 120));
    const when = fire.since === null ? formatTime(fire.at) : `${formatTime(fire.since)} to ${formatTime(fire.at)}`;
    const cells = [h("time", { class: "num", datetime: new Date(fire.at).toISOString(), title: formatAgo(fire.at, Date.now()) }, when), TRIGGERS[fire.trigger] ?? fire.trigger, outcome(fire), h("div", {}, about, fire.file !== null && line(fire.file, "detail", 200))];
    return h("tr", {}, cells.map((cell, at) => h("td", { "data-word": ["Time", "Started by", "State", "Run"][at] ?? "" }, cell)));
  }

  /** @param {ScheduleRow} one */
  function card(one) {
    const name = `${one.ensemble} / ${one.name}`;
    return h("section", { class: "card schedule", "aria-label": oneLine(name, 160) },
      h("div", { class: "node-title-row" }, h("h2", {}, oneLine(name, 160)), one.is_paused && h("span", { class: "badge" }, "PAUSED"), h("span", { class: "grow" }),
        button(one, one.is_paused ? "resume" : "pause", one.is_paused ? "Resume" : "Pause"), one.folder === null && button(one, "run", "Run now")),
      h("p", { class: "detail schedule-when" }, oneLine([whenOf(one), nextOf(one, Date.now()), one.waiting > 0 && `${countOf(one.waiting, "time")} waiting`].filter(Boolean).join(" · "), 300)),
      one.problem !== null && h("p", { class: "banner" }, visible(one.problem)),
      one.history.length > 0 && h("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": `History of ${oneLine(one.name, 80)}` },
        h("table", { class: "data" }, h("thead", {}, h("tr", {}, ["Time", "Started by", "State", "Run"].map((word) => h("th", { scope: "col" }, word)))), h("tbody", {}, one.history.map(row)))));
  }

  /** @param {ScheduleRow[]} found */
  function draw(found) {
    fill(content,
      h("div", { class: "page-head" }, h("h1", {}, "Schedules"), h("p", { class: "num" }, found.length ? countOf(found.length, "schedule") : "")),
      !found.length && emptyState({ symbol: "clock", title: "No schedules", text: "A team file declares them with the key schedules." }),
      found.map(card));
  }

  app.setTitle("Schedules");
  void load();
  const timer = window.setInterval(() => document.hidden || void load(), EVERY);
  return { element: h("div", { class: "page" }, notice.element, content), update: () => undefined, close: () => window.clearInterval(timer) };
}
