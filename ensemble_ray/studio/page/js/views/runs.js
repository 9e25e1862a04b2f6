// The list of runs: a table that the address searches, filters, sorts and groups, page by page.

import { fill, h, icon, syncChildren } from "../dom.js";
import { countOf, formatAgo, formatCost, formatCount, formatDuration, formatStart, formatTime, formatTokens, runLine, runName, statusTone, statusWord, tokensTitle } from "../format.js";
import { formatRoute } from "../router.js";
import { oneLine } from "../text.js";
import { cancelRuns, deleteRuns, exportRun, resumeRuns } from "../ui/actions.js";
import { emptyState, failureState, line, menu, messageOf, progress, staleNotice, statusMark, toast } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").RunGroup} RunGroup */
/** @typedef {import("../types.js").RunList} RunList */
/** @typedef {import("../types.js").RunRow} RunRow */
/** @typedef {import("../types.js").View} View */
/** @typedef {import("../dom.js").Child} Child */
/**
 * A column of the table.
 * @typedef {object} Column
 * @property {string} key
 * @property {string} word
 * @property {number} width px
 * @property {string} [sort] key of the server
 * @property {boolean} [isNumber]
 * @property {(row: RunRow, now: number, longest: number) => Child|Child[]} draw
 */

const PAGE = 50;
/** How often the first page is asked for again; and while the server still reads records, ms. */
const [EVERY, READING] = [3000, 150];
/** After how long a search that still reads records empties the list, ms. */
const SEARCHING = 250;
const STATUSES = ["running", "waiting", "completed", "failed", "interrupted", "cancelled", "budget_exhausted", "accepted", "rejected"];
const ACTIVE = ["accepted", "running"];
/** Tags that have a place in a row of two lines. */
const TAGS = 2;
/** Words before a colon in the search that are filters of their own. */
const FILTERS = ["status", "ensemble", "tag", "since", "until"];
const GROUPS = /** @type {[string, string][]} */ ([["", "No groups"], ["team", "Team"], ["tag", "Tag"], ["error", "Error"]]);
const NO_GROUP = /** @type {Record<string, string>} */ ({ team: "Unnamed team", tag: "No tag", error: "No error" });
const CHOSEN = "ensemble-ray-run-columns";

/** @type {Column[]} */
const COLUMNS = [
  { key: "inputs", word: "Inputs", width: 220, draw: (row) => line(row.subject || "–", "clip", 200) },
  { key: "output", word: "Output or error", width: 260, draw: (row) => line(row.failure || row.summary || "–", row.failure ? "clip bad" : "clip", 200) },
  { key: "state", word: "State", width: 120, sort: "state", draw: (row) => statusWord(row.status) },
  { key: "tags", word: "Tags", width: 170, draw: drawTags },
  { key: "duration", word: "Duration", width: 132, sort: "duration", isNumber: true, draw: (row, now, longest) => {
    const spent = spentOf(row, now);
    return [h("i", { class: "run-bar", "aria-hidden": "true", vars: { "--c": `var(--${statusTone(row.status)})`, "--part": String(longest ? (spent ?? 0) / longest : 0) } }), formatDuration(spent)];
  } },
  { key: "tokens", word: "Tokens", width: 76, sort: "tokens", isNumber: true, draw: (row) => h("span", { title: tokensTitle(row) }, formatTokens(row)) },
  { key: "cost", word: "Cost", width: 84, sort: "cost", isNumber: true, draw: (row) => formatCost(row.cost) },
  { key: "attempts", word: "Attempts", width: 90, sort: "attempts", isNumber: true, draw: (row) => formatCount(row.attempts ?? 1) },
  { key: "started", word: "Started", width: 136, sort: "started", isNumber: true, draw: (row, now) => h("time", { datetime: new Date(row.created_at).toISOString(), title: `${formatTime(row.created_at)}, ${formatAgo(row.created_at, now)}` }, formatStart(row.created_at, now)) },
];
const USUAL = ["tags", "duration", "tokens", "cost", "started"];

/**
 * The first tags, and how many more there are.
 * @param {RunRow} row
 */
function drawTags(row) {
  const words = Object.entries(row.tags).map(([key, value]) => oneLine(value && value !== "true" ? `${key}: ${value}` : key, 40));
  return [...words.slice(0, TAGS).map((word) => h("span", { class: "tag", title: word }, word)), words.length > TAGS && h("span", { class: "tag", title: words.join(", ") }, `+${words.length - TAGS}`)];
}

/**
 * Duration so far.
 * @param {RunRow} row
 * @param {number} now
 */
function spentOf(row, now) {
  return row.duration_ms ?? (row.status === "running" ? Math.max(0, now - row.created_at) : null);
}

/**
 * Take `status:failed tag:"for:two docs" words` apart.
 * @param {string} text
 * @returns {Record<string, string|null>}
 */
export function parseSearch(text) {
  /** @type {Record<string, string|null>} */
  const found = { q: null, ensemble: null, tag: null, since: null, until: null };
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
  const parts = ["ensemble", "tag", "since", "until"].map((key) => [key, params.get(key)]).filter(([, value]) => value).map(([key, value]) => `${key}:${/\s/.test(value ?? "") ? `"${value}"` : value}`);
  return [...parts, params.get("q") ?? ""].join(" ").trim();
}

/**
 * Make the filters in `q` of the address filters of their own, as if they were typed into the field.
 * @param {URLSearchParams} params
 */
function plainParams(params) {
  const plain = new URLSearchParams(params);
  for (const [key, value] of Object.entries(parseSearch(params.get("q") ?? ""))) {
    if (value) plain.set(key, value);
    else if (key === "q") plain.delete("q");
  }
  if (String(plain) !== String(params)) history.replaceState(null, "", formatRoute({ view: "runs", params: plain }));
  return plain;
}

/**
 * What the server is asked for: dates are days of the reader's clock.
 * @param {URLSearchParams} params
 */
function queryOf(params) {
  const query = new URLSearchParams(params);
  for (const [key, days] of /** @type {[string, number][]} */ ([["since", 0], ["until", 1]])) {
    const [, year, month, day] = /^(\d{4})-(\d\d)-(\d\d)$/.exec(params.get(key) ?? "") ?? [];
    if (year) query.set(key, String(new Date(Number(year), Number(month) - 1, Number(day) + days).getTime()));
  }
  return query;
}

/** @returns {Set<string>} */
function chosenColumns() {
  try {
    const kept = JSON.parse(localStorage.getItem(CHOSEN) ?? "null");
    if (Array.isArray(kept)) return new Set(kept.map(String));
  } catch {
    // another program wrote this entry, or the browser keeps none: the usual columns
  }
  return new Set(USUAL);
}

/**
 * @param {App} app
 * @param {Route} route
 * @returns {View}
 */
export function runsView(app, route) {
  let params = plainParams(route.params);
  /** @type {RunRow[]} */
  let rows = [];
  /** @type {RunGroup[]} */
  let groups = [];
  /** Runs of the opened groups, by the group's key. @type {Map<string, RunList>} */
  const opened = new Map();
  /** @type {string|null} */
  let next = null;
  let asked = 0;
  let isAsking = false;
  let longest = 0;
  const chosen = chosenColumns();
  /** @type {Map<string, RunRow>} */
  const selected = new Map();
  const mayChoose = !app.source.isFile;

  const field = h("input", { class: "field grow", type: "search", "data-search": "", placeholder: "Search runs, or ensemble:name tag:for since:2026-11-01", "aria-label": "Search runs", value: searchText(params), oninput: () => {
    window.clearTimeout(typing);
    typing = window.setTimeout(() => app.go({ params: parseSearch(field.value) }, true), 250);
  } });
  let typing = 0;
  const chips = h("div", { class: "chips", role: "group", "aria-label": "Filter by status" });
  const dates = ["since", "until"].map((key) => h("input", { class: "field", type: "date", "data-param": key, "aria-label": key === "since" ? "Started from" : "Started until", onchange: (/** @type {Event} */ event) => app.go({ params: { [key]: /** @type {HTMLInputElement} */ (event.target).value || null } }, true) }));
  const grouping = h("select", { class: "field", "aria-label": "Group by", onchange: () => app.go({ params: { group: grouping.value || null } }, true) }, GROUPS.map(([value, word]) => h("option", { value }, word)));
  const head = h("thead");
  const body = h("tbody");
  const table = h("table", { class: "runs", "aria-label": "Runs", hidden: true }, head, body);
  const foot = h("div", { class: "list-foot" });
  const total = h("p", { class: "num" });
  const bar = h("div", { class: "selection", role: "region", "aria-label": "Selected runs", hidden: true });
  const notice = staleNotice();
  const element = h("div", { class: "page" }, notice.element, h("div", { class: "content" },
    h("div", { class: "page-head" }, h("h1", {}, "Runs"), total),
    h("div", { class: "filters" }, h("div", { class: "search" }, icon("search"), field), chips),
    h("div", { class: "filters", hidden: app.source.isFile }, h("label", { class: "row" }, h("span", { class: "muted" }, "Started"), dates[0]), h("label", { class: "row" }, h("span", { class: "muted" }, "to"), dates[1]), h("label", { class: "row" }, h("span", { class: "muted" }, "Group by"), grouping), h("span", { class: "grow" }), columnMenu()),
    bar,
    h("div", { class: "card" }, h("div", { class: "table-box" }, table), foot),
  ));

  /** @returns {Column[]} */
  const columns = () => COLUMNS.filter((column) => chosen.has(column.key));
  const sorting = () => params.get("sort") ?? "-started";
  /** Number of visible columns: of a telephone the start alone. */
  const width = () => (window.matchMedia("(max-width: 640px)").matches ? Number(chosen.has("started")) : columns().length) + (mayChoose ? 2 : 1);

  function columnMenu() {
    const list = h("div", { class: "menu-list", role: "group", "aria-label": "Columns" }, COLUMNS.map((column) => h("label", { class: "check" }, h("input", { type: "checkbox", checked: chosen.has(column.key), onchange: (/** @type {Event} */ event) => {
      if (/** @type {HTMLInputElement} */ (event.target).checked) chosen.add(column.key);
      else chosen.delete(column.key);
      localStorage.setItem(CHOSEN, JSON.stringify([...chosen]));
      drawHead();
      draw();
    } }), column.word)));
    const made = h("details", { class: "menu" }, h("summary", { class: "button" }, icon("columns"), "Columns"), list);
    /** @param {Event} event */
    const closeOutside = (event) => {
      if (!made.contains(/** @type {Node} */ (event.target))) made.open = false;
    };
    made.addEventListener("toggle", () => {
      for (const kind of ["pointerdown", "focusin"]) document[made.open ? "addEventListener" : "removeEventListener"](kind, closeOutside);
    });
    made.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      made.open = false;
      /** @type {HTMLElement} */ (made.firstElementChild).focus();
    });
    return made;
  }

  /** @param {Record<string, number>} counts */
  function drawChips(counts) {
    const wanted = new Set((params.get("status") ?? "").split(",").filter(Boolean));
    /** @param {string} word @param {number} count @param {boolean} isPressed @param {() => void} act */
    const chip = (word, count, isPressed, act) => h("button", { class: "chip", type: "button", "aria-pressed": String(isPressed), "data-key": word, onclick: act }, word, " ", h("span", { class: "num" }, formatCount(count)));
    const focused = chips.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.key : null;
    fill(chips, chip("All", Object.values(counts).reduce((sum, each) => sum + each, 0), wanted.size === 0, () => app.go({ params: { status: null } }, true)),
      STATUSES.filter((status, at) => at < 6 || counts[status] || wanted.has(status)).map((status) => chip(statusWord(status), counts[status] ?? 0, wanted.has(status), () => {
        if (!wanted.delete(status)) wanted.add(status);
        app.go({ params: { status: [...wanted].join(",") || null } }, true);
      })));
    if (focused) /** @type {HTMLElement|undefined} */ ([...chips.children].find((each) => /** @type {HTMLElement} */ (each).dataset.key === focused))?.focus();
  }

  function drawFilters() {
    for (const input of dates) input.value = /^\d{4}-\d\d-\d\d/.exec(params.get(input.dataset.param ?? "") ?? "")?.[0] ?? "";
    grouping.value = params.get("group") ?? "";
  }

  function drawHead() {
    const sort = sorting();
    /** @param {{key: string, word: string, sort?: string, isNumber?: boolean}} column @param {number|null} px */
    const cell = ({ key, word, sort: by, isNumber }, px) => {
      const direction = sort === by ? "ascending" : sort === `-${by}` ? "descending" : null;
      const isText = by === "name" || by === "state";
      const other = direction === "descending" || (direction === null && isText) ? by : `-${by}`;
      return h("th", { scope: "col", class: `c-${key}${isNumber ? " num" : ""}`, "aria-sort": direction, ...(px ? { vars: { "--w": `${px}px` } } : {}) },
        by ? h("button", { type: "button", "data-sort": by, onclick: () => app.go({ params: { sort: other === "-started" ? null : other ?? null } }, true) }, word, direction && icon(direction === "ascending" ? "up" : "down")) : word);
    };
    const focused = head.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.sort : null;
    const all = h("input", { type: "checkbox", "aria-label": "Select all runs shown", onchange: () => {
      for (const row of shownRows()) select(row, all.checked);
      drawSelection();
    } });
    fill(head, h("tr", {}, mayChoose && h("th", { scope: "col", class: "c-select" }, all), cell({ key: "name", word: "Run", sort: "name" }, null), columns().map((column) => cell(column, column.width))));
    table.style.setProperty("--least", `${360 + columns().reduce((sum, column) => sum + column.width, 0)}px`);
    if (focused) /** @type {HTMLElement|null} */ (head.querySelector(`[data-sort="${focused}"]`))?.focus();
  }

  const shownRows = () => [...rows, ...[...opened.values()].flatMap((list) => list.runs)];

  /** @param {RunRow} row @param {boolean} isSelected */
  function select(row, isSelected) {
    if (isSelected) selected.set(row.run_id, row);
    else selected.delete(row.run_id);
  }

  function drawSelection() {
    for (const box of /** @type {NodeListOf<HTMLInputElement>} */ (body.querySelectorAll("input[data-run]"))) box.checked = selected.has(box.dataset.run ?? "");
    const all = /** @type {HTMLInputElement|null} */ (head.querySelector("input"));
    const shown = shownRows();
    if (all) {
      all.checked = shown.length > 0 && shown.every((row) => selected.has(row.run_id));
      all.indeterminate = !all.checked && selected.size > 0;
    }
    const wanted = [...selected.values()].sort((a, b) => a.created_at - b.created_at);
    const state = JSON.stringify(wanted.map((row) => [row.run_id, row.status, row.can_resume]));
    if (bar.dataset.drawn === state) return;
    bar.dataset.drawn = state;
    bar.hidden = wanted.length === 0;
    const done = () => {
      selected.clear();
      drawSelection();
      void load(false);
    };
    /** @param {string} action @param {(row: RunRow) => boolean} fits */
    const those = (action, fits) => (app.info.actions.includes(action) ? wanted.filter(fits) : []);
    /** @param {string} word @param {string} symbol @param {RunRow[]} some @param {(app: App, rows: RunRow[], done: () => void) => void} act */
    const button = (word, symbol, some, act) => some.length > 0 && h("button", { class: symbol === "play" ? "button" : "button danger", type: "button", onclick: () => act(app, some, done) }, icon(symbol), some.length === wanted.length ? word : `${word} ${formatCount(some.length)} of ${formatCount(wanted.length)}`);
    fill(bar, h("strong", {}, `${countOf(wanted.length, "run")} selected`),
      wanted.length === 2 && h("a", { class: "button", href: formatRoute({ view: "compare", params: { a: wanted[0]?.run_id, b: wanted[1]?.run_id } }) }, icon("compare"), "Compare"),
      button("Continue", "play", those("resume", (row) => row.can_resume === true), resumeRuns),
      button("End", "stop", those("cancel", (row) => [...ACTIVE, "waiting", "interrupted"].includes(row.status)), cancelRuns),
      button("Delete", "trash", those("delete", (row) => !ACTIVE.includes(row.status)), (one, some, after) => deleteRuns(one, some, () => {
        const gone = new Set(some.map((row) => row.run_id));
        rows = rows.filter((row) => !gone.has(row.run_id));
        for (const list of opened.values()) list.runs = list.runs.filter((row) => !gone.has(row.run_id));
        draw();
        after();
      })),
      menu([icon("export"), "Export"], [["html", "HTML files", "Each opens offline and contains the whole run"], ["json", "JSON", "For programs"]].map(([format = "", label = "", hint = ""]) => ({ label, hint, run: async () => {
        for (const row of wanted) await exportRun(app, row.run_id, format);
      } }))),
      h("span", { class: "grow" }), h("button", { class: "button", type: "button", onclick: () => {
        selected.clear();
        drawSelection();
      } }, "Clear selection"));
  }

  /** @param {RunRow} row */
  function make(row) {
    const element = h("tr", { class: "run", onclick: (/** @type {MouseEvent} */ event) => {
      const isControl = /** @type {Element} */ (event.target).closest("a, label, button");
      if (!isControl && window.getSelection()?.isCollapsed !== false) /** @type {HTMLElement|null} */ (element.querySelector(".run-name"))?.click();
    } });
    update(element, row);
    return element;
  }

  /**
   * @param {HTMLElement} element
   * @param {RunRow} row
   */
  function update(element, row) {
    const now = Date.now();
    const text = JSON.stringify([row, longest, [...chosen]]) + (row.ended_at === null ? Math.floor(now / 3000) : new Date(now).getDate());
    if (element.dataset.drawn === text) return;
    element.dataset.drawn = text;
    const focused = !element.contains(document.activeElement) ? null : document.activeElement?.matches("input") ? "input" : ".run-name";
    const marks = [
      row.open_reviews ? h("span", { class: "status is-waiting" }, icon("person"), `${row.open_reviews} to review`) : null,
      row.origin_run ? h("span", { class: "badge", title: `Fork of ${row.origin_run}` }, "FORK") : null,
    ];
    const box = h("input", { type: "checkbox", "data-run": row.run_id, checked: selected.has(row.run_id), "aria-label": `Select ${row.run_id}`, onchange: () => {
      select(row, box.checked);
      drawSelection();
    } });
    fill(element, mayChoose && h("td", { class: "c-select" }, h("label", {}, box)),
      h("td", { class: "c-name" }, h("div", { class: "run-what" }, statusMark(row.status), h("div", { class: "run-lines" },
        h("div", { class: "row" }, h("a", { class: "run-name clip", href: formatRoute({ view: "run", run: row.run_id }) }, line(runName(row), "", 120)), h("span", { class: "run-id mono clip" }, row.run_id), marks),
        h("div", { class: row.failure ? "run-line bad" : "run-line", title: oneLine(runLine(row)) }, line(runLine(row) || statusWord(row.status), "clip", 240))))),
      columns().map((column) => h("td", { class: `c-${column.key}${column.isNumber ? " num" : ""}` }, column.draw(row, now, longest))));
    if (focused) /** @type {HTMLElement|null} */ (element.querySelector(focused))?.focus({ preventScroll: true });
  }

  /** @param {RunGroup} group */
  function makeGroup(group) {
    const element = h("tr", { class: "group" });
    updateGroup(element, group);
    return element;
  }

  /**
   * @param {HTMLElement} element
   * @param {RunGroup} group
   */
  function updateGroup(element, group) {
    const isOpen = opened.has(group.key);
    const text = JSON.stringify([group, isOpen, width()]);
    if (element.dataset.drawn === text) return;
    element.dataset.drawn = text;
    const isFocused = element.contains(document.activeElement);
    const count = Object.values(group.statuses).reduce((sum, each) => sum + each, 0);
    fill(element, h("th", { scope: "rowgroup", colspan: width() }, h("div", { class: "group-head" },
      h("button", { type: "button", "aria-expanded": String(isOpen), onclick: () => void toggle(group.key) }, icon(isOpen ? "down" : "right"), line(group.key || (NO_GROUP[params.get("group") ?? ""] ?? ""), params.get("group") === "error" && group.key ? "clip bad" : "clip", 300)),
      h("span", { class: "num" }, countOf(count, "run")), progress(group.statuses), h("span", { class: "grow" }), h("time", { class: "num muted", datetime: new Date(group.latest_at).toISOString(), title: formatTime(group.latest_at) }, `last ${formatStart(group.latest_at, Date.now())}`))));
    if (isFocused) element.querySelector("button")?.focus();
  }

  /** @param {string} key */
  async function toggle(key) {
    if (opened.delete(key)) return draw();
    await loadGroup(key, null);
  }

  /**
   * @param {string} key
   * @param {string|null} cursor
   */
  async function loadGroup(key, cursor) {
    const wanted = params;
    const query = queryOf(params);
    query.set("within", key);
    try {
      const page = await app.source.runs(query, cursor, PAGE);
      if (wanted !== params) return;
      const known = cursor === null ? [] : opened.get(key)?.runs ?? [];
      opened.set(key, { ...page, runs: [...known, ...page.runs] });
      draw();
    } catch (error) {
      toast(messageOf(error), true);
    }
  }

  /** @typedef {{group: RunGroup, row?: RunRow, more?: string}} GroupItem */

  function drawGroups() {
    /** @type {GroupItem[]} */
    const items = groups.flatMap((group) => {
      const list = opened.get(group.key);
      return [{ group }, ...(list?.runs ?? []).map((row) => ({ group, row })), ...(list?.next_cursor ? [{ group, more: list.next_cursor }] : [])];
    });
    /** @param {HTMLElement} element @param {GroupItem} item */
    const updateItem = (element, item) => (item.row ? update(element, item.row) : item.more ? undefined : updateGroup(element, item.group));
    syncChildren(body, items, ({ group, row, more }) => JSON.stringify([group.key, row?.run_id, more]), (item) => {
      if (item.row) return make(item.row);
      if (item.more) return h("tr", { class: "group-more" }, h("td", { colspan: width() }, h("button", { class: "button small", type: "button", onclick: () => void loadGroup(item.group.key, item.more ?? null) }, "Show more")));
      return makeGroup(item.group);
    }, updateItem);
  }

  function draw() {
    const now = Date.now();
    longest = Math.max(0, ...shownRows().map((row) => spentOf(row, row.duration_ms === null ? Math.floor(now / 3000) * 3000 : now) ?? 0));
    const isGrouped = Boolean(params.get("group"));
    if (isGrouped) drawGroups();
    else syncChildren(body, rows, (row) => row.run_id, make, update);
    for (const row of shownRows()) if (selected.has(row.run_id)) selected.set(row.run_id, row);
    drawSelection();
    const isEmpty = isGrouped ? groups.length === 0 : rows.length === 0;
    const isFiltered = ["q", "status", "ensemble", "tag", "since", "until"].some((key) => params.get(key));
    table.hidden = isEmpty;
    if (!isEmpty) {
      fill(foot, next && h("button", { class: "button", type: "button", onclick: () => void more() }, "Show more"));
    } else if (isFiltered) {
      fill(foot, emptyState({ symbol: "search", title: "No matching run", text: "Remove a filter, or use fewer words.", action: h("button", { class: "button", type: "button", onclick: () => {
        field.value = "";
        app.go({ params: { q: null, status: null, ensemble: null, tag: null, since: null, until: null } }, true);
      } }, "Show all runs") }));
    } else {
      fill(foot, emptyState({ title: "No runs yet", text: "Start a run in a terminal, or call run() in a program:", command: "ensemble-ray run team.yaml" }));
    }
    foot.hidden = foot.childElementCount === 0;
  }

  /** @param {RunList} page */
  function drawTotal(page) {
    const counts = page.counts ?? {};
    const wanted = (params.get("status") ?? "").split(",").filter(Boolean);
    const count = (wanted.length ? wanted : Object.keys(counts)).reduce((sum, status) => sum + (counts[status] ?? 0), 0);
    const words = !page.total_known ? "" : !page.counts || count === page.total_known ? `${formatCount(page.total_known)} recorded` : `${formatCount(count)} of ${formatCount(page.total_known)} recorded`;
    const text = page.unread ? `${words} · reading ${formatCount(page.unread)} more records…` : words;
    if (total.textContent !== text) total.textContent = text;
    drawChips(counts);
  }

  /** @param {boolean} isFirst */
  async function load(isFirst) {
    if (isAsking && !isFirst) return; // what is asked for may take longer than the list is looked at again
    asked += 1;
    const mine = asked;
    isAsking = true;
    window.clearTimeout(reading);
    const later = isFirst ? window.setTimeout(() => mine === asked && drawSearching(), SEARCHING) : 0;
    try {
      const query = queryOf(params);
      let page = await app.source.runs(query, null, Math.min(Math.max(PAGE, isFirst ? 0 : rows.length), 200));
      // A search reads so many records a page, and may have found nothing in the first ones.
      while (mine === asked && !page.runs.length && page.next_cursor) page = await app.source.runs(query, page.next_cursor, PAGE);
      if (mine !== asked) return;
      groups = page.groups ?? [];
      if (isFirst || rows.length <= page.runs.length || !page.next_cursor) {
        rows = page.runs;
        next = page.next_cursor;
      } else {
        const fresh = new Set(page.runs.map((row) => row.run_id));
        rows = [...page.runs, ...rows.filter((row) => !fresh.has(row.run_id))];
      }
      notice.clear();
      drawTotal(page);
      draw();
      if (!isFirst) for (const [key, list] of opened) if (list.runs.length <= PAGE) void loadGroup(key, null);
      if (page.unread && !document.hidden) reading = window.setTimeout(() => void load(false), READING);
    } catch (error) {
      if (mine !== asked) return;
      if (!isFirst && (rows.length || groups.length)) notice.tell(error);
      else {
        empty();
        fill(foot, failureState(error, () => void load(true)));
      }
    } finally {
      window.clearTimeout(later);
      if (mine === asked) isAsking = false;
    }
  }
  let reading = 0;

  /** Show no rows, and the foot instead. */
  function empty() {
    rows = [];
    groups = [];
    opened.clear();
    next = null;
    notice.clear();
    fill(body);
    table.hidden = true;
    foot.hidden = false;
  }

  function drawSearching() {
    empty();
    fill(foot, h("p", { class: "loading", role: "status" }, "Searching…"));
  }

  async function more() {
    if (!next) return;
    const wanted = params;
    /** @type {RunList} */
    let page;
    try {
      page = await app.source.runs(queryOf(wanted), next, PAGE);
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
    const links = /** @type {HTMLElement[]} */ ([...body.querySelectorAll(".run-name, .group button")]);
    const row = document.activeElement?.closest("tr");
    const at = row ? links.findIndex((link) => row.contains(link)) : -1;
    links[Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
  }

  body.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      move(event.key === "ArrowDown" ? 1 : -1);
    }
  });
  app.setTitle("Runs");
  drawChips({});
  drawFilters();
  drawHead();
  void load(true);
  const timer = window.setInterval(() => document.hidden || void load(false), EVERY);
  return {
    element,
    update(now) {
      const wanted = plainParams(now.params);
      if (String(wanted) === String(params)) return;
      params = wanted;
      if (document.activeElement !== field) field.value = searchText(params);
      opened.clear();
      drawFilters();
      drawHead();
      void load(true);
    },
    close: () => {
      window.clearInterval(timer);
      window.clearTimeout(reading);
    },
    keys: { j: () => move(1), k: () => move(-1), x: () => /** @type {HTMLInputElement|null|undefined} */ (document.activeElement?.closest("tr")?.querySelector("input[data-run]"))?.click() },
  };
}
