// A graph that was written to a file before any run (`.dag.json`), as a run in which nothing began. Pure.

import { isOfTree } from "../model/items.js";

/** @typedef {import("./file.js").RunFile} RunFile */
/** @typedef {import("../types.js").Flow} Flow */
/** @typedef {import("../types.js").FlowNode} FlowNode */
/** @typedef {import("../types.js").FlowEdge} FlowEdge */
/** @typedef {import("../types.js").RunDetail} RunDetail */
/** @typedef {Record<string, unknown>} Fields */

const [WIDTH, HEIGHT, FOLDED_HEIGHT, ACROSS, DOWN] = [208, 72, 104, 72, 34];
const [END_WIDTH, END_HEIGHT] = [92, 36];
/** Letters in a line of a title, and of an agent's name that has a line of its own. */
const [TITLE, AGENT, SHORT_AGENT] = [19, 25, 14];
/** Room beside the states of a graph, for lines and their labels. */
const SIDE = 260;

/** @param {unknown} value */
const text = (value) => (typeof value === "string" ? value : "");
/** @param {unknown} value @returns {Fields[]} */
const list = (value) => (Array.isArray(value) ? value.filter((one) => typeof one === "object" && one !== null) : []);
/** @param {unknown} value */
const number = (value) => (typeof value === "number" ? value : null);

/**
 * A run of which nothing is known but what `known` says.
 * @param {string} id
 * @param {Partial<RunDetail>} known
 * @returns {RunDetail}
 */
export function plainRun(id, known) {
  return {
    run_id: id, ensemble: id, status: "accepted", tags: {}, summary: "", subject: "", failure: "", created_at: 0, ended_at: null, duration_ms: null, tokens: null, cost: null, open_reviews: 0, origin_run: null,
    place: "", workflow: "", tasks: 0, inputs: {}, exit_reason: null, exit_reason_text: null, error: null, first_error_step: null, counts: {}, reviews: [],
    budget: { tokens: { spent: null, allowed: null }, cost: { spent: null, allowed: null, currency: null }, by_agent: [], end_reason: null }, forked_from: null, forks: [], cursor: 0, is_live: false, problem: null,
    ...known,
  };
}

/**
 * The badge of a node, if it has one (S-VIZ-71).
 * @param {Fields} node
 * @param {boolean} isStart of a graph
 */
function badgesOf(node, isStart) {
  const words = { map: "MAP", reduce: `REDUCE L${number(node.map_reduce_level) ?? "?"}`, "final-reduce": "AGGREGATE", direct: "DIRECT", loop: `LOOP ≤${node.loop_max_iterations ?? "?"}`, "graph-end": "END" };
  const kind = text(node.node_type);
  return kind in words ? [words[/** @type {keyof typeof words} */ (kind)]] : isStart ? ["START"] : [];
}

/**
 * Height of the lines of a title behind the second one, up to the seventh.
 * @param {string} title
 */
function moreLines(title) {
  return 17 * Math.min(5, Math.max(0, Math.ceil(title.length / TITLE) - 2));
}

/**
 * Height of a node, so that its title and its agent are whole.
 * @param {string} title
 * @param {string} agent
 */
function heightOf(title, agent) {
  return HEIGHT + moreLines(title) + 16 * (agent.length > SHORT_AGENT ? Math.min(3, Math.ceil(agent.length / AGENT)) : 0);
}

/**
 * Tasks that are one node: those of a level of a map-reduce, or a single one.
 * @param {Fields[]} tasks
 */
function foldLevels(tasks) {
  /** @type {Map<string, Fields[]>} */
  const places = new Map();
  for (const task of tasks) {
    const kind = text(task.node_type);
    const place = isOfTree({ kind }) ? `${kind} ${number(task.map_reduce_level)}` : String(places.size);
    const found = places.get(place);
    if (found) found.push(task);
    else places.set(place, [task]);
  }
  return [...places.values()];
}

/** @param {string[]} titles */
function sharedTitle(titles) {
  const [first = "", ...rest] = titles;
  let length = first.length;
  for (const title of rest) while (!title.startsWith(first.slice(0, length))) length -= 1;
  if (titles.every((title) => title === first)) return first;
  return length >= 8 ? `${first.slice(0, length).trimEnd()}…` : `${first}, and ${rest.length} more`;
}

/**
 * @param {Fields} dag
 * @returns {Flow}
 */
export function dagFlow(dag) {
  const tasks = list(dag.tasks);
  const isGraph = dag.mode === "graph";
  /** Where the next node of a column begins. @type {Map<number, number>} */
  const filled = new Map();
  /** @type {Map<string, FlowNode>} */
  const byId = new Map();
  const nodes = foldLevels(tasks).map((members, at) => {
    const task = /** @type {Fields} */ (members[0]);
    const count = members.length > 1 ? members.length : null;
    const isEnd = task.node_type === "graph-end";
    const level = isGraph ? at : (number(task.parallel_group) ?? 0);
    const title = sharedTitle(members.map((one) => text(one.description)));
    const agent = text(task.agent_role);
    const column = isGraph ? 0 : level;
    const y = filled.get(column) ?? 24;
    const [w, tall] = isEnd ? [END_WIDTH, END_HEIGHT] : [WIDTH, count ? FOLDED_HEIGHT + moreLines(title) : heightOf(title, agent)];
    filled.set(column, y + tall + (isGraph ? 2 * DOWN : DOWN));
    const x = isGraph ? SIDE + (WIDTH - w) / 2 : 24 + level * (WIDTH + ACROSS);
    /** @type {FlowNode} */
    const node = { id: text(task.id), x, y, w, h: tall, kind: isEnd ? "end" : text(task.node_type) || "task", title, agent, level, critical: false, group: null, steps: [], count, counts: count ? {} : null, badges: badgesOf(task, isGraph && task.id === dag.graph_start_state_id) };
    for (const one of members) byId.set(text(one.id), node);
    return node;
  });
  const edges = isGraph ? list(dag.graph_edges).map((edge) => stateEdge(edge, byId)) : taskEdges(tasks, byId);
  return {
    width: Math.max(1, ...nodes.map((node) => node.x + node.w)) + (isGraph ? SIDE : 40), height: Math.max(1, ...nodes.map((node) => node.y + node.h)) + 24,
    nodes, edges: edges.filter((edge) => edge !== null), groups: [], mode: isGraph ? "graph" : "dag", critical_path: [],
  };
}

/**
 * @param {Fields[]} tasks
 * @param {Map<string, FlowNode>} byId
 * @returns {FlowEdge[]}
 */
function taskEdges(tasks, byId) {
  /** @type {Map<string, FlowEdge>} */
  const found = new Map();
  for (const task of tasks) {
    for (const before of Array.isArray(task.depends_on) ? task.depends_on : []) {
      const [a, b] = [byId.get(text(before)), byId.get(text(task.id))];
      if (!a || !b || a === b) continue;
      found.set(`${a.id} ${b.id}`, { from: a.id, to: b.id, points: [[a.x + a.w, a.y + a.h / 2], [b.x, b.y + b.h / 2]], kind: "dependency", label: null, critical: false, fired: null });
    }
  }
  return [...found.values()];
}

/**
 * @param {Fields} edge
 * @param {Map<string, FlowNode>} byId
 * @returns {FlowEdge|null}
 */
function stateEdge(edge, byId) {
  const [from, to] = [text(edge.from_state_id), text(edge.to_state_id)];
  const [a, b] = [byId.get(from), byId.get(to)];
  if (!a || !b) return null;
  const isDown = b.y > a.y;
  const isNext = isDown && b.y - a.y - a.h <= 2 * DOWN;
  const [middle, aside] = [a.x + a.w / 2, isDown ? WIDTH / 2 + 46 : -WIDTH / 2 - 46];
  const [fromX, toX] = isDown ? [a.x + a.w, b.x + b.w] : [a.x, b.x];
  /** @type {[number, number][]} */
  const points = isNext ? [[middle, a.y + a.h], [middle, b.y]] : [[fromX, a.y + a.h / 2], [middle + aside, a.y + a.h / 2], [middle + aside, b.y + b.h / 2], [toX, b.y + b.h / 2]];
  const label = text(edge.condition_description) || null;
  const half = Math.min(208, 8 + 7.4 * (label ?? "").length) / 2 + 5; // beside the line
  const x = isNext ? middle + half : middle + aside + (isDown ? half : -half);
  const y = isNext ? (a.y + a.h + b.y) / 2 : (a.y + a.h / 2 + b.y + b.h / 2) / 2;
  return { from, to, points, kind: edge.unconditional ? "unconditional" : "conditional", label, label_at: label === null ? null : [x, y], critical: false, fired: typeof edge.fired === "boolean" ? edge.fired : null };
}

/**
 * @param {string} name
 * @param {Fields} dag
 * @returns {RunFile}
 */
export function dagFile(name, dag) {
  const run = plainRun(name.replace(/\.dag\.json$|\.json$/, ""), { workflow: text(dag.workflow), created_at: Date.parse(text(dag.generated_at)) || 0 });
  return { version: "", exported_at: run.created_at, info: { version: "", actions: [], has_actors: false, has_files: false, has_teams: false, title: name, read_only_reason: null }, run, steps: [], details: {}, flows: { declared: dagFlow(dag), ran: null }, actors: null };
}
