// A run as the page holds it: its steps by id, their tree, and what changes while it goes on.

import { isFileRun } from "../source/file.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").RunDetail} RunDetail */
/** @typedef {import("../types.js").Step} Step */

/** Steps whose children are parts of the same work: their time is shown once, by the children. */
const FRAMES = new Set(["loop", "iteration", "phase", "attempt", "graph", "fork"]);

/** Keeps a run up to date and tells those who watch it. Changes of a burst are told once a frame. */
export class RunModel {
  /**
   * @param {App} app
   * @param {RunDetail} run
   * @param {Step[]} steps
   */
  constructor(app, run, steps) {
    this.app = app;
    /** Whether nothing can be done with it, since it is a file. */
    this.isFile = app.source.isFile || isFileRun(run.run_id);
    this.run = run;
    /** @type {Map<string, Step>} */
    this.steps = new Map(steps.map((step) => [step.id, step]));
    /** Text of answers that are being given, by step. @type {Map<string, string>} */
    this.tokens = new Map();
    /** The same of their reasoning. @type {Map<string, string>} */
    this.thoughts = new Map();
    /** Server's clock ahead of this one, ms; so that bars grow by the server's time. */
    this.isConnected = true;
    /** @type {Set<() => void>} */
    this.listeners = new Set();
    /** @type {Set<(step: string) => void>} */
    this.tokenListeners = new Set();
    /** @type {(() => void)|null} */
    this.stop = null;
    this.isTelling = false;
    /** @type {(isConnected: boolean, retryInMs: number) => void} */
    this.onConnection = () => undefined;
    /** Counts what was told, so that views know whether anything is new. */
    this.version = 0;
  }

  /**
   * Read a run.
   * @param {App} app
   * @param {string} id
   */
  static async load(app, id) {
    const run = await app.source.run(id);
    const { steps, cursor } = await app.source.steps(id, 0);
    return new RunModel(app, { ...run, cursor: Math.max(run.cursor, cursor) === cursor ? cursor : run.cursor }, steps);
  }

  /** Follow the run, if it may change. */
  follow() {
    if (this.stop || !this.run.is_live) return;
    this.stop = this.app.source.live(this.run.run_id, this.run.cursor, {
      onSteps: (news) => {
        for (const step of news.steps) {
          this.steps.set(step.id, step);
          if (step.status !== "running") for (const said of [this.tokens, this.thoughts]) said.delete(step.id);
        }
        this.run = { ...this.run, ...news.run, inputs: Object.keys(news.run.inputs).length ? news.run.inputs : this.run.inputs, cursor: news.cursor };
        this.tell();
      },
      onAnswer: ({ step }) => {
        for (const before of [this.tokens, this.thoughts]) before.delete(step);
        for (const listener of this.tokenListeners) listener(step);
      },
      onToken: ({ step, text, is_reasoning }) => {
        const said = is_reasoning ? this.thoughts : this.tokens;
        said.set(step, (said.get(step) ?? "") + text);
        for (const listener of this.tokenListeners) listener(step);
      },
      onEnd: () => {
        this.stop = null;
        this.setConnection(true, 0);
        // What the stream told is all there is; where the server is gone by now, it stays.
        this.refresh().catch(() => this.tell());
      },
      onConnection: (isConnected, retryInMs) => this.setConnection(isConnected, retryInMs),
    });
  }

  /**
   * @param {boolean} isConnected
   * @param {number} retryInMs
   */
  setConnection(isConnected, retryInMs) {
    if (isConnected) for (const said of [this.tokens, this.thoughts]) said.clear(); // what is being said is told from its beginning on each connection
    this.isConnected = isConnected;
    this.onConnection(isConnected, retryInMs);
  }

  /** Read everything anew: after the end, and after something was done with it. */
  async refresh() {
    const [run, { steps, cursor }] = await Promise.all([this.app.source.run(this.run.run_id), this.app.source.steps(this.run.run_id, 0)]);
    this.run = { ...run, cursor };
    this.steps = new Map(steps.map((step) => [step.id, step]));
    this.tell();
    this.follow();
  }

  tell() {
    this.version += 1;
    if (this.isTelling) return;
    this.isTelling = true;
    window.setTimeout(() => {
      this.isTelling = false;
      for (const listener of [...this.listeners]) listener();
    }, 60);
  }

  /**
   * @param {() => void} listener
   * @returns {() => void} ends it
   */
  watch(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  close() {
    this.stop?.();
    this.stop = null;
    this.listeners.clear();
    this.tokenListeners.clear();
  }

  /** The last instant that anything is known of, ms. */
  get end() {
    if (this.run.is_live && this.run.status !== "waiting") return Date.now();
    let last = this.run.ended_at ?? this.run.created_at;
    for (const step of this.steps.values()) last = Math.max(last, step.ended_at ?? step.started_at ?? 0);
    return last;
  }

  /** The first instant, ms. */
  get start() {
    let first = this.run.created_at;
    for (const step of this.steps.values()) if (step.started_at !== null) first = Math.min(first, step.started_at);
    return first;
  }
}

/**
 * Steps as rows of a tree, parents before their children, in the order in which they came.
 * @param {Iterable<Step>} steps
 * @returns {{step: Step, depth: number, children: number}[]}
 */
export function treeOf(steps) {
  const all = [...steps];
  const known = new Set(all.map((step) => step.id));
  /** @type {Map<string|null, Step[]>} */
  const children = new Map();
  for (const step of all) {
    const parent = step.parent !== null && known.has(step.parent) && step.parent !== step.id ? step.parent : null;
    const siblings = children.get(parent);
    if (siblings) siblings.push(step);
    else children.set(parent, [step]);
  }
  /** @type {{step: Step, depth: number, children: number}[]} */
  const rows = [];
  const stack = [...(children.get(null) ?? [])].reverse().map((step) => ({ step, depth: 0 }));
  while (stack.length) {
    const { step, depth } = /** @type {{step: Step, depth: number}} */ (stack.pop());
    const own = children.get(step.id) ?? [];
    rows.push({ step, depth, children: own.length });
    for (let at = own.length - 1; at >= 0; at -= 1) stack.push({ step: /** @type {Step} */ (own[at]), depth: depth + 1 });
  }
  return rows;
}

/**
 * Whether a step only frames others, such as a loop or an attempt.
 * @param {Step} step
 */
export function isFrame(step) {
  return FRAMES.has(step.kind);
}

/**
 * Duration of a step so far.
 * @param {Step} step
 * @param {number} now
 */
export function durationOf(step, now) {
  if (step.started_at === null) return null;
  if (step.ended_at !== null) return step.ended_at - step.started_at;
  return step.status === "running" || step.status === "waiting" ? Math.max(0, now - step.started_at) : null;
}

/** @param {Step} step */
export function tokensOf(step) {
  if (!step.tokens || (step.tokens.input === null && step.tokens.output === null)) return null;
  return (step.tokens.input ?? 0) + (step.tokens.output ?? 0);
}
