// A trace of a run that was written to a file, as a run. Fields that it lacks break nothing (S-VIZ-77). Pure.

import { dagFlow, plainRun } from "./dag_file.js";
import { withoutDetail } from "./file.js";
import { tallyLevels } from "../model/items.js";

/** @typedef {import("./file.js").RunFile} RunFile */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../types.js").StepDetail} StepDetail */
/** @typedef {import("../types.js").Answer} Answer */
/** @typedef {import("../types.js").ToolCallDetail} ToolCallDetail */
/** @typedef {Record<string, unknown>} Fields */

/** @param {unknown} value */
const text = (value) => (typeof value === "string" ? value : "");
/** @param {unknown} value @returns {Fields[]} */
const list = (value) => (Array.isArray(value) ? value.filter((one) => typeof one === "object" && one !== null) : []);
/** @param {unknown} value @returns {string[]} */
const texts = (value) => (Array.isArray(value) ? value.map(text) : []);
/** @param {unknown} value @returns {Fields} */
const fields = (value) => (typeof value === "object" && value !== null ? /** @type {Fields} */ (value) : {});
/** @param {unknown} value */
const instant = (value) => Date.parse(text(value)) || null;
/** An ISO 8601 duration without years and months, ms. @param {unknown} value */
const durationOf = (value) => {
  const [, days, hours, minutes, seconds] = /^P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:([\d.]+)S)?)?$/.exec(text(value)) ?? [];
  return Math.round(((Number(days ?? 0) * 24 + Number(hours ?? 0)) * 60 + Number(minutes ?? 0)) * 60_000 + Number(seconds ?? 0) * 1000);
};
/** A number that is known: traces say -1 for unknown. @param {unknown} value */
const known = (value) => (typeof value === "number" && value >= 0 ? value : null);

/**
 * @param {Fields} trace
 * @returns {{detail: StepDetail, children: StepDetail[]}}
 * @param {string} id
 * @param {string|null} parent
 */
function stepOf(trace, id, parent) {
  const answers = list(trace.llm_interactions);
  const calls = answers.flatMap((answer) => list(answer.tool_calls).map((call) => callOf(call, known(answer.iteration_index))));
  const metrics = fields(trace.metrics);
  const [started, ended] = [instant(trace.started_at), instant(trace.completed_at)];
  const prompts = fields(trace.prompts);
  /** @type {Step} */
  const step = {
    id, node: null, parent, kind: text(trace.node_type) || (parent ? "delegation" : "task"), title: text(trace.task_description).slice(0, 120), agent: text(trace.agent_role), status: "completed", number: null, attempts: 1,
    started_at: started, ended_at: ended,
    segments: answers.flatMap((answer) => {
      const [from, to] = [instant(answer.started_at), instant(answer.completed_at)];
      if (from === null || to === null) return [];
      const asked = Math.min(to, from + durationOf(answer.permit_wait));
      /** @type {[import("../types.js").SegmentKind, number, number][]} */
      const parts = [["rate_limit", from, asked], ["model", asked, to]];
      return parts.filter(([kind]) => kind === "model" || asked > from);
    }).concat(/** @type {any} */ (calls.flatMap((call) => (call.started_at === null || call.duration_ms === null ? [] : [["tool", call.started_at, call.started_at + call.duration_ms]])))),
    tools: calls.map((call) => [call.name, call.outcome, (call.started_at ?? started ?? 0) + (call.duration_ms ?? 0)]),
    tokens: { input: known(metrics.input_tokens), output: known(metrics.output_tokens), cached: known(metrics.cached_tokens) }, cost: null, level: known(trace.map_reduce_level), error: null, effect: null, place: null, reviewed: false,
  };
  /** @type {StepDetail} */
  const detail = {
    ...withoutDetail(step), tool_calls: calls, output: typeof trace.final_output === "string" ? trace.final_output : null, structured_output: trace.parsed_output ?? null,
    prompt: [["system", prompts.system_prompt], ["user", prompts.user_prompt]].filter(([, content]) => text(content)).map(([role, content]) => ({ role: text(role), content: text(content), attachments: role === "user" ? attachmentsOf(prompts.attachments) : [] })),
    answers: answers.map((answer, at) => answerOf(answer, at)),
  };
  const children = list(trace.delegations).flatMap((one, at) => {
    const worker = one.worker_trace ? fields(one.worker_trace) : { agent_role: one.worker_role, task_description: one.task_description, started_at: one.started_at, completed_at: one.completed_at, final_output: one.result };
    const { detail: own, children: below } = stepOf(worker, `${id}/${text(one.worker_role) || "worker"}#${at}`, id);
    return [{ ...own, kind: "delegation", status: one.succeeded === false ? /** @type {const} */ ("failed") : own.status }, ...below];
  });
  return { detail, children };
}

/**
 * @param {Fields} answer
 * @param {number} at
 * @returns {Answer}
 */
function answerOf(answer, at) {
  const [from, to] = [instant(answer.started_at), instant(answer.completed_at)];
  return {
    iteration: known(answer.iteration_index) ?? at, text: typeof answer.response_text === "string" ? answer.response_text : null, reasoning: typeof answer.reasoning === "string" ? answer.reasoning : null,
    tool_calls: list(answer.tool_calls).map((call) => ({ id: "", name: text(call.tool_name), arguments: text(call.arguments) })),
    input_tokens: known(answer.input_tokens), output_tokens: known(answer.output_tokens), reasoning_tokens: known(answer.reasoning_tokens), cached_tokens: known(answer.cached_tokens), latency_ms: from === null || to === null ? null : to - from, model: null, started_at: from, attempts: attemptsOf(answer), reused: text(answer.reused) || null, reused_tokens: known(answer.reused_tokens),
  };
}

/**
 * The attempts and waits of a model call, which a trace has as texts.
 * @param {Fields} answer
 * @returns {import("../types.js").ModelAttempts|null}
 */
function attemptsOf(answer) {
  /** @type {import("../types.js").ModelWait[]} */
  const waits = texts(answer.waits).map((reason) => ({ cause: "", reason, at: null, wait_ms: null }));
  const permit_ms = durationOf(answer.permit_wait);
  if (permit_ms) waits.push({ cause: "permit", reason: "", at: null, wait_ms: permit_ms });
  return waits.length ? { waits, number: 1, most: null } : null;
}

/**
 * @param {unknown} references
 * @returns {import("../types.js").AttachmentInfo[]}
 */
function attachmentsOf(references) {
  return list(references).map((each) => ({ kind: text(each.kind), name: text(each.name), media_type: text(each.media_type), size_bytes: Number(each.size_bytes) || 0, sha256: text(each.sha256) }));
}

/**
 * @param {Fields} call
 * @param {number|null} iteration
 * @returns {ToolCallDetail}
 */
function callOf(call, iteration) {
  const [from, to] = [instant(call.started_at), instant(call.completed_at)];
  return { name: text(call.tool_name), arguments: text(call.arguments), result: typeof call.result === "string" ? call.result : null, outcome: text(call.outcome) || "success", duration_ms: from === null || to === null ? null : to - from, started_at: from, effect: null, iteration, repairs: texts(call.repairs), log: texts(call.log), attachments: attachmentsOf(call.attachments) };
}

/**
 * How the run ended: a trace has no state if the run completed.
 * @param {Fields} trace
 */
function statusOf(trace) {
  return /** @type {import("../types.js").RunStatus} */ (text(fields(trace.metadata).state) || "completed");
}

/**
 * @param {string} name
 * @param {Fields} trace
 * @returns {RunFile}
 */
export function traceFile(name, trace) {
  const tops = list(trace.task_traces).map((task, at) => stepOf(task, `${at}`, null));
  const details = tops.flatMap(({ detail, children }) => [detail, ...children]);
  const errors = list(trace.errors);
  const [start, end] = [instant(trace.started_at), instant(trace.completed_at)];
  const metrics = fields(trace.metrics);
  const inputs = fields(trace.inputs);
  const run = plainRun(text(trace.ensemble_id) || name, {
    ensemble: text(trace.ensemble_name) || name.replace(/\.trace\.json$|\.json$/, ""), status: statusOf(trace), workflow: text(trace.workflow), created_at: start ?? 0, ended_at: end, duration_ms: start === null || end === null ? null : end - start,
    tokens: known(metrics.total_tokens), counts: { completed: details.length }, inputs, subject: Object.entries(inputs).map(([name, value]) => `${name}: ${value}`).join(" · "),
    failure: errors[0] ? `${text(errors[0].error_type)}: ${text(errors[0].message)}` : "",
    error: errors[0] && statusOf(trace) !== "completed" ? { class: text(errors[0].error_type), message: text(errors[0].message), place: text(errors[0].place), first_failed_step: null, what: text(errors[0].task_description) && `Task '${text(errors[0].task_description)}' failed`, others: errors.length - 1 } : null,
  });
  const flow = dagFlow({ tasks: tops.map(({ detail }, at) => ({ id: String(at), description: detail.title, agent_role: detail.agent, parallel_group: detail.level ?? at, map_reduce_level: detail.level, node_type: detail.kind === "task" ? null : detail.kind })) });
  const levels = tallyLevels(details);
  for (const node of flow.nodes) {
    node.steps = node.count === null ? [node.id] : null;
    node.counts = node.count === null ? null : levels.get(`${node.level} ${node.kind}`) ?? {};
  }
  const columns = Math.max(1, Math.ceil(Math.sqrt(flow.nodes.length)));
  if (flow.nodes.every((node) => node.badges.length === 0)) {
    const row = Math.max(0, ...flow.nodes.map((node) => node.h)) + 34;
    flow.nodes.forEach((node, at) => Object.assign(node, { x: 24 + (at % columns) * 250, y: 24 + Math.floor(at / columns) * row }));
    Object.assign(flow, { width: columns * 250 + 24, height: Math.ceil(flow.nodes.length / columns) * row + 24 });
  }
  return {
    version: "", exported_at: end ?? 0, info: { version: "", actions: [], has_actors: false, has_files: false, has_teams: false, title: name, read_only_reason: null }, run, actors: null,
    steps: details.map((detail) => /** @type {Step} */ (detail)), details: Object.fromEntries(details.map((detail) => [detail.id, detail])), flows: { declared: null, ran: flow },
  };
}
