// Lanes of a timeline: one for each agent, rows within it so that no bars lie over each other. Pure.

import { isFrame } from "./run.js";

/** @typedef {import("../types.js").Step} Step */
/** @typedef {{step: Step, start: number, end: number}} Bar */
/** @typedef {{agent: string, bars: number, rows: Bar[][], reach: number[][]}} Lane */

/** Rows of a lane; what is more lies over others. */
const MOST_ROWS = 128;
/** A lane of more bars shows work alone: thousands that wait in a queue would hide what is done. */
const CROWDED = 40;

/**
 * @param {Iterable<Step>} steps
 * @param {number} now where bars end that have no end yet
 * @returns {Lane[]}
 */
export function lanesOf(steps, now) {
  /** @type {Map<string, Bar[]>} */
  const byAgent = new Map();
  for (const step of steps) {
    if (step.started_at === null || isFrame(step)) continue;
    const isOpen = step.ended_at === null && (step.status === "running" || step.status === "waiting");
    const bar = { step, start: step.started_at, end: step.ended_at ?? (isOpen ? Math.max(now, step.started_at) : lastOf(step)) };
    const agent = step.agent || `(${step.kind})`;
    const bars = byAgent.get(agent);
    if (bars) bars.push(bar);
    else byAgent.set(agent, [bar]);
  }
  const lanes = [...byAgent].map(([agent, bars]) => ({ agent, bars: bars.length, ...pack(bars) }));
  return lanes.sort((a, b) => (a.rows[0]?.[0]?.start ?? 0) - (b.rows[0]?.[0]?.start ?? 0));
}

/**
 * The last instant known of a step that nobody ended.
 * @param {Step} step
 */
function lastOf(step) {
  return Math.max(step.started_at ?? 0, ...step.segments.map(([, , end]) => end), ...step.tools.map(([, , at]) => at));
}

/**
 * When a step came out of the queue.
 * @param {Step} step
 */
function workStart(step) {
  const [first] = step.segments;
  return first?.[0] === "queue" ? first[2] : null;
}

/**
 * First fit, by beginning. `reach` is the latest end up to each bar, by which what is in sight is found.
 * @param {Bar[]} bars
 */
function pack(bars) {
  if (bars.length > CROWDED) for (const bar of bars) bar.start = Math.min(bar.end, workStart(bar.step) ?? bar.start);
  bars.sort((a, b) => a.start - b.start || b.end - a.end);
  /** @type {Bar[][]} */
  const rows = [];
  /** @type {number[][]} */
  const reach = [];
  for (const bar of bars) {
    let at = reach.findIndex((ends) => (ends.at(-1) ?? 0) <= bar.start);
    if (at < 0 && rows.length < MOST_ROWS) {
      at = rows.length;
      rows.push([]);
      reach.push([]);
    } else if (at < 0) {
      at = 0;
      for (let row = 1; row < rows.length; row += 1) if ((reach[row]?.at(-1) ?? 0) < (reach[at]?.at(-1) ?? 0)) at = row;
    }
    rows[at]?.push(bar);
    reach[at]?.push(Math.max(bar.end, reach[at]?.at(-1) ?? 0));
  }
  return { rows, reach };
}

/**
 * The first bar of a row that ends at or behind an instant.
 * @param {number[]} reach
 * @param {number} instant
 */
export function firstInSight(reach, instant) {
  let [low, high] = [0, reach.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (/** @type {number} */ (reach[middle]) < instant) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * A round distance between marks of time, ms.
 * @param {number} span ms in sight
 * @param {number} marks about how many
 */
export function tickStep(span, marks) {
  const rough = span / Math.max(1, marks);
  const choices = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000, 86_400_000];
  return choices.find((choice) => choice >= rough) ?? Math.ceil(rough / 86_400_000) * 86_400_000;
}

/**
 * What the time of a step went to, ms by kind.
 * @param {Step} step
 * @returns {Record<string, number>}
 */
export function waitsOf(step) {
  /** @type {Record<string, number>} */
  const sums = {};
  for (const [kind, start, end] of step.segments) sums[kind] = (sums[kind] ?? 0) + Math.max(0, end - start);
  return sums;
}
