// The items of a map-reduce: a table of one level with the failed and the slowest first, and a histogram of their durations.

import { fill, h, icon, syncChildren } from "../dom.js";
import { countOf, formatCount, formatDuration, formatShort, statusWord } from "../format.js";
import { histogramOf, isOfTree, itemOrder, itemsOf } from "../model/items.js";
import { oneLine } from "../text.js";
import { retryItems } from "../ui/actions.js";
import { emptyState, line, segmented, statusMark } from "../ui/parts.js";
import { moveKeys, rowList } from "../ui/rows.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../model/items.js").Item} Item */
/** @typedef {import("../model/run.js").RunModel} RunModel */

const HEIGHT = 36;
const STATUSES = ["failed", "interrupted", "waiting", "running", "exited", "cancelled", "skipped", "pending", "completed"];
/** Begins each error of an agent; what follows is the error of its model or tool. */
const OWN_CLASS = /^AgentExecutionError: Agent '[^']*': /;
const COLUMNS = /** @type {[string, string][]} */ ([["item", "Item"], ["error", "Error"], ["duration", "Duration"], ["tokens", "Tokens"]]);

/**
 * @param {import("../types.js").Batch[]} batches
 */
function batchesWord(batches) {
  if (!batches.length) return "";
  const open = batches.filter(({ state }) => state !== "collected" && state !== "void").length;
  const [answered, total] = /** @type {const} */ (["answered", "total"]).map((name) => batches.reduce((sum, one) => sum + one[name], 0));
  return `${formatCount(open)} of ${countOf(batches.length, "batch", "batches")} open, ${formatCount(answered ?? 0)} of ${countOf(total ?? 0, "request")} answered`;
}

/**
 * Whether a run maps items.
 * @param {RunModel} model
 */
export function hasItems(model) {
  return model.run.workflow.startsWith("map") || [...model.steps.values()].some(isOfTree);
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {Route} route
 * @returns {import("./run.js").Tab}
 */
export function itemsTab(app, model, route) {
  let params = route.params;
  /** @type {Item[]} */
  let shown = [];
  let version = -1;
  let longest = 1;

  const field = h("input", { class: "field", type: "search", "data-search": "", placeholder: "Search items", "aria-label": "Search items", value: params.get("q") ?? "", oninput: () => app.go({ params: { q: field.value || null } }, true) });
  const levels = h("div", {});
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Status" });
  const retry = h("button", { class: "button small", type: "button", hidden: true, onclick: () => retryItems(app, model, shown.filter((item) => item.step.status === "failed")) });
  const count = h("span", { class: "muted num", role: "status" });
  const batches = h("span", { class: "muted num", role: "status" });
  const times = h("div", { class: "item-times" });
  const head = h("div", { class: "item-row item-columns", role: "row", "aria-rowindex": 1 }, COLUMNS.map(([name, word]) => h("span", { role: "columnheader", "data-column": name }, h("button", { type: "button", onclick: () => sortBy(name) }, word))));
  const box = h("div", { class: "scroll step-rows item-rows", role: "grid", tabindex: 0, "aria-label": "Items" }, head);
  const empty = h("div", { hidden: true });
  const element = h("div", { class: "steps" }, h("div", { class: "toolbar" }, h("div", { class: "search" }, icon("search"), field), levels, chips, h("span", { class: "grow" }), batches, count, retry), times, empty, box);
  const list = rowList({ box, height: HEIGHT, make });

  /** @param {string} name */
  function sortBy(name) {
    app.go({ params: { sort: params.get("sort") === name ? `-${name}` : name } }, true);
  }

  /**
   * @param {Item} item
   * @param {number} at
   */
  function make(item, at) {
    const { step } = item;
    return h("div", { class: "step-row item-row", id: `row-${at}`, role: "row", "aria-rowindex": at + 2, "aria-selected": String(params.get("step") === step.id), onclick: () => choose(at) },
      h("span", { class: "step-what", role: "gridcell" }, statusMark(step.status), h("span", { class: "muted num" }, `#${item.number}`), line(item.title, "step-title clip", 160), step.attempts > 1 && h("span", { class: "badge" }, `${step.attempts} ATTEMPTS`)),
      h("span", { class: "step-error clip", role: "gridcell", title: oneLine(item.error, 400) }, item.error && line(item.error.replace(OWN_CLASS, ""), "", 240)),
      h("span", { class: "item-time num", role: "gridcell", title: item.queued ? `After ${formatDuration(item.queued)} in the queue` : null }, h("i", { vars: { "--part": String((item.ms ?? 0) / longest) }, class: step.status === "failed" ? "bad" : null }), formatDuration(item.ms)),
      h("span", { class: "num", role: "gridcell", title: formatCount(item.tokens) }, formatShort(item.tokens)));
  }

  /** @param {number} at */
  function choose(at) {
    const item = shown[at];
    if (item) app.go({ params: { step: item.step.id } }, true);
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
    return id === null ? -1 : shown.findIndex((item) => item.step.id === id);
  }

  /** @param {boolean} [isNew] */
  function draw(isNew = false) {
    if (!isNew && version === model.version) return;
    version = model.version;
    const known = new Map();
    for (const step of model.steps.values()) if (isOfTree(step)) known.set(step.level ?? 0, (known.get(step.level ?? 0) ?? 0) + 1);
    const first = known.keys().next().value ?? 0;
    const level = known.has(Number(params.get("level"))) ? Number(params.get("level")) : first;
    drawLevels(known, level);
    const all = itemsOf(model.steps, level, Date.now());
    const words = (params.get("q") ?? "").toLowerCase();
    const found = words ? all.filter(({ step, number, title, error }) => `#${number} ${step.id} ${title} ${step.agent} ${error}`.toLowerCase().includes(words)) : all;
    const wanted = params.get("status");
    const alike = wanted ? found.filter(({ step }) => step.status === wanted) : found;
    const [from, to] = (params.get("took") ?? "").split("-").map(Number);
    shown = to ? alike.filter(({ step, ms }) => step.ended_at !== null && ms !== null && ms >= (from ?? 0) && ms < to) : alike;
    shown.sort(itemOrder(params.get("sort") ?? ""));
    longest = all.reduce((most, { ms }) => Math.max(most, ms ?? 0), 1);
    drawChips(found, wanted);
    drawTimes(alike, to ? `${from}-${to}` : "");
    const failed = shown.filter(({ step }) => step.status === "failed").length;
    retry.hidden = !failed || !model.run.item_retry || level !== 0;
    fill(retry, icon("play"), failed === 1 ? "Retry this item…" : `Retry these ${formatCount(failed)}…`);
    const word = level === 0 ? "item" : "reduce";
    const left = Object.values(model.run.counts).reduce((sum, one) => sum + one, 0) - model.steps.size;
    count.textContent = `${shown.length === all.length ? "" : `${formatCount(shown.length)} of `}${countOf(all.length, word)}${model.isFile && left > 0 ? `; the file has no details of ${countOf(left, "more step")}` : ""}`;
    batches.textContent = batchesWord(model.run.batches ?? []);
    const [sort, isReversed] = [(params.get("sort") ?? "").replace(/^-/, ""), params.get("sort")?.startsWith("-")];
    for (const cell of head.children) {
      const isSorted = /** @type {HTMLElement} */ (cell).dataset.column === sort;
      const isFalling = (sort === "duration" || sort === "tokens") !== Boolean(isReversed);
      if (isSorted) cell.setAttribute("aria-sort", isFalling ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    box.setAttribute("aria-rowcount", String(shown.length + 1));
    empty.hidden = shown.length > 0;
    box.hidden = shown.length === 0;
    if (!shown.length) fill(empty, all.length ? emptyState({ symbol: "search", title: "No matching item", text: "Use fewer words, or another status or duration.", action: h("button", { class: "button", type: "button", onclick: () => app.go({ params: { q: null, status: null, took: null } }) }, "Show all items") }) : emptyState({ title: "No items yet", text: "Items appear when the run reads them." }));
    list.set(shown);
    const at = chosenAt();
    if (at >= 0) box.setAttribute("aria-activedescendant", `row-${at}`);
    else box.removeAttribute("aria-activedescendant");
  }

  /**
   * @param {Map<number, number>} known
   * @param {number} level
   */
  function drawLevels(known, level) {
    const choices = [...known].sort(([a], [b]) => a - b).map(([one, many]) => /** @type {[string, string]} */ ([String(one), `${one === 0 ? "Items" : `Reduce ${one}`} ×${formatCount(many)}`]));
    const state = JSON.stringify([choices, level]);
    if (levels.dataset.state === state) return;
    levels.dataset.state = state;
    fill(levels, choices.length > 1 && segmented("Level", choices, String(level), (value) => app.go({ params: { level: value, status: null, took: null, step: null } })));
  }

  /**
   * @param {Item[]} items
   * @param {string|null} wanted
   */
  function drawChips(items, wanted) {
    /** @type {Record<string, number>} */
    const counts = {};
    for (const { step } of items) counts[step.status] = (counts[step.status] ?? 0) + 1;
    const statuses = STATUSES.filter((status) => counts[status] || status === wanted);
    syncChildren(chips, statuses.length > 1 || wanted ? statuses : [], (status) => status,
      (status) => h("button", { class: "chip", type: "button", "aria-pressed": String(status === wanted), onclick: () => app.go({ params: { status: params.get("status") === status ? null : status } }, true) }, `${formatCount(counts[status] ?? 0)} ${statusWord(status)}`),
      (chip, status) => {
        chip.textContent = `${formatCount(counts[status] ?? 0)} ${statusWord(status)}`;
        chip.setAttribute("aria-pressed", String(status === wanted));
      });
  }

  /**
   * @param {Item[]} items
   * @param {string} wanted
   */
  function drawTimes(items, wanted) {
    const found = histogramOf(items);
    const state = JSON.stringify([found, wanted]);
    if (times.dataset.state === state) return;
    times.dataset.state = state;
    times.hidden = found === null || found.bins.length < 2;
    if (found === null) return;
    const { bins, middle, most } = found;
    const highest = Math.max(...bins.map((bin) => bin.count));
    const chosenBar = Math.max(0, bins.findIndex((bin) => `${bin.from}-${bin.to}` === wanted));
    const bars = h("div", { class: "bars", role: "group", "aria-label": "Durations" }, bins.map((bin, at) => {
      const range = `${bin.from}-${bin.to}`;
      const words = `${formatDuration(bin.from)} to ${formatDuration(bin.to)}: ${formatCount(bin.count)}${bin.failed ? `, ${formatCount(bin.failed)} failed` : ""}`;
      return h("button", { class: "bar", type: "button", title: words, "aria-label": words, "aria-pressed": String(range === wanted), tabindex: at === chosenBar ? 0 : -1, onclick: () => app.go({ params: { took: range === wanted ? null : range } }, true) },
        h("i", { vars: { "--part": String(bin.count ? Math.max(0.03, bin.count / highest) : 0), "--failed-part": String(bin.count ? bin.failed / bin.count : 0) } }));
    }));
    bars.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = step && /** @type {HTMLElement|undefined} */ (bars.children[[...bars.children].indexOf(/** @type {Element} */ (document.activeElement)) + step]);
      if (!next) return;
      event.preventDefault();
      event.stopPropagation();
      for (const bar of bars.children) /** @type {HTMLElement} */ (bar).tabIndex = bar === next ? 0 : -1;
      next.focus();
    });
    fill(times, h("p", {}, "Half take at most ", h("strong", {}, formatDuration(middle)), ", 95 of 100 at most ", h("strong", {}, formatDuration(most)), ", the slowest ", h("strong", {}, formatDuration(found.longest)), "."),
      bars, h("div", { class: "bar-ends", "aria-hidden": "true" }, h("span", {}, formatDuration(bins[0]?.from)), found.isGrowing && h("span", {}, "longer bars of time to the right"), h("span", {}, formatDuration(found.longest))));
  }

  box.addEventListener("keydown", (event) => {
    if (event.target !== box) return;
    const act = { ...moveKeys(move, shown.length), Enter: () => document.querySelector(".side")?.querySelector("button")?.focus() }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  });
  draw(true);
  window.requestAnimationFrame(() => {
    const at = chosenAt();
    if (at >= 0) list.reveal(at);
  });
  return {
    element,
    draw: () => draw(),
    update(now) {
      const isNew = ["q", "status", "level", "sort", "took"].some((key) => params.get(key) !== now.params.get(key));
      params = now.params;
      if (field.value !== (params.get("q") ?? "")) field.value = params.get("q") ?? "";
      draw(isNew);
      const at = chosenAt();
      if (at >= 0) box.setAttribute("aria-activedescendant", `row-${at}`);
      if (isNew) box.scrollTop = 0;
      else list.redraw();
    },
    close: () => list.close(),
    keys: { j: () => move(1), k: () => move(-1) },
  };
}
