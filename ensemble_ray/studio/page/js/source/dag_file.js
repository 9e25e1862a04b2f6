// A graph that was written to a file before any run (`.dag.json`), as a run in which nothing began. Pure.

import { isOfTree } from "../model/items.js";

/** @typedef {import("./file.js").RunFile} RunFile */
/** @typedef {import("../types.js").Flow} Flow */
/** @typedef {import("../types.js").FlowNode} FlowNode */
/** @typedef {import("../types.js").FlowEdge} FlowEdge */
/** @typedef {import("../types.js").RunDetail} RunDetail */
/** @typedef {Record<string, unknown>} Fields */

const [WIDTH, HEIGHT, FOLDED_HEIGHT, ACROSS, DOWN] = [208, 72, 104, 72, 34];

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
 * Words on a node (S-VIZ-71).
 * @param {Fields} node
 */
function badgesOf(node) {
  const kind = text(node.node_type);
  const level = number(node.map_reduce_level);
  const words = { map: "MAP", reduce: `REDUCE L${level ?? "?"}`, "final-reduce": "AGGREGATE", direct: "DIRECT", loop: `LOOP ≤${node.loop_max_iterations ?? "?"}`, "graph-state": "STATE", "graph-end": "END" };
  const found = kind in words ? [words[/** @type {keyof typeof words} */ (kind)]] : [`L${number(node.parallel_group) ?? 0}`];
  return node.on_critical_path ? [...found, "CP"] : found;
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
  /** @type {Map<number, number>} */
  const filled = new Map();
  /** @type {Map<string, FlowNode>} */
  const byId = new Map();
  const nodes = foldLevels(tasks).map((members, at) => {
    const task = /** @type {Fields} */ (members[0]);
    const count = members.length > 1 ? members.length : null;
    const level = isGraph ? at : (number(task.parallel_group) ?? 0);
    const place = isGraph ? 0 : (filled.get(level) ?? 0);
    filled.set(level, place + 1);
    const [x, y] = isGraph ? [ACROSS, level * (HEIGHT + 2 * DOWN)] : [level * (WIDTH + ACROSS), place * (HEIGHT + DOWN)];
    /** @type {FlowNode} */
    const node = { id: text(task.id), x: x + 24, y: y + 24, w: WIDTH, h: count ? FOLDED_HEIGHT : HEIGHT, kind: text(task.node_type) || "task", title: sharedTitle(members.map((one) => text(one.description))), agent: text(task.agent_role), level, critical: members.some((one) => one.on_critical_path === true), group: null, steps: [], count, counts: count ? {} : null, badges: badgesOf(task) };
    for (const one of members) byId.set(text(one.id), node);
    return node;
  });
  const edges = isGraph ? list(dag.graph_edges).map((edge) => stateEdge(edge, byId)) : taskEdges(tasks, byId, dag);
  return {
    width: Math.max(1, ...nodes.map((node) => node.x + node.w)) + 40, height: Math.max(1, ...nodes.map((node) => node.y + node.h)) + 24,
    nodes, edges: edges.filter((edge) => edge !== null), groups: [], mode: isGraph ? "graph" : "dag", critical_path: (Array.isArray(dag.critical_path) ? dag.critical_path : []).map(text),
  };
}

/**
 * @param {Fields[]} tasks
 * @param {Map<string, FlowNode>} byId
 * @param {Fields} dag
 * @returns {FlowEdge[]}
 */
function taskEdges(tasks, byId, dag) {
  const path = Array.isArray(dag.critical_path) ? dag.critical_path : [];
  /** @type {Map<string, FlowEdge>} */
  const found = new Map();
  for (const task of tasks) {
    for (const before of Array.isArray(task.depends_on) ? task.depends_on : []) {
      const [a, b] = [byId.get(text(before)), byId.get(text(task.id))];
      if (!a || !b || a === b) continue;
      const at = path.indexOf(before);
      const edge = found.get(`${a.id} ${b.id}`) ?? { from: a.id, to: b.id, points: [[a.x + a.w, a.y + a.h / 2], [b.x, b.y + b.h / 2]], kind: "dependency", label: null, critical: false, fired: null };
      edge.critical ||= at >= 0 && path[at + 1] === task.id;
      found.set(`${a.id} ${b.id}`, edge);
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
  const isNext = b.y > a.y && b.y - a.y < 2 * (HEIGHT + DOWN);
  const side = b.y > a.y ? a.x + a.w : a.x;
  const out = b.y > a.y ? side + 46 : side - 46;
  /** @type {[number, number][]} */
  const points = isNext ? [[a.x + a.w / 2, a.y + a.h], [b.x + b.w / 2, b.y]] : [[side, a.y + a.h / 2], [out, a.y + a.h / 2], [out, b.y + b.h / 2], [side, b.y + b.h / 2]];
  return { from, to, points, kind: edge.unconditional ? "unconditional" : "conditional", label: text(edge.condition_description) || null, critical: false, fired: typeof edge.fired === "boolean" ? edge.fired : null };
}

/**
 * @param {string} name
 * @param {Fields} dag
 * @returns {RunFile}
 */
export function dagFile(name, dag) {
  const run = plainRun(name.replace(/\.dag\.json$|\.json$/, ""), { workflow: text(dag.workflow), created_at: Date.parse(text(dag.generated_at)) || 0 });
  return { version: "", exported_at: run.created_at, info: { version: "", actions: [], has_actors: false, has_files: false, title: name, read_only_reason: null }, run, steps: [], details: {}, flows: { declared: dagFlow(dag), ran: null }, actors: null };
}
