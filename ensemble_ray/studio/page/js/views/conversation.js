// The prompt of a step, its answers, and the calls between them, in their order.

import { h, icon } from "../dom.js";
import { formatCount, formatDuration, statusTone } from "../format.js";
import { oneLine, pretty } from "../text.js";
import { line, textBlock } from "../ui/parts.js";

/** @typedef {import("../types.js").StepDetail} StepDetail */
/** @typedef {import("../types.js").Answer} Answer */
/** @typedef {import("../types.js").ToolCallDetail} ToolCallDetail */
/** @typedef {(field: string, text: string, options: {prose?: boolean, label?: string}) => HTMLElement} ShowText */

/** Characters of a message of the prompt that is open from the beginning. */
const SHORT = 1200;

/**
 * @param {StepDetail} step
 * @param {ShowText} show
 * @returns {HTMLElement[]}
 */
export function conversation(step, show) {
  const messages = step.prompt.map((message, at) => h("details", { class: `message ${message.role}`, open: message.role !== "system" && message.content.length < SHORT },
    h("summary", {}, icon("right"), h("span", { class: "role" }, message.role), h("span", { class: "muted num" }, `${formatCount(step.cut[`prompt.${at}`] ?? message.content.length)} characters`), line(message.content, "muted clip preview-line", 120)),
    show(`prompt.${at}`, message.content, { label: `Prompt: ${message.role}` })));
  /** @type {Map<number|null, ToolCallDetail[]>} */
  const calls = new Map();
  for (const call of step.tool_calls) calls.set(call.iteration, [...(calls.get(call.iteration) ?? []), call]);
  /** @type {HTMLElement[]} */
  const turns = [];
  for (const answer of step.answers) {
    turns.push(answerOf(answer, step, show));
    for (const call of calls.get(answer.iteration) ?? []) turns.push(callOf(call, step.tool_calls.indexOf(call), show));
    calls.delete(answer.iteration);
  }
  for (const rest of calls.values()) for (const call of rest) turns.push(callOf(call, step.tool_calls.indexOf(call), show));
  return [...messages, ...turns];
}

/**
 * @param {Answer} answer
 * @param {StepDetail} step
 * @param {ShowText} show
 */
function answerOf(answer, step, show) {
  const facts = [answer.model ? oneLine(answer.model, 40) : "", answer.input_tokens === null ? "" : `${formatCount(answer.input_tokens)} → ${formatCount(answer.output_tokens)} tokens${answer.reasoning_tokens ? ` (${formatCount(answer.reasoning_tokens)} reasoning)` : ""}`, answer.latency_ms === null ? "" : formatDuration(answer.latency_ms)].filter(Boolean);
  const at = step.answers.indexOf(answer);
  const isOutput = answer.text !== null && answer.text === step.output && !answer.tool_calls.length;
  return h("div", { class: "message assistant" },
    h("div", { class: "message-head" }, h("span", { class: "role" }, step.answers.length > 1 ? `answer ${at + 1}` : "answer"), h("span", { class: "muted num clip" }, facts.join(" · "))),
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
 */
function callOf(call, at, show) {
  const tone = call.outcome === "success" ? "completed" : call.outcome.startsWith("skipped") ? "stopped" : "failed";
  const isUnknown = call.effect === "unknown" || call.outcome === "unknown";
  return h("details", { class: "message tool", open: tone === "failed" && !isUnknown },
    h("summary", {}, icon("right"), h("span", { class: "role mono" }, oneLine(call.name, 60)), h("span", { class: `status is-${isUnknown ? "waiting" : statusTone(tone)}` }, isUnknown ? "unknown" : oneLine(call.outcome, 20)),
      call.duration_ms !== null && h("span", { class: "muted num" }, formatDuration(call.duration_ms)), call.effect && call.effect !== "recorded" && !isUnknown && h("span", { class: "badge" }, oneLine(call.effect, 20).toUpperCase()), line(call.arguments, "muted clip preview-line mono", 120)),
    h("h4", {}, "Arguments"), show(`tool_calls.${at}.arguments`, pretty(call.arguments), { label: "Arguments" }),
    h("h4", {}, "Result"), call.result === null ? h("p", { class: "muted note" }, "Unknown: the process ended before it recorded the result.") : show(`tool_calls.${at}.result`, pretty(call.result), { label: "Result" }));
}
