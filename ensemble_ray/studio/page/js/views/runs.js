// The list of runs: searched and filtered by the address, newest first, page by page.

import { fill, h, icon, syncChildren } from "../dom.js";
import { formatAgo, formatCost, formatCount, formatDuration, formatShort, formatTime, statusWord } from "../format.js";
import { formatRoute } from "../router.js";
import { oneLine } from "../text.js";
import { emptyState, failureState, line, messageOf, staleNotice, statusMark, toast } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").RunRow} RunRow */
/** @typedef {import("../types.js").View} View */

const PAGE = 50;
/** How often the first page is asked for again, ms. */
const EVERY = 3000;
/** After how long a search that still reads records empties the list, ms. */
const SEARCHING = 250;
const STATUSES = ["running", "waiting", "completed", "failed", "interrupted", "cancelled", "budget_exhausted", "accepted", "rejected"];
/** Words before a colon in the search that are filters of their own. */
const FILTERS = ["status", "ensemble", "tag", "since"];

/**
 * Take `status:failed tag:"for:two docs" words` apart.
 * @param {string} text
 * @returns {Record<string, string|null>}
 */
export function parseSearch(text) {
  /** @type {Record<string, string|null>} */
  const found = { q: null, ensemble: null, tag: null, since: null };
  const words = [];
  // A quotation mark that is not closed yet, since somebody types, goes to the end.
  for (const [word] of text.matchAll(/\w+:"[^"]*(?:"|$)|\S+/g)) {
    const [, key = "", quoted, plain = ""] = /^(\w+):(?:"([^"]*)"?$|(.+)$)/.exec(word) ?? [];
    if (FILTERS.includes(key)) found[key] = (quoted ?? plain).trim();
    else words.push(word);
  }
  found.q = words.join(" ") || null;
  return found;
}

/** @param {URLSearchParams} params */
function searchText(params) {
  const parts = ["ensemble", "tag", "since"].map((key) => [key, params.get(key)]).filter(([, value]) => value).map(([key, value]) => `${key}:${/\s/.test(value ?? "") ? `"${value}"` : value}`);
  return [...parts, params.get("q") ?? ""].join(" ").trim();
}

/**
 * @param {App} app
 * @param {Route} route
 * @returns {View}
 */
export function runsView(app, route) {
  let params = route.params;
  /** @type {RunRow[]} */
  let rows = [];
  /** @type {string|null} */
  let next = null;
  let selected = -1;
  let asked = 0;
  let isAsking = false;

  const field = h("input", { class: "field grow", type: "search", "data-search": "", placeholder: "Search runs, or ensemble:name tag:for since:2026-11-01", "aria-label": "Search runs", value: searchText(params), oninput: () => {
    window.clearTimeout(typing);
    typing = window.setTimeout(() => app.go({ params: parseSearch(field.value) }, true), 250);
  } });
  let typing = 0;
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Filter by status" });
  const head = h("div", { class: "run-columns", "aria-hidden": "true" }, ["", "Run", "Duration", "Tokens", "Cost", "Started"].map((word) => h("span", {}, word)));
  const list = h("div", { class: "runs", role: "list", "aria-label": "Runs" });
  const foot = h("div", { class: "list-foot" });
  const total = h("p", { class: "num" });
  const notice = staleNotice();
  const element = h("div", { class: "page" }, notice.element, h("div", { class: "content" },
    h("div", { class: "page-head" }, h("h1", {}, "Runs"), total),
    h("div", { class: "filters" }, h("div", { class: "search" }, icon("search"), field), chips),
    h("div", { class: "card" }, head, list, foot),
  ));

  function drawChips() {
    const chosen = new Set((params.get("status") ?? "").split(",").filter(Boolean));
    fill(chips, h("button", { class: "chip", type: "button", "aria-pressed": String(chosen.size === 0), onclick: () => app.go({ params: { status: null } }, true) }, "All"),
      STATUSES.filter((status, at) => at < 6 || chosen.has(status)).map((status) => h("button", { class: "chip", type: "button", "aria-pressed": String(chosen.has(status)), onclick: () => {
        if (!chosen.delete(status)) chosen.add(status);
        app.go({ params: { status: [...chosen].join(",") || null } }, true);
      } }, statusWord(status))));
  }

  /** @param {RunRow} row */
  function make(row) {
    const link = h("a", { class: "run", role: "listitem", href: formatRoute({ view: "run", run: row.run_id }), tabindex: -1 });
    update(link, row);
    return link;
  }

  /**
   * @param {HTMLElement} link
   * @param {RunRow} row
   */
  function update(link, row) {
    const now = Date.now();
    const text = JSON.stringify(row) + (row.ended_at === null || now - row.created_at < 3_600_000 ? Math.floor(now / 5000) : "");
    if (link.dataset.drawn === text) return;
    link.dataset.drawn = text;
    const spent = row.duration_ms ?? (row.status === "running" ? now - row.created_at : null);
    const marks = [
      row.open_reviews ? h("span", { class: "status is-waiting" }, icon("person"), `${row.open_reviews} to review`) : null,
      row.origin_run ? h("span", { class: "badge", title: `Fork of ${row.origin_run}` }, "FORK") : null,
    ];
    const tags = Object.entries(row.tags).slice(0, 3).map(([key, value]) => h("span", { class: "tag wide", title: oneLine(`${key}: ${value}`) }, oneLine(value && value !== "true" ? `${key}: ${value}` : key, 40)));
    fill(link,
      statusMark(row.status),
      h("span", { class: "run-what" },
        h("span", { class: "row" }, line(row.ensemble || "Unnamed team", "run-name clip", 120), h("span", { class: "run-id mono clip" }, row.run_id), marks, tags),
        line(row.summary || statusWord(row.status), "run-summary clip")),
      h("span", { class: "num" }, formatDuration(spent)),
      h("span", { class: "num" }, formatShort(row.tokens)),
      h("span", { class: "num" }, formatCost(row.cost)),
      h("time", { class: "num", datetime: new Date(row.created_at).toISOString(), title: formatTime(row.created_at) }, formatAgo(row.created_at, now)));
  }

  function draw() {
    syncChildren(list, rows, (row) => row.run_id, make, update);
    const isFiltered = [...params.values()].some(Boolean);
    head.hidden = rows.length === 0;
    if (rows.length) {
      fill(foot, next && h("button", { class: "button", type: "button", onclick: () => void more() }, "Show more"));
      if (list.querySelector("[tabindex='0']") === null) list.firstElementChild?.setAttribute("tabindex", "0");
    } else if (isFiltered) {
      fill(foot, emptyState({ symbol: "search", title: "No matching run", text: "Remove a filter, or use fewer words.", action: h("button", { class: "button", type: "button", onclick: () => {
        field.value = "";
        app.go({ params: { q: null, status: null, ensemble: null, tag: null, since: null } }, true);
      } }, "Show all runs") }));
    } else {
      fill(foot, emptyState({ title: "No runs yet", text: "Start a run in a terminal, or call run() in a program:", command: "ensemble-ray run team.yaml" }));
    }
    foot.hidden = foot.childElementCount === 0;
  }

  /** @param {boolean} isFirst */
  async function load(isFirst) {
    if (isAsking && !isFirst) return; // what is asked for may take longer than the list is looked at again
    asked += 1;
    const mine = asked;
    isAsking = true;
    const later = isFirst ? window.setTimeout(() => mine === asked && drawSearching(), SEARCHING) : 0;
    try {
      let page = await app.source.runs(params, null, Math.min(Math.max(PAGE, isFirst ? 0 : rows.length), 200));
      // A search reads so many records a page, and may have found nothing in the first ones.
      while (mine === asked && !page.runs.length && page.next_cursor) page = await app.source.runs(params, page.next_cursor, PAGE);
      if (mine !== asked) return;
      if (isFirst || rows.length <= page.runs.length) {
        rows = page.runs;
        next = page.next_cursor;
      } else {
        const fresh = new Set(page.runs.map((row) => row.run_id));
        rows = [...page.runs, ...rows.filter((row) => !fresh.has(row.run_id))];
      }
      notice.clear();
      total.textContent = page.total_known ? `${formatCount(page.total_known)} recorded` : "";
      draw();
    } catch (error) {
      if (mine !== asked) return;
      if (!isFirst && rows.length) notice.tell(error);
      else {
        empty();
        fill(foot, failureState(error, () => void load(true)));
      }
    } finally {
      window.clearTimeout(later);
      if (mine === asked) isAsking = false;
    }
  }

  /** Show no rows, and the foot instead. */
  function empty() {
    rows = [];
    next = null;
    notice.clear();
    fill(list);
    head.hidden = true;
    foot.hidden = false;
  }

  function drawSearching() {
    empty();
    fill(foot, h("p", { class: "loading", role: "status" }, "Searching…"));
  }

  async function more() {
    if (!next) return;
    const wanted = params;
    /** @type {import("../types.js").RunList} */
    let page;
    try {
      page = await app.source.runs(wanted, next, PAGE);
    } catch (error) {
      toast(messageOf(error), true);
      return;
    }
    if (wanted !== params) return; // something else is looked for by now
    const known = new Set(rows.map((row) => row.run_id));
    rows = [...rows, ...page.runs.filter((row) => !known.has(row.run_id))];
    next = page.next_cursor;
    draw();
  }

  /** @param {number} by */
  function move(by) {
    const links = /** @type {HTMLElement[]} */ ([...list.children]);
    const at = links.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    selected = Math.min(links.length - 1, Math.max(0, (at >= 0 ? at : selected) + by));
    for (const link of links) link.tabIndex = -1;
    const link = links[selected];
    if (!link) return;
    link.tabIndex = 0;
    link.focus();
  }

  list.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      move(event.key === "ArrowDown" ? 1 : -1);
    }
  });
  app.setTitle("Runs");
  drawChips();
  void load(true);
  const timer = window.setInterval(() => document.hidden || void load(false), EVERY);
  return {
    element,
    update(now) {
      const text = String(now.params);
      if (text === String(params)) return;
      params = now.params;
      if (document.activeElement !== field) field.value = searchText(params);
      drawChips();
      void load(true);
    },
    close: () => window.clearInterval(timer),
    keys: { j: () => move(1), k: () => move(-1) },
  };
}
