// The prompt of a step, its answers, and the calls between them, in their order.

import { h, icon } from "../dom.js";
import { countOf, formatCount, formatDuration, formatTime, statusTone } from "../format.js";
import { oneLine, pretty } from "../text.js";
import { line, textBlock } from "../ui/parts.js";

/** @typedef {import("../types.js").StepDetail} StepDetail */
/** @typedef {import("../types.js").Answer} Answer */
/** @typedef {import("../types.js").ModelAttempts} ModelAttempts */
/** @typedef {import("../types.js").ToolCallDetail} ToolCallDetail */
/** @typedef {(field: string, text: string, options: {prose?: boolean, label?: string}) => HTMLElement} ShowText */
/** @typedef {(attachments: import("../types.js").AttachmentInfo[]) => HTMLElement} ShowFiles */

/** What a model call waited for when no attempt had failed. */
const WAITS = /** @type {Record<string, string>} */ ({ breaker: "Circuit breaker", limit: "Calls in flight", permit: "Rate limit", skipped: "Not asked", rule: "Rule" });
/** Characters of a message of the prompt that is open from the beginning. */
const SHORT = 1200;

/**
 * @param {StepDetail} step
 * @param {ShowText} show
 * @param {ShowFiles} files
 * @returns {HTMLElement[]}
 */
export function conversation(step, show, files) {
  const messages = step.prompt.map((message, at) => h("details", { class: `message ${message.role}`, open: message.role !== "system" && message.content.length < SHORT },
    h("summary", {}, icon("right"), h("span", { class: "role" }, message.role), h("span", { class: "muted num" }, `${formatCount(step.cut[`prompt.${at}`] ?? message.content.length)} characters`), line(message.content, "muted clip preview-line", 120)),
    show(`prompt.${at}`, message.content, { label: `Prompt: ${message.role}` }), message.attachments?.length ? files(message.attachments) : null));
  /** @type {Map<number|null, ToolCallDetail[]>} */
  const calls = new Map();
  for (const call of step.tool_calls) calls.set(call.iteration, [...(calls.get(call.iteration) ?? []), call]);
  /** @type {HTMLElement[]} */
  const turns = [];
  for (const answer of step.answers) {
    turns.push(answerOf(answer, step, show));
    for (const call of calls.get(answer.iteration) ?? []) turns.push(callOf(call, step.tool_calls.indexOf(call), show, files));
    calls.delete(answer.iteration);
  }
  for (const rest of calls.values()) for (const call of rest) turns.push(callOf(call, step.tool_calls.indexOf(call), show, files));
  return [...messages, ...turns];
}

/**
 * "attempt 2 of 5".
 * @param {ModelAttempts} attempts
 */
const attemptWord = ({ number, most }) => `attempt ${formatCount(number)}${most === null ? "" : ` of ${formatCount(most)}`}`;

/**
 * The failed attempts and the other waits of a model call, in order; then its last attempt, if that failed too.
 * @param {ModelAttempts} attempts
 * @param {{isAnswered: boolean}} options
 */
export function attemptList(attempts, { isAnswered }) {
  let failed = 0;
  const rows = attempts.waits.map((wait) => {
    if (wait.cause === "retry" || wait.cause === "repeat" || wait.cause === "fallback") failed += 1;
    const isFailed = !(wait.cause in WAITS);
    return h("li", { title: wait.at === null ? null : formatTime(wait.at) },
      h("strong", {}, WAITS[wait.cause] ?? (wait.cause ? `Attempt ${failed}` : "Before")), line(wait.reason.replace(/^circuit breaker /, ""), isFailed ? "bad-text" : "", 400),
      h("span", { class: "num muted" }, wait.wait_ms === null ? "" : wait.cause === "fallback" || wait.cause === "skipped" || wait.cause === "rule" ? "next model" : wait.wait_ms || !isFailed ? `waited ${formatDuration(wait.wait_ms)}` : "again immediately"));
  });
  const last = isAnswered || failed >= attempts.number ? null : h("li", {}, h("strong", {}, `Attempt ${attempts.number}`), h("span", { class: "bad-text" }, attempts.most === attempts.number ? "failed, the last one allowed" : "failed, and was not repeated"), h("span"));
  return h("ol", { class: "attempts" }, rows, last);
}

/**
 * @param {Answer} answer
 * @param {StepDetail} step
 * @param {ShowText} show
 */
function answerOf(answer, step, show) {
  const facts = [answer.attempts && answer.attempts.number > 1 ? attemptWord(answer.attempts) : "", answer.model ? oneLine(answer.model, 40) : "", answer.reused ? `reused from run ${oneLine(answer.reused, 40)} (${formatCount(answer.reused_tokens)} tokens)` : answer.input_tokens === null ? "" : `${formatCount(answer.input_tokens)} → ${formatCount(answer.output_tokens)} tokens${answer.reasoning_tokens ? ` (${formatCount(answer.reasoning_tokens)} reasoning)` : ""}${answer.cached_tokens ? ` (${formatCount(answer.cached_tokens)} cached)` : ""}`, answer.latency_ms === null ? "" : formatDuration(answer.latency_ms)].filter(Boolean);
  const at = step.answers.indexOf(answer);
  const isOutput = answer.text !== null && answer.text === step.output && !answer.tool_calls.length;
  return h("div", { class: "message assistant" },
    h("div", { class: "message-head" }, h("span", { class: "role" }, step.answers.length > 1 ? `answer ${at + 1}` : "answer"), h("span", { class: "muted num clip" }, facts.join(" · "))),
    answer.attempts ? attemptList(answer.attempts, { isAnswered: true }) : null,
    answer.reasoning ? h("details", { class: "message reasoning" },
      h("summary", {}, icon("right"), h("span", { class: "role" }, "reasoning"), line(answer.reasoning, "muted clip preview-line", 120)),
      show(`answers.${at}.reasoning`, answer.reasoning, { prose: true, label: "Reasoning" })) : null,
    isOutput ? h("p", { class: "muted note" }, "This is the output above.") : answer.text ? show(`answers.${at}`, answer.text, { prose: true, label: "Answer" }) : null,
    answer.tool_calls.length > 0 && h("p", { class: "muted note" }, `asks for ${answer.tool_calls.map((call) => oneLine(call.name, 40)).join(", ")}`));
}

/**
 * @param {ToolCallDetail} call
 * @param {number} at
 * @param {ShowText} show
 * @param {ShowFiles} files
 */
function callOf(call, at, show, files) {
  const tone = call.outcome === "success" ? "completed" : call.outcome.startsWith("skipped") ? "stopped" : "failed";
  const isUnknown = call.effect === "unknown" || call.outcome === "unknown";
  const { repairs = [], log = [], attachments = [] } = call;
  return h("details", { class: "message tool", open: tone === "failed" && !isUnknown },
    h("summary", {}, icon("right"), h("span", { class: "role mono" }, oneLine(call.name, 60)), h("span", { class: `status is-${isUnknown ? "waiting" : statusTone(tone)}` }, isUnknown ? "unknown" : oneLine(call.outcome, 20)),
      call.duration_ms !== null && h("span", { class: "muted num" }, formatDuration(call.duration_ms)), call.effect && call.effect !== "recorded" && !isUnknown && h("span", { class: "badge" }, oneLine(call.effect, 20).toUpperCase()), repairs.length > 0 && h("span", { class: "badge" }, "REPAIRED"), attachments.length > 0 && h("span", { class: "badge" }, countOf(attachments.length, "FILE", "FILES")), log.length > 0 && h("span", { class: "muted num" }, log.length > 50 ? "over 50 lines" : countOf(log.length, "line")), line(call.arguments, "muted clip preview-line mono", 120)),
    call.arguments !== "" && [h("h4", {}, "Arguments"), show(`tool_calls.${at}.arguments`, pretty(call.arguments), { label: "Arguments" })],
    repairs.length > 0 && [h("h4", {}, "Repaired before the call"), h("ul", { class: "bullets" }, repairs.map((one) => h("li", {}, line(one, "", 300))))],
    log.length > 0 && [h("h4", {}, "Logged and printed"), h("div", { class: "log mono", tabindex: 0, role: "region", "aria-label": "Logged and printed" }, h("ol", {}, log.map((one) => h("li", { class: /^(ERROR|CRITICAL) /.test(one) ? "is-failed" : /^WARNING /.test(one) ? "is-waiting" : null }, line(one, "", 600)))))],
    h("h4", {}, "Result"), call.result === null ? h("p", { class: "muted note" }, "Unknown: the process ended before it recorded the result.") : show(`tool_calls.${at}.result`, pretty(call.result), { label: "Result" }),
    attachments.length > 0 && files(attachments));
}
