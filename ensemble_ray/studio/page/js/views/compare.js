// Two runs side by side, step by step; a fork and the run that it is of, say.

import { fill, h, icon } from "../dom.js";
import { countOf, formatCost, formatDuration, formatShort, formatTime, formatTokens, runLine, runName } from "../format.js";
import { formatRoute, stepLink } from "../router.js";
import { diffBlock, emptyState, failureState, line, statusMark, statusPill, textBlock } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").RunRow} RunRow */
/** @typedef {import("../types.js").ComparedRuns} ComparedRuns */
/** @typedef {import("../types.js").ComparedStep} ComparedStep */
/** @typedef {import("../types.js").ComparedSide} ComparedSide */
/** @typedef {import("../types.js").View} View */

const ROWS = 500;

/**
 * @param {App} app
 * @param {Route} route
 * @returns {View}
 */
export function compareView(app, route) {
  let params = route.params;
  let pair = "";
  let onlyDifferent = false;
  /** @type {ComparedRuns|null} */
  let found = null;
  let asked = 0;

  const fields = ["a", "b"].map((side) => h("input", { class: "field grow mono", "aria-label": `Run ${side.toUpperCase()}`, placeholder: `Run ${side.toUpperCase()}`, spellcheck: "false", onchange: (/** @type {Event} */ event) => app.go({ params: { [side]: /** @type {HTMLInputElement} */ (event.target).value.trim() || null, step: null } }) }));
  const body = h("div", {});
  const outputs = h("div", { class: "outputs", "aria-live": "polite" });
  const element = h("div", { class: "page" }, h("div", { class: "content" }, h("div", { class: "page-head" }, h("h1", {}, "Compare")), h("div", { class: "row wrap filters" }, fields[0], icon("compare", "versus-icon"), fields[1]), body, outputs));

  async function load() {
    const [a, b] = [params.get("a"), params.get("b")];
    fields.forEach((field, at) => {
      field.value = (at ? b : a) ?? "";
    });
    const wanted = `${a}\n${b}`;
    if (wanted === pair) return drawOutputs();
    pair = wanted;
    asked += 1;
    const mine = asked;
    found = null;
    fill(outputs);
    if (!a || !b) return fill(body, emptyState({ symbol: "compare", title: "Two runs, side by side", text: "Enter two runs above. The page of a fork has a link that compares it with its original." }));
    try {
      const both = await app.source.compare(a, b);
      if (mine !== asked) return;
      found = both;
      app.setTitle(`Compare ${[both.a, both.b].map((run) => [runName(run), runLine(run)].filter(Boolean).join(" · ").slice(0, 50)).join(" / ")}`);
      draw();
      void drawOutputs();
    } catch (error) {
      if (mine === asked) fill(body, failureState(error, () => {
        pair = "";
        void load();
      }));
    }
  }

  function draw() {
    if (!found) return;
    const different = found.steps.filter((step) => !step.same);
    const steps = onlyDifferent ? different : found.steps;
    fill(body,
      h("div", { class: "versus" }, card("A", found.a), card("B", found.b)),
      h("section", { class: "card" },
        h("div", { class: "node-title-row" }, h("h2", {}, `${countOf(different.length, "step")} of ${found.steps.length} ${different.length === 1 ? "differs" : "differ"}`), h("span", { class: "grow" }), h("label", { class: "check" }, h("input", { type: "checkbox", checked: onlyDifferent, onchange: (/** @type {Event} */ event) => {
          onlyDifferent = /** @type {HTMLInputElement} */ (event.target).checked;
          draw();
        } }), "Only what differs")),
        h("div", { class: "table-box" }, h("table", { class: "data compare-table" },
          h("thead", {}, h("tr", {}, ["Step", "A", "B", "Tokens", "Duration", "Output"].map((word, at) => h("th", { scope: "col", class: at === 3 || at === 4 ? "num" : null }, word)))),
          h("tbody", {}, steps.slice(0, ROWS).map(rowOf)))),
        steps.length > ROWS && h("p", { class: "list-foot muted" }, `The first ${ROWS} of ${steps.length} are shown`)));
  }

  /**
   * @param {string} side
   * @param {RunRow} run
   */
  function card(side, run) {
    return h("section", { class: "card panel" }, h("div", { class: "row wrap" }, h("span", { class: "badge" }, side), statusPill(run.status), line(runName(run), "run-name clip", 60), run.origin_run && h("span", { class: "badge" }, "FORK")),
      line(runLine(run), run.failure ? "run-line bad" : "run-line", 300),
      h("a", { class: "mono clip", href: formatRoute({ view: "run", run: run.run_id }) }, run.run_id),
      h("p", { class: "muted num" }, [formatTime(run.created_at), formatDuration(run.duration_ms), `${formatTokens(run)} tokens`, formatCost(run.cost)].join(" · ")));
  }

  /** @param {ComparedStep} step */
  function rowOf(step) {
    const { a, b } = step;
    const word = a && b ? (step.same ? "same" : "differs") : a ? "only in A" : "only in B";
    /** @param {(side: ComparedSide) => string} text */
    const both = (text) => `${a ? text(a) : "–"} → ${b ? text(b) : "–"}`;
    const choose = () => app.go({ params: { step: step.id } }, true);
    return h("tr", { "aria-selected": String(params.get("step") === step.id), onclick: choose },
      h("td", {}, h("button", { class: "copy mono", type: "button", onclick: choose }, step.id), " ", line(step.title, "muted", 80)),
      h("td", {}, a ? statusMark(a.status) : "–"), h("td", {}, b ? statusMark(b.status) : "–"),
      h("td", { class: "num" }, both((side) => formatShort(side.tokens))), h("td", { class: "num" }, both((side) => formatDuration(side.duration_ms))),
      h("td", { class: step.same ? "same" : "differs" }, word));
  }

  async function drawOutputs() {
    const id = params.get("step");
    const step = found?.steps.find((one) => one.id === id);
    for (const row of body.querySelectorAll("tr[aria-selected]")) row.setAttribute("aria-selected", String(row.querySelector("button")?.textContent === id));
    if (!found || !step) return fill(outputs);
    const { a: runA, b: runB } = found;
    try {
      const [a, b] = await Promise.all([step.a ? app.source.step(runA.run_id, step.id) : null, step.b ? app.source.step(runB.run_id, step.id) : null]);
      if (params.get("step") !== id) return;
      const [one, two] = [a?.output ?? "", b?.output ?? ""];
      fill(outputs,
        !step.same && a && b ? h("section", { class: "card whole" }, h("h2", { class: "card-title" }, `Differences in ${step.id}`), diffBlock(one, two)) : null,
        [[runA, a], [runB, b]].map(([run, detail], at) => h("section", { class: "card" }, h("h2", { class: "card-title" }, at ? "B" : "A", " · ", h("a", { href: stepLink(/** @type {RunRow} */ (run).run_id, step.id) }, "open")), detail ? textBlock((at ? two : one) || "No output", { prose: true, label: "Output" }) : h("p", { class: "muted" }, "This run has no such step."))));
    } catch (error) {
      fill(outputs, failureState(error));
    }
  }

  app.setTitle("Compare");
  void load();
  return {
    element,
    update(now) {
      params = now.params;
      void load();
    },
  };
}
