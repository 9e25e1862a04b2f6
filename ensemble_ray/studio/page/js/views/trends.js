// Runs, failures, durations, tokens and costs by team and day: small charts, or a table of the same numbers.

import { fill, h, icon, s } from "../dom.js";
import { countOf, formatCount, formatDuration, formatMoney, formatShort, formatTime } from "../format.js";
import { formatRoute } from "../router.js";
import { emptyState, failureState, line, segmented, staleNotice, statusMark } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").TeamTrend} TeamTrend */
/** @typedef {import("../types.js").TrendDay} TrendDay */
/** @typedef {import("../types.js").TrendSums} TrendSums */
/** @typedef {import("../types.js").Trends} Trends */
/** @typedef {import("../types.js").UnusualRun} UnusualRun */
/** @typedef {import("../types.js").View} View */
/**
 * A curve of a chart; null: no run, or unknown.
 * @typedef {{kind: "bar"|"line", tone: string, values: (number|null)[]}} Curve
 */

/** How often trends are requested, ms; after an incomplete answer immediately. */
const EVERY = 15_000;
const PERIODS = /** @type {[string, string][]} */ ([["7", "7 days"], ["30", "30 days"], ["90", "90 days"]]);
const USUAL = "30";
/** Height of a chart in its own units; the width is 10 a day. */
const HEIGHT = 100;

/**
 * @param {TrendSums} sums
 */
function failureRate(sums) {
  const ended = sums.runs - sums.open;
  if (!ended) return "–";
  const part = (sums.failed / ended) * 100;
  return `${part.toFixed(part > 0 && part < 10 ? 1 : 0)} %`;
}

/**
 * A sum of which a part may be unknown.
 * @param {string} text
 * @param {number} unknown
 */
function known(text, unknown) {
  return text === "–" || !unknown ? text : `${text} (${formatCount(unknown)} unknown)`;
}

/** @param {string} day */
function dayWord(day) {
  return new Date(`${day}T00:00Z`).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });
}

/**
 * Dates from the first to the last day.
 * @param {string} first
 * @param {string} last
 */
export function daysBetween(first, last) {
  const days = [];
  for (let at = Date.parse(first); at <= Date.parse(last); at += 86_400_000) days.push(new Date(at).toISOString().slice(0, 10));
  return days;
}

/**
 * Path of a curve; of a line also its points. A line connects neighbouring days only: a day without a value is not zero.
 * @param {Curve} curve
 * @param {number} most
 * @param {boolean} [hasPoints] the points alone
 */
function pathOf({ kind, values }, most, hasPoints = false) {
  const parts = values.map((value, at) => {
    if (value === null || (kind === "bar" && !value)) return "";
    const [x, y] = [at * 10 + 5, HEIGHT - (value / most) * (HEIGHT - 6)];
    if (kind === "bar") return `M${x - 4} ${HEIGHT}V${y}H${x + 4}V${HEIGHT}Z`;
    const before = values[at - 1];
    return hasPoints || before === null || before === undefined ? `M${x} ${y}h.01` : `L${x} ${y}`;
  });
  return parts.join("");
}

/**
 * @param {App} app
 * @param {Route} route
 * @returns {View}
 */
export function trendsView(app, route) {
  let params = route.params;
  /** @type {Trends|null} */
  let found = null;
  let drawn = "";
  let asked = 0;
  let timer = 0;
  let typing = 0;

  const field = h("input", { class: "field grow", type: "search", "data-search": "", placeholder: "Search teams", "aria-label": "Search teams", value: params.get("ensemble") ?? "", oninput: () => {
    window.clearTimeout(typing);
    typing = window.setTimeout(() => app.go({ params: { ensemble: field.value.trim() || null } }, true), 250);
  } });
  const choices = h("div", { class: "row wrap" });
  const total = h("p", { class: "num" });
  const body = h("div", { class: "trends" });
  const notice = staleNotice();
  const element = h("div", { class: "page" }, notice.element, h("div", { class: "content" },
    h("div", { class: "page-head wrap" }, h("h1", {}, "Trends"), total),
    h("div", { class: "filters" }, h("div", { class: "search" }, icon("search"), field), choices), body));

  const days = () => (PERIODS.some(([value]) => value === params.get("days")) ? /** @type {string} */ (params.get("days")) : USUAL);
  const isTable = () => params.get("as") === "table";

  function drawChoices() {
    fill(choices,
      segmented("Period", PERIODS, days(), (value) => app.go({ params: { days: value === USUAL ? null : value } }, true)),
      segmented("Show as", [["chart", "Charts"], ["table", "Table"]], isTable() ? "table" : "chart", (value) => app.go({ params: { as: value === "table" ? value : null } }, true)));
  }

  async function load() {
    asked += 1;
    const mine = asked;
    window.clearTimeout(timer);
    let wait = EVERY;
    try {
      if (!document.hidden || !found) {
        const before = found?.counted ?? -1;
        const now = await app.source.trends(Number(days()), params.get("ensemble") ?? "");
        if (mine !== asked) return;
        found = now;
        if (!now.is_complete && now.counted > before) wait = 0; // more records are read while this page asks
        notice.clear();
        draw();
      }
    } catch (error) {
      if (mine !== asked) return;
      if (found) notice.tell(error);
      else fill(body, failureState(error, () => void load()));
    }
    timer = window.setTimeout(() => void load(), wait);
  }

  function draw() {
    if (!found) return;
    const state = JSON.stringify([found, isTable()]);
    if (state === drawn) return;
    drawn = state;
    const { runs, counted, is_complete, teams, more_teams } = found;
    total.textContent = counted === runs ? `${countOf(runs, "run")} of ${countOf(teams.length + more_teams, "team")}` : `${is_complete ? "The newest" : "Reading records:"} ${formatCount(counted)} of ${countOf(runs, "run")}${is_complete ? " are counted" : ""}`;
    const dates = daysBetween(found.first_day, found.last_day);
    if (teams.length) {
      const at = /** @type {HTMLElement|null} */ (document.activeElement)?.dataset.key;
      fill(body, teams.map((team) => card(team, dates)), more_teams > 0 && h("p", { class: "muted" }, `${countOf(more_teams, "more team")} with fewer runs. Search for a team to see it.`));
      if (at) /** @type {HTMLElement|null} */ (body.querySelector(`[data-key="${CSS.escape(at)}"]`))?.focus();
    } else if (params.get("ensemble")) fill(body, emptyState({ symbol: "search", title: "No matching team", text: "Use fewer letters, or a longer period." }));
    else fill(body, emptyState({ symbol: "trend", title: `No runs in the last ${days()} days`, text: "Select a longer period, or start a run:", command: "ensemble-ray run team.yaml" }));
  }

  /**
   * @param {TeamTrend} team
   * @param {string[]} dates
   */
  function card(team, dates) {
    const { total: sums, currency } = team;
    const facts = [
      ["Runs", formatCount(sums.runs)], ["Failed", sums.failed ? h("strong", { class: "trend-failed" }, `${formatCount(sums.failed)} (${failureRate(sums)})`) : "0"],
      ["p50", formatDuration(sums.p50_ms)], ["p95", formatDuration(sums.p95_ms)],
      ["Tokens", known(formatShort(sums.tokens), sums.tokens_unknown)], ["Cost", known(formatMoney(sums.cost, currency), sums.cost_unknown)],
    ];
    return h("section", { class: "card trend" },
      h("div", { class: "node-title-row" }, h("h2", {}, h("a", { href: formatRoute({ view: "runs", params: { ensemble: team.ensemble } }), "data-key": team.ensemble }, line(team.ensemble || "Unnamed team", "", 120)))),
      h("dl", { class: "facts" }, facts.map(([word, value]) => h("div", {}, h("dt", {}, /** @type {string} */ (word)), h("dd", {}, value)))),
      isTable() ? tableOf(team) : charts(team, dates),
      team.unusual.length > 0 && h("div", { class: "unusual" }, h("h3", {}, "Unusual runs"), h("ul", {}, team.unusual.map((run) => h("li", {}, statusMark(run.status), h("a", { class: "mono", href: formatRoute({ view: "run", run: run.run_id }), "data-key": `${team.ensemble}/${run.run_id}` }, run.run_id), h("span", {}, unusualWords(run, currency)), h("time", { class: "muted num", datetime: new Date(run.created_at).toISOString() }, formatTime(run.created_at)))))));
  }

  /**
   * @param {UnusualRun} run
   * @param {string|null} currency
   */
  function unusualWords(run, currency) {
    const values = { duration: formatDuration(run.duration_ms), tokens: `${formatShort(run.tokens)} tokens`, cost: formatMoney(run.cost, currency) };
    return Object.entries(run.times).map(([measure, times]) => `${values[/** @type {"cost"} */ (measure)]}, ${times} × the median`).join("; ");
  }

  /**
   * @param {TeamTrend} team
   * @param {string[]} dates
   */
  function charts(team, dates) {
    const byDate = new Map(team.days.map((day) => [day.day, day]));
    /** @param {(day: TrendDay) => number|null} value */
    const each = (value) => dates.map((date) => { const day = byDate.get(date); return day ? value(day) : null; });
    /** @param {string|null} cost */
    const amount = (cost) => (cost === null ? null : Number(cost));
    /** @param {number|null} value */
    const money = (value) => formatMoney(value === null ? null : String(value), team.currency);
    /** @param {(day: TrendDay) => string} text */
    const words = (text) => (/** @type {number} */ at) => { const day = byDate.get(/** @type {string} */ (dates[at])); return day ? text(day) : "no runs"; };
    /** @param {"duration"|"tokens"|"cost"} measure @param {(run: UnusualRun) => number|null} value */
    const marks = (measure, value) => team.unusual.filter((run) => run.times[measure]).map((run) => ({ run, value: value(run) ?? 0 }));
    const all = [
      { title: "Runs", legend: [["ran", "runs"], ["failed", "failed"]], curves: [{ kind: "bar", tone: "ran", values: each((day) => day.runs) }, { kind: "bar", tone: "failed", values: each((day) => day.failed) }], text: formatCount, words: words((day) => `${countOf(day.runs, "run")}, ${formatCount(day.failed)} failed`), marks: [] },
      { title: "Duration", legend: [["p50", "p50"], ["p95", "p95"]], curves: [{ kind: "line", tone: "p95", values: each((day) => day.p95_ms) }, { kind: "line", tone: "p50", values: each((day) => day.p50_ms) }], text: formatDuration, words: words((day) => `p50 ${formatDuration(day.p50_ms)}, p95 ${formatDuration(day.p95_ms)}`), marks: marks("duration", (run) => run.duration_ms) },
      { title: "Tokens", legend: [], curves: [{ kind: "line", tone: "p50", values: each((day) => day.tokens) }], text: formatShort, words: words((day) => known(formatCount(day.tokens), day.tokens_unknown)), marks: marks("tokens", (run) => run.tokens) },
      { title: "Cost", legend: [], curves: [{ kind: "line", tone: "p50", values: each((day) => amount(day.cost)) }], text: money, words: words((day) => known(formatMoney(day.cost, team.currency), day.cost_unknown)), marks: marks("cost", (run) => amount(run.cost)) },
    ];
    const at = new Map(dates.map((date, place) => [date, place]));
    return h("div", { class: "trend-charts" }, all.map((one) => chart(team, dates, at, /** @type {Curve[]} */ (one.curves), one)));
  }

  /**
   * @param {TeamTrend} team
   * @param {string[]} dates
   * @param {Map<string, number>} places
   * @param {Curve[]} curves
   * @param {{title: string, legend: string[][], text: (value: number|null) => string, words: (at: number) => string, marks: {run: UnusualRun, value: number}[]}} about
   */
  function chart(team, dates, places, curves, { title, legend, text, words, marks }) {
    const values = [...curves.flatMap((curve) => curve.values), ...marks.map(({ value }) => value)].filter((value) => value !== null);
    const most = Math.max(0, ...values);
    const width = dates.length * 10;
    const read = h("span", { class: "muted num" });
    const figure = h("figure", { class: "trend-chart" }, h("figcaption", {}, h("strong", {}, title), legend.map(([tone, word]) => h("span", { class: "trend-key" }, h("i", { class: `tone-${tone}` }), word)), h("span", { class: "grow" }), read));
    if (!values.length) {
      figure.append(h("p", { class: "trend-none muted" }, title === "Duration" ? "No completed run" : "Unknown"));
      return figure;
    }
    const plot = h("div", { class: "trend-plot" },
      h("span", { class: "trend-most muted num" }, text(most)),
      s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title} of ${team.ensemble || "Unnamed team"} by day, at most ${text(most)}. The table has the same.` },
        curves.map((curve) => [s("path", { class: `trend-${curve.kind} tone-${curve.tone}`, d: pathOf(curve, most || 1) }), curve.kind === "line" ? s("path", { class: "trend-line trend-point tone-p50", d: pathOf(curve, most || 1, true) }) : null]).flat()),
      marks.map(({ run, value }) => {
        const place = places.get(dayOf(run.created_at)) ?? 0;
        const label = `${run.run_id}: ${unusualWords(run, team.currency)}`;
        return h("a", { class: "trend-mark", href: formatRoute({ view: "run", run: run.run_id }), "aria-label": label, title: label, vars: { "--x": `${((place + 0.5) / dates.length) * 100}%`, "--y": `${100 - (value / (most || 1)) * (HEIGHT - 6)}%` } });
      }));
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const at = Math.min(dates.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * dates.length)));
      read.textContent = `${dayWord(/** @type {string} */ (dates[at]))}: ${words(at)}`;
    });
    plot.addEventListener("pointerleave", () => {
      read.textContent = "";
    });
    figure.append(plot, h("div", { class: "trend-axis muted" }, h("span", {}, dayWord(/** @type {string} */ (dates[0]))), h("span", {}, dayWord(/** @type {string} */ (dates.at(-1))))));
    return figure;
  }

  /** @param {TeamTrend} team */
  function tableOf(team) {
    const rows = [...team.days].reverse().map((day) => {
      const link = formatRoute({ view: "runs", params: { ensemble: team.ensemble, since: String(day.since), until: String(day.since + 86_400_000) } });
      return h("tr", {}, h("th", { scope: "row" }, h("a", { href: link, "data-key": `${team.ensemble}/${day.day}` }, day.day)), h("td", { class: "num" }, formatCount(day.runs)), h("td", { class: "num" }, formatCount(day.failed)), h("td", { class: "num" }, failureRate(day)),
        h("td", { class: "num" }, formatDuration(day.p50_ms)), h("td", { class: "num" }, formatDuration(day.p95_ms)), h("td", { class: "num" }, known(formatCount(day.tokens), day.tokens_unknown)), h("td", { class: "num" }, known(formatMoney(day.cost, team.currency), day.cost_unknown)));
    });
    return h("div", { class: "table-box" }, h("table", { class: "data" }, h("caption", { class: "sr" }, `Runs of ${team.ensemble || "Unnamed team"} by day`),
      h("thead", {}, h("tr", {}, ["Day", "Runs", "Failed", "Error rate", "p50", "p95", "Tokens", "Cost"].map((word, at) => h("th", { scope: "col", class: at ? "num" : null }, word)))), h("tbody", {}, rows)));
  }

  app.setTitle("Trends");
  drawChoices();
  void load();
  return {
    element,
    update(now) {
      if (String(now.params) === String(params)) return;
      const [before, was] = [days(), params.get("ensemble")];
      params = now.params;
      if (document.activeElement !== field) field.value = params.get("ensemble") ?? "";
      if (!choices.contains(document.activeElement)) drawChoices();
      if (before === days() && was === params.get("ensemble")) return draw();
      found = null;
      void load();
    },
    close() {
      asked += 1;
      window.clearTimeout(timer);
      window.clearTimeout(typing);
    },
  };
}

/**
 * The reader's date of an instant, with the present offset from UTC, as the server counts days.
 * @param {number} at
 */
function dayOf(at) {
  return new Date(at - new Date().getTimezoneOffset() * 60_000).toISOString().slice(0, 10);
}
