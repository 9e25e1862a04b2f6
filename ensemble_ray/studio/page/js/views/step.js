// All of one step: what it was asked, what it answered, what it did, and what was decided about it.

import { append, fill, h, icon } from "../dom.js";
import { countOf, formatCost, formatCount, formatDuration, formatTime } from "../format.js";
import { durationOf, tokensOf } from "../model/run.js";
import { oneLine, pretty } from "../text.js";
import { forkRun } from "../ui/actions.js";
import { attachmentList } from "../ui/attachments.js";
import { agentName, copyText, failureState, line, statusPill, textBlock } from "../ui/parts.js";
import { attemptList, conversation } from "./conversation.js";
import { reviewCard } from "./reviews.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../types.js").StepDetail} StepDetail */
/** @typedef {import("../dom.js").Child} Child */
/** @typedef {import("../model/run.js").RunModel} RunModel */

const EFFECTS = /** @type {Record<string, string>} */ ({
  recorded: "recorded: what it did is known",
  repeated: "repeated: it was done again after an interruption",
  unknown: "unknown: the process ended before anybody wrote down whether it was done",
});

/**
 * A part of the panel that folds.
 * @param {string} title
 * @param {Child[]} body
 * @param {{isOpen?: boolean, note?: string}} [options]
 */
function section(title, body, { isOpen = true, note = "" } = {}) {
  return h("details", { class: "section", open: isOpen }, h("summary", {}, icon("right"), h("h3", {}, title), h("span", { class: "muted" }, note)), h("div", { class: "section-body" }, body));
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {string} id
 */
export function stepPanel(app, model, id) {
  const run = model.run.run_id;
  const head = h("div", { class: "step-head" });
  const live = h("div", { class: "section live", hidden: true });
  const body = h("div", {}, h("p", { class: "loading" }, "Loading…"));
  const element = h("div", { class: "step-panel" }, head, live, body);
  let state = "";
  let asked = 0;

  /** @param {Step} step */
  function drawHead(step) {
    const neighbours = [...model.steps.keys()];
    const at = neighbours.indexOf(id);
    /** @param {number} by */
    const goBy = (by) => neighbours[at + by] && app.go({ params: { step: neighbours[at + by] ?? null } }, true);
    const spec = detail?.fork_spec;
    const focused = head.contains(document.activeElement) ? document.activeElement?.getAttribute("aria-label") : null;
    fill(head,
      h("div", { class: "row" }, statusPill(step.status), h("span", { class: "badge" }, step.kind.toUpperCase()), h("code", { class: "clip muted grow", title: id }, id),
        h("button", { class: "icon-button", type: "button", title: "Step before (k)", "aria-label": "Step before", disabled: at <= 0, onclick: () => goBy(-1) }, icon("left")),
        h("button", { class: "icon-button", type: "button", title: "Step after (j)", "aria-label": "Step after", disabled: at < 0 || at === neighbours.length - 1, onclick: () => goBy(1) }, icon("right")),
        h("button", { class: "icon-button", type: "button", title: "Copy a link to this step", "aria-label": "Copy a link to this step", onclick: () => void copyText(window.location.href) }, icon("link")),
        h("button", { class: "icon-button", type: "button", title: "Close (Esc)", "aria-label": "Close", onclick: () => app.go({ params: { step: null } }) }, icon("close"))),
      h("h2", { class: "step-name", dir: "auto" }, oneLine(step.title || id, 200)),
      h("dl", { class: "facts" }, factsOf(step).map(([word, value]) => h("div", {}, h("dt", {}, word), h("dd", {}, value)))),
      spec && !model.isFile && app.info.actions.includes("fork") && model.run.offers?.includes("fork") && h("div", { class: "row" }, h("button", { class: "button small", type: "button", onclick: () => void forkRun(app, model, spec) }, icon("fork"), "Fork from here")));
    if (focused) /** @type {HTMLElement|null} */ (head.querySelector(`[aria-label="${focused}"]`))?.focus();
  }

  /**
   * @param {Step} step
   * @returns {[string, Child][]}
   */
  function factsOf(step) {
    const tokens = tokensOf(step);
    const place = step.place;
    /** @type {[string, Child|false][]} */
    const facts = [
      ["Agent", step.agent ? agentName(step.agent) : false],
      ["Duration", formatDuration(durationOf(step, Date.now()))],
      ["Tokens", tokens === null ? false : h("span", { title: `${formatCount(step.tokens?.input)} in, ${formatCount(step.tokens?.output)} out${step.tokens?.cached ? `, ${formatCount(step.tokens.cached)} cached` : ""}` }, `${formatCount(step.tokens?.input)} → ${formatCount(step.tokens?.output)}`)],
      ["Cost", step.cost ? formatCost(step.cost) : false],
      ["Attempts", step.attempts > 1 ? String(step.attempts) : false],
      ["Model retries", retriesOf(step)],
      ["Started", step.started_at === null ? false : formatTime(step.started_at)],
      ["Process", place?.pid || place?.node ? [place.pid ? `pid ${place.pid}` : "", place.node ? `node ${oneLine(place.node, 24)}` : "", place.replica ? `replica ${place.replica}` : ""].filter(Boolean).join(", ") : false],
      ["Effects", step.effect ? (EFFECTS[step.effect] ?? step.effect) : false],
    ];
    return /** @type {[string, Child][]} */ (facts.filter(([, value]) => value !== false));
  }

  /** @param {Step & Partial<StepDetail>} step */
  function retriesOf(step) {
    const waits = [...(step.answers ?? []).map((answer) => answer.attempts), step.failed_attempts].flatMap((attempts) => attempts?.waits ?? []);
    const retries = waits.filter((wait) => wait.cause === "retry" || wait.cause === "repeat").length;
    const waited_ms = waits.reduce((sum, wait) => sum + (wait.wait_ms ?? 0), 0);
    return waits.length ? [retries ? formatCount(retries) : "none", waited_ms ? `waited ${formatDuration(waited_ms)}` : ""].filter(Boolean).join(", ") : false;
  }

  /** @type {StepDetail|null} */
  let detail = null;

  async function load() {
    asked += 1;
    const mine = asked;
    try {
      const found = await app.source.step(run, id);
      if (mine !== asked) return;
      detail = found;
      drawHead({ ...found, ...model.steps.get(id) });
      drawBody(found);
    } catch (error) {
      if (mine === asked) fill(body, failureState(error, () => void load()));
    }
  }

  /**
   * Somebody's text of this step, from the server where it is cut here.
   * @param {string} field
   * @param {string} text
   * @param {{prose?: boolean, label?: string}} options
   */
  function text(field, text, options) {
    const length = detail?.cut[field];
    return textBlock(text, { ...options, ...(length ? { whole: { length, load: () => app.source.text(run, id, field) } } : {}) });
  }

  /** @param {StepDetail} step */
  function drawBody(step) {
    const open = new Map([...body.querySelectorAll("details.section")].map((one) => [one.querySelector("h3")?.textContent, /** @type {HTMLDetailsElement} */ (one).open]));
    const offered = new Set(step.tools_offered);
    const called = new Set(step.tool_calls.map((call) => call.name));
    const rejected = step.guardrails.filter((check) => !check.accepted).length;
    fill(body,
      step.failure && section("Error", [h("div", { class: "banner bad" }, icon("failed"), h("div", { class: "grow" }, h("strong", {}, step.failure.class), step.failure.message ? textBlock(step.failure.message, { label: "Error" }) : null)), step.failure.causes.length > 0 && h("ol", { class: "causes" }, step.failure.causes.map((cause) => h("li", {}, line(cause, "", 600)))), step.failed_attempts && attemptList(step.failed_attempts, { isAnswered: false })]),
      step.reviews.length > 0 && section("Reviews", step.reviews.map((review) => reviewCard(app, review)), { note: String(step.reviews.length) }),
      step.output !== null && section("Output", [text("output", step.output, { prose: true, label: "Output" }), h("div", { class: "more row" }, h("button", { class: "button small", type: "button", onclick: () => void copyText(step.output ?? "") }, icon("copy"), "Copy"))]),
      ((step.structured_output ?? null) !== null || step.cut.structured_output) && section("Structured output", [text("structured_output", (step.structured_output ?? null) === null ? "" : pretty(step.structured_output), { label: "Structured output" })]),
      step.prompt.length + step.answers.length + step.tool_calls.length > 0 && section(step.prompt.length + step.answers.length ? "Conversation" : "Calls", conversation(step, text, (attachments) => attachmentList(app, run, attachments)), { note: step.answers.length ? countOf(step.answers.length, "answer") : "" }),
      offered.size + called.size > 0 && section("Tools", [h("ul", { class: "tools" }, [...new Set([...offered, ...called])].map((name) => h("li", { class: called.has(name) ? "used" : "" }, line(name, "", 60), h("span", { class: "muted" }, called.has(name) ? ` ×${step.tool_calls.filter((call) => call.name === name).length}` : " offered"))))], { note: `${called.size} of ${offered.size || called.size} called` }),
      step.guardrails.length > 0 && section("Guardrails", step.guardrails.map((check) => verdict(check.accepted, check.name ? `${check.name} (${check.kind})` : check.kind, check.message)), { note: rejected ? `${rejected} rejected` : "all accepted" }),
      step.constraints.length > 0 && section("Constraints", step.constraints.map((check) => verdict(check.allowed, check.rule, check.message))),
      step.context_cuts.length > 0 && section("Cut from the context", [h("table", { class: "data" }, h("thead", {}, h("tr", {}, ["Section", "Kept", "Cut", "How"].map((word, at) => h("th", { scope: "col", class: at === 1 || at === 2 ? "num" : null }, word)))), h("tbody", {}, step.context_cuts.map((cut) => h("tr", {}, h("td", {}, line(cut.section, "", 80)), h("td", { class: "num" }, formatCount(cut.kept_tokens)), h("td", { class: "num" }, formatCount(cut.cut_tokens)), h("td", {}, line(cut.how, "", 80))))))]),
      step.directives.length > 0 && section("Directives", [h("ul", { class: "bullets" }, step.directives.map((one) => h("li", {}, line(one, "", 600))))]));
    for (const one of body.querySelectorAll("details.section")) {
      const was = open.get(one.querySelector("h3")?.textContent);
      if (was !== undefined) /** @type {HTMLDetailsElement} */ (one).open = was;
    }
    if (!body.childElementCount) append(body, [h("p", { class: "loading" }, step.status === "running" ? "The prompt appears when it is recorded." : "No details are recorded for this step.")]);
  }

  /**
   * @param {boolean} isGood
   * @param {string} name
   * @param {string} message
   */
  function verdict(isGood, name, message) {
    return h("div", { class: "verdict" }, statusPill(isGood ? "completed" : "failed"), h("div", { class: "grow" }, h("strong", {}, line(name, "", 80)), message ? h("div", {}, line(message, "muted", 800)) : null));
  }

  function drawTokens() {
    const isRunning = model.steps.get(id)?.status === "running";
    const answer = isRunning ? (model.tokens.get(id) ?? "") : "";
    const text = answer || (isRunning ? (model.thoughts.get(id) ?? "") : "");
    const title = answer ? "Answer so far" : "Reasoning so far";
    live.hidden = !text;
    if (!text) return fill(live);
    const shown = text.length > 6000 ? `…${text.slice(-6000)}` : text;
    fill(live, h("h3", { class: "row" }, statusPill("running"), title), textBlock(shown, { prose: true, label: title }));
    const pre = live.querySelector("pre");
    if (pre) window.requestAnimationFrame(() => { pre.scrollTop = pre.scrollHeight; }); // when it is in the document
  }

  let frame = 0;
  /** @param {string} step */
  const onToken = (step) => {
    if (step !== id || frame) return;
    frame = window.requestAnimationFrame(() => {
      frame = 0;
      drawTokens();
    });
  };
  model.tokenListeners.add(onToken);
  const clock = window.setInterval(() => {
    const step = model.steps.get(id);
    if (step?.status === "running") drawHead(detail ? { ...detail, ...step } : step);
  }, 1000);

  function draw() {
    const step = model.steps.get(id);
    const now = step ? JSON.stringify([step.status, step.attempts, step.tools.length, step.tokens, step.ended_at, step.error, model.run.reviews.filter((review) => review.step === id)]) : "none";
    if (now === state) return;
    state = now;
    if (step) drawHead(step);
    drawTokens();
    void load();
  }

  draw();
  return {
    id,
    element,
    draw,
    close() {
      window.clearInterval(clock);
      window.cancelAnimationFrame(frame);
      model.tokenListeners.delete(onToken);
      asked += 1;
    },
  };
}
