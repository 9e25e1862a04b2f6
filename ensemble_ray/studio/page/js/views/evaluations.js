// Evaluations: the list, or one with its cases side by side, beside another evaluation.

import { fill, h } from "../dom.js";
import { countOf, formatAgo, formatCount, formatDuration, formatMoney } from "../format.js";
import { formatRoute } from "../router.js";
import { emptyState, failureState, line, progress, staleNotice, statusMark, textBlock } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").View} View */
/** @typedef {import("../types.js").Evaluations} Evaluations */
/** @typedef {import("../types.js").EvaluationRow} EvaluationRow */
/** @typedef {import("../types.js").EvaluationDetail} EvaluationDetail */
/** @typedef {import("../types.js").EvaluationCase} EvaluationCase */
/** @typedef {import("../types.js").EvaluationRun} EvaluationRun */

/** How often the list is requested, ms; after an incomplete answer immediately. */
const EVERY = 15_000;
const SHOWN_CASES = 100;

/** @param {number|null|undefined} value */
function scoreText(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

/**
 * @param {App} app
 * @param {Route} route
 * @returns {View}
 */
export function evaluationsView(app, route) {
  let params = route.params;
  let asked = 0;
  let timer = 0;
  let shownCases = SHOWN_CASES;
  /** @type {Evaluations|null} */
  let list = null;
  /** @type {EvaluationDetail|null} */
  let detail = null;

  const title = h("h1", {}, "Evaluations");
  const total = h("p", { class: "num" });
  const choices = h("div", { class: "filters", hidden: true });
  const body = h("div", { class: "evaluations" });
  const notice = staleNotice();
  const element = h("div", { class: "page" }, notice.element, h("div", { class: "content" }, h("div", { class: "page-head wrap" }, title, total), choices, body));

  async function load() {
    asked += 1;
    const mine = asked;
    window.clearTimeout(timer);
    const [id, compare] = [params.get("id"), params.get("compare") ?? ""];
    let wait = EVERY;
    try {
      if (!document.hidden || (!list && !detail)) {
        const found = await app.source.evaluations();
        if (mine !== asked) return;
        const isNews = JSON.stringify(found) !== JSON.stringify(list);
        list = found;
        if (!found.is_complete) wait = 0; // more records are read while this page asks
        if (id && (detail?.id !== id || (detail.compared ?? "") !== compare)) {
          if (detail?.id !== id) fill(body, h("p", { class: "loading" }, "Loading…"));
          const one = await app.source.evaluation(id, compare);
          if (mine !== asked) return;
          detail = one;
          shownCases = SHOWN_CASES;
          drawDetail(one);
        } else if (!id && isNews) drawList(found);
        if (id && isNews) drawChoices(id);
        notice.clear();
      }
    } catch (error) {
      if (mine !== asked) return;
      if (detail || (list && !id)) notice.tell(error);
      else fill(body, failureState(error, () => void load()));
    }
    if (!detail || wait === 0) timer = window.setTimeout(() => void load(), wait);
  }

  /** @param {Evaluations} found */
  function drawList(found) {
    app.setTitle("Evaluations");
    fill(title, "Evaluations");
    choices.hidden = true;
    total.textContent = found.is_complete ? countOf(found.evaluations.length + found.more, "evaluation") : "Reading records";
    if (!found.evaluations.length) {
      if (found.is_complete) fill(body, emptyState({ symbol: "trend", title: "No evaluations", text: "Run a team on cases, and score its outputs:", command: "ensemble-ray eval team.yaml cases.jsonl --scorer exact" }));
      return;
    }
    const focused = body.contains(document.activeElement) ? document.activeElement?.getAttribute("href") : null;
    fill(body,
      h("section", { class: "card" }, h("div", { class: "table-box" }, h("table", { class: "data" }, h("caption", { class: "sr" }, "Evaluations"),
        h("thead", {}, h("tr", {}, ["Evaluation", "Team", "Runs", "Means", "Started"].map((word) => h("th", { scope: "col" }, word)))),
        h("tbody", {}, found.evaluations.map(rowOf))))),
      found.more > 0 && h("p", { class: "muted" }, `${countOf(found.more, "older evaluation")} not shown`));
    stops().find((link) => link.getAttribute("href") === focused)?.focus();
  }

  /**
   * Links of the list, or headings of the cases.
   * @returns {HTMLElement[]}
   */
  function stops() {
    return [...body.querySelectorAll(".evaluations tbody th a, .case h2")].map((each) => /** @type {HTMLElement} */ (each));
  }

  /** @param {number} step */
  function move(step) {
    const all = stops();
    const here = document.activeElement?.closest("tr, .case");
    const at = all.findIndex((each) => here?.contains(each));
    all[at < 0 ? 0 : Math.min(Math.max(at + step, 0), all.length - 1)]?.focus();
  }

  /** @param {EvaluationRow} row */
  function rowOf(row) {
    const address = row.has_result ? formatRoute({ view: "evaluations", params: { id: row.id } }) : formatRoute({ view: "runs", params: { tag: `evaluation:${row.id}` } });
    const means = Object.entries(row.means).map(([scorer, mean]) => h("span", { class: "mean num" }, line(scorer, "muted", 40), ` ${scoreText(mean)}`));
    return h("tr", {},
      h("th", { scope: "row" }, h("a", { class: "mono", href: address }, row.id)), h("td", {}, line(row.team, "", 60)), h("td", {}, progress(row.runs)),
      h("td", {}, row.has_result ? h("div", { class: "row wrap" }, means) : h("span", { class: "muted" }, "Not at its end: runs only")),
      h("td", { class: "muted num" }, formatAgo(row.created_at, Date.now())));
  }

  /** @param {string} id */
  function drawChoices(id) {
    const others = (list?.evaluations ?? []).filter((row) => row.has_result && row.id !== id);
    const chosen = params.get("compare") ?? "";
    const focused = choices.contains(document.activeElement) ? document.activeElement?.tagName : null;
    choices.hidden = false;
    fill(choices,
      h("a", { href: formatRoute({ view: "evaluations" }) }, "All evaluations"),
      h("label", { class: "row" }, "Compare with ", h("select", { class: "field", "aria-label": "Compare with", onchange: (/** @type {Event} */ event) => app.go({ params: { compare: /** @type {HTMLSelectElement} */ (event.target).value || null } }) },
        h("option", { value: "" }, "none"), others.map((row) => h("option", { value: row.id, selected: row.id === chosen }, row.id)),
        chosen && !others.some((row) => row.id === chosen) && h("option", { value: chosen, selected: true }, chosen))));
    if (focused) /** @type {HTMLElement|null} */ (choices.querySelector(focused))?.focus();
  }

  /** @param {EvaluationDetail} found */
  function drawDetail(found) {
    app.setTitle(`Evaluation ${found.id}`);
    fill(title, "Evaluation ", h("span", { class: "mono" }, found.id));
    total.textContent = `${countOf(found.cases.length + found.more_cases, "case")} of ${found.team}, ${countOf(found.runs, "run")}`;
    drawChoices(found.id);
    /** @type {[string, string|HTMLElement][]} */
    const facts = [
      ["Runs without an output", found.errors ? h("strong", { class: "bad" }, formatCount(found.errors)) : "0"], ["p50", formatDuration(found.p50_ms)], ["p95", formatDuration(found.p95_ms)],
      ["Tokens", formatCount(found.tokens)], ["Cost", formatMoney(found.cost || null, found.currency)], ["Judges", formatMoney(found.judge_cost || null, found.currency)],
    ];
    fill(body,
      h("section", { class: "card" }, h("dl", { class: "facts" }, facts.map(([word, value]) => h("div", {}, h("dt", {}, word), h("dd", {}, value)))), scoreTable(found)),
      found.compared && h("section", { class: "card" }, h("h2", { class: "card-title" }, `Compared with ${found.compared}`), comparisonTable(found)),
      found.cases.slice(0, shownCases).map((one) => caseCard(one, found)),
      found.cases.length > shownCases && h("button", { class: "button", type: "button", onclick: () => {
        shownCases += SHOWN_CASES;
        drawDetail(found);
        stops()[shownCases - SHOWN_CASES]?.focus();
      } }, "More cases"),
      found.more_cases > 0 && h("p", { class: "muted" }, `${countOf(found.more_cases, "more case")} not shown: ensemble-ray eval --json has all of them`));
  }

  /** @param {EvaluationDetail} found */
  function scoreTable(found) {
    return h("div", { class: "table-box" }, h("table", { class: "data scores" }, h("caption", { class: "sr" }, "Scores"),
      h("thead", {}, h("tr", {}, ["Scorer", "Tag", "Cases", "Mean", "95% interval", "Errors"].map((word, at) => h("th", { scope: "col", class: at > 1 ? "num" : null }, word)))),
      h("tbody", {}, found.scores.map((row) => h("tr", {}, h("th", { scope: "row" }, line(row.scorer, "", 60)), h("td", {}, row.tag === null ? h("span", { class: "muted" }, "all") : line(row.tag, "", 60)), h("td", { class: "num" }, formatCount(row.cases)), h("td", { class: "num" }, scoreText(row.mean)),
        h("td", { class: "num" }, row.low === null ? "–" : `${scoreText(row.low)} to ${scoreText(row.high)} (${row.method})`), h("td", { class: "num" }, formatCount(row.errors)))))));
  }

  /** @param {EvaluationDetail} found */
  function comparisonTable(found) {
    const words = { worse: "worse", better: "better", same: "no significant difference" };
    return h("div", { class: "table-box" }, h("table", { class: "data" }, h("caption", { class: "sr" }, "Comparison"),
      h("thead", {}, h("tr", {}, ["Scorer", "Cases", "Earlier", "Later", "p", "Verdict"].map((word, at) => h("th", { scope: "col", class: at > 0 && at < 5 ? "num" : null }, word)))),
      h("tbody", {}, found.comparison.map((row) => h("tr", {}, h("th", { scope: "row" }, line(row.scorer, "", 60)), h("td", { class: "num" }, formatCount(row.cases)), h("td", { class: "num" }, scoreText(row.earlier)), h("td", { class: "num" }, scoreText(row.later)), h("td", { class: "num" }, row.p_value.toFixed(3)), h("td", { class: row.verdict === "worse" ? "bad" : null }, words[row.verdict]))))));
  }

  /**
   * @param {EvaluationCase} one
   * @param {EvaluationDetail} found
   */
  function caseCard(one, found) {
    const expected = one.expected === null ? "" : typeof one.expected === "string" ? one.expected : JSON.stringify(one.expected, null, 2);
    const change = one.change === 0 ? null : h("span", { class: one.change < 0 ? "badge bad" : "badge" }, one.change < 0 ? "Regression" : "Improvement");
    const inputs = Object.entries(one.inputs).map(([name, value]) => `${name}: ${value}`).join("\n");
    return h("section", { class: "card case" },
      h("div", { class: "node-title-row" }, h("h2", { tabindex: -1 }, line(one.id, "mono", 120)), one.tags.map((tag) => h("span", { class: "badge" }, line(tag, "", 40))), change),
      h("div", { class: "case-columns" },
        column("Inputs", inputs ? textBlock(inputs, { label: `Inputs of ${one.id}` }) : h("p", { class: "muted" }, "None")),
        column("Expected", expected ? textBlock(expected, { label: `Expected of ${one.id}` }) : h("p", { class: "muted" }, "None")),
        column(found.compared ? `Output of ${found.id}` : "Output", ...one.runs.map((run) => runBlock(run, found))),
        found.compared && column(`Output of ${found.compared}`, ...(one.earlier.length ? one.earlier.map((run) => runBlock(run, found)) : [h("p", { class: "muted" }, "It has no such case")]))));
  }

  /**
   * @param {string} word
   * @param {...HTMLElement} parts
   */
  function column(word, ...parts) {
    return h("div", { class: "case-column" }, h("h3", {}, line(word, "", 80)), parts);
  }

  /**
   * @param {EvaluationRun} run
   * @param {EvaluationDetail} found
   */
  function runBlock(run, found) {
    return h("div", { class: "case-run" },
      h("p", { class: "row wrap num" }, statusMark(run.state), h("a", { href: formatRoute({ view: "run", run: run.run_id }) }, `Run ${run.repeat}`), h("span", { class: "muted" }, [formatDuration(run.duration_ms), run.cost && formatMoney(run.cost, found.currency)].filter(Boolean).join(" · "))),
      run.error ? h("p", { class: "bad" }, line(run.error, "", 400)) : textBlock(run.output || "No output", { prose: true, label: `Output of run ${run.repeat}` }),
      h("ul", { class: "case-scores" }, Object.entries(run.scores).map(([name, score]) => h("li", {},
        score.run_id ? h("a", { href: formatRoute({ view: "run", run: score.run_id }) }, line(name, "", 60)) : line(name, "", 60), " ",
        score.value === null ? h("span", { class: "bad" }, line(score.error, "", 300)) : h("strong", { class: "num" }, scoreText(score.value)), " ",
        score.reason && line(score.reason, "muted", 300)))));
  }

  void load();
  return {
    element,
    keys: { j: () => move(1), k: () => move(-1) },
    update(now) {
      if (String(now.params) === String(params)) return;
      params = now.params;
      if (!params.get("id")) {
        detail = null;
        list = null;
      }
      void load();
    },
    close() {
      asked += 1;
      window.clearTimeout(timer);
    },
  };
}
