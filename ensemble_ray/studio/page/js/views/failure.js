// Why a run failed or stopped, and what to do next; and the failed steps of a run that continued, grouped by error.

import { h, icon } from "../dom.js";
import { countOf, formatCount, formatDuration, formatTime } from "../format.js";
import { isFrame } from "../model/run.js";
import { formatRoute, stepLink } from "../router.js";
import { head, oneLine, visible } from "../text.js";
import { forkRun } from "../ui/actions.js";
import { copyText, line, textBlock } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").RunError} RunError */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../dom.js").Child} Child */
/** @typedef {import("../model/run.js").RunModel} RunModel */
/** @typedef {{text: string, count: number, steps: Step[]}} ErrorGroup */

const SHOWN = 600;
/** Attempts, and steps of a group, that are shown. */
const MOST = 4;
const MOST_GROUPS = 8;

/**
 * The card of a run that failed, or whose process died; null for other runs.
 * @param {App} app
 * @param {RunModel} model
 */
export function failureCard(app, model) {
  const { run } = model;
  const { error } = run;
  if (!error && run.status !== "interrupted") return null;
  const step = error?.step ?? run.first_error_step ?? error?.first_failed_step ?? null;
  const what = error?.what || (error ? "The run failed" : "The process of the run died");
  const from = error?.fork_from ?? null;
  const mayFork = from !== null && app.info.actions.includes("fork") && run.offers?.includes("fork") && !model.isFile;
  return h("section", { class: "failure", "aria-label": "Why the run failed" },
    h("header", {}, icon(run.status === "interrupted" ? "interrupted" : "failed"), h("h2", { class: "grow" }, oneLine(what, 300)),
      step && h("a", { class: "button small", href: stepLink(run.run_id, step) }, "Jump to first error"),
      mayFork && h("button", { class: "button small", type: "button", onclick: () => void forkRun(app, model, from) }, icon("fork"), "Fork from here"),
      h("button", { class: "button small", type: "button", title: "Copy this text", onclick: () => void copyText(textOf(model, what)) }, icon("copy"), "Copy")),
    h("div", { class: "failure-body" },
      error && [errorText(error), ...untoldCauses(error).map((cause) => h("div", { class: "muted" }, "caused by ", line(cause, "", 400))), error.place ? h("div", { class: "mono" }, visible(error.place)) : null],
      error && (error.answer ?? null) !== null && h("div", { class: "versus-answer" },
        h("div", {}, h("h3", {}, "Last answer"), textBlock(error.answer ?? "", { label: "Last answer" })),
        h("div", {}, h("h3", {}, "Why it was refused"), textBlock(error.refusal ?? "", { label: "Why it was refused" }))),
      run.status === "interrupted" && stoppedSteps(model),
      error && attemptsOf(error),
      error?.remedy && h("div", {}, h("strong", {}, "What to do "), line(error.remedy, "", 400)),
      nextStep(model)));
}

/** @param {RunError} error */
function errorText(error) {
  const text = h("span", { dir: "auto", class: "failure-text" }, visible(head(error.message, SHOWN)));
  const rest = error.message.length > SHOWN && h("button", { class: "button small", type: "button", onclick: () => {
    text.textContent = visible(error.message);
    if (rest) rest.remove();
  } }, `Show all ${formatCount(error.message.length)} characters`);
  return h("div", { class: "failure-error" }, h("strong", {}, visible(error.class)), h("span", {}, ": "), text, rest);
}

/**
 * The causes that add something to the message.
 * @param {RunError} error
 */
function untoldCauses(error) {
  return (error.causes ?? []).filter((cause) => !error.message.includes(cause.slice(cause.indexOf(": ") + 2).replace(/\.$/, "")));
}

/**
 * What was in progress when the process died.
 * @param {RunModel} model
 */
function stoppedSteps(model) {
  const steps = [...model.steps.values()].filter((step) => step.status === "interrupted" && !isFrame(step));
  if (!steps.length) return null;
  return h("div", {}, h("strong", {}, "In progress "), steps.slice(0, MOST).map((step, at) => h("span", {}, at ? ", " : "", h("a", { href: stepLink(model.run.run_id, step.id) }, line(step.title || step.id, "", 80)), step.effect === "unknown" ? " (the outcome of a call is unknown)" : "")), steps.length > MOST && ` and ${steps.length - MOST} more`);
}

/** @param {RunError} error */
function attemptsOf(error) {
  const all = error.attempts ?? [];
  if (!all.length && !error.others) return null;
  const shown = all.slice(-MOST).map(({ started_at: from, ended_at: to, waited_ms: waited }, at) => {
    const number = all.length - Math.min(MOST, all.length) + at + 1;
    return h("span", { class: "num" }, all.length > 1 ? `#${number} ` : "", h("time", { datetime: new Date(from).toISOString() }, formatTime(from)), `, ${formatDuration(to - from)}`, waited ? `, ${formatDuration(waited)} of it for a rate limit` : "");
  });
  return h("div", { class: "attempts" }, all.length > 0 && h("strong", {}, all.length > 1 ? countOf(all.length, "attempt") : "Ran"), shown,
    (error.requests ?? 0) > 1 && h("span", {}, `${error.requests} requests in its last model call`),
    (error.others ?? 0) > 0 && h("span", {}, `and ${countOf(error.others ?? 0, "more error")}`));
}

/** @param {RunModel} model */
export function nextStep(model) {
  const next = model.run.next_step ?? (model.run.resume_advice ? { text: "Resume it", command: model.run.resume_advice } : null);
  if (!next) return null;
  return h("div", { class: "next" }, h("strong", {}, next.text), next.command && h("code", {}, visible(next.command)),
    next.command && h("button", { class: "icon-button", type: "button", title: "Copy the command", "aria-label": "Copy the command", onclick: () => void copyText(next.command) }, icon("copy")));
}

/**
 * The card as text, as `ensemble-ray trace` prints it.
 * @param {RunModel} model
 * @param {string} what
 */
function textOf(model, what) {
  const { error, next_step: next } = model.run;
  if (error?.lines?.length) return error.lines.join("\n");
  return [what, error && `${error.class}: ${error.message}`, error?.place, next && `${next.text}: ${next.command}`].filter(Boolean).join("\n");
}

/**
 * Steps that failed, by error: texts that differ only in numbers are one error. The most frequent is first.
 * @param {Iterable<Step>} steps
 * @returns {ErrorGroup[]}
 */
export function groupErrors(steps) {
  /** @type {Map<string, ErrorGroup>} */
  const groups = new Map();
  for (const step of steps) {
    if (step.status !== "failed" || isFrame(step)) continue;
    const text = step.error ?? "No error is recorded";
    const key = text.replace(/\d+/g, "0");
    const group = groups.get(key) ?? { text, count: 0, steps: [] };
    groups.set(key, group);
    group.count += 1;
    if (group.steps.length < MOST) group.steps.push(step);
  }
  return [...groups.values()].sort((a, b) => b.count - a.count);
}

/**
 * The failed steps of a run that completed or goes on, and of a run in which several failed.
 * @param {RunModel} model
 */
export function failedSteps(model) {
  const { run } = model;
  const failed = run.counts.failed ?? 0;
  if (!failed || (run.error && failed === 1)) return null;
  const groups = groupErrors(model.steps.values());
  if (!groups.length) return null;
  const all = formatRoute({ view: "run", run: run.run_id, tab: "steps", params: { status: "failed" } });
  const went = run.status === "completed" ? ", and the run completed without them" : "";
  return h("section", { class: "failed-steps", "aria-label": "Failed steps" },
    h("header", {}, icon("failed"), h("h2", { class: "grow" }, `${countOf(failed, "step")} failed${went}`), h("a", { class: "button small", href: all }, "Show all failed steps")),
    h("ul", {}, groups.slice(0, MOST_GROUPS).map(({ text, count, steps }) => {
      const [kind = "", ...rest] = text.split(": ");
      return h("li", {}, h("span", { class: "badge bad num" }, `×${formatCount(count)}`),
        h("span", { class: "grow" }, rest.length ? [h("strong", {}, line(kind, "", 80)), ": "] : null, line(rest.length ? rest.join(": ") : text, "", 300)),
        h("span", { class: "links" }, steps.map((step) => h("a", { class: "mono", href: stepLink(run.run_id, step.id), title: oneLine(step.title, 200) }, step.id.replace(/#0$/, ""))), count > steps.length && h("span", { class: "muted" }, `and ${formatCount(count - steps.length)} more`)));
    }), groups.length > MOST_GROUPS && h("li", { class: "muted" }, `and ${groups.length - MOST_GROUPS} more errors`)));
}
