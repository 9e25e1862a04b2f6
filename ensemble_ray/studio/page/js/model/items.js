// The items of a map-reduce and their reduces, level by level. Pure.

import { durationOf, tokensOf } from "./run.js";

/** @typedef {import("../types.js").Step} Step */
/**
 * A map, a reduce, or a task over all items.
 * @typedef {object} Item
 * @property {Step} step
 * @property {number} number position within its level, from 0
 * @property {string} title
 * @property {number|null} ms duration without its queue, until now if it runs
 * @property {number} queued ms
 * @property {number|null} tokens with those of its parts
 * @property {string} error
 */
/** @typedef {{from: number, to: number, count: number, failed: number}} Bin durations from `from` ms to before `to` */

const KINDS = new Set(["map", "reduce", "final-reduce", "direct"]);
/** Columns by which the table is sorted: values, and the direction of the first click. */
const COLUMNS = /** @type {Record<string, {value: (item: Item) => string|number|null, sign: number}>} */ ({
  item: { value: (item) => item.number, sign: 1 },
  error: { value: (item) => item.error || null, sign: 1 },
  duration: { value: (item) => item.ms, sign: -1 },
  tokens: { value: (item) => item.tokens, sign: -1 },
});
/** Bars of a histogram at most. */
const BARS = 28;
/** Times the median from which on the longest duration needs bars of growing width. */
const SPREAD = 20;

/** @param {{kind: string}} step */
export function isOfTree(step) {
  return KINDS.has(step.kind);
}

/**
 * Steps of a level by status, under the level and the kind.
 * @param {Iterable<Step>} steps
 */
export function tallyLevels(steps) {
  /** @type {Map<string, Record<string, number>>} */
  const found = new Map();
  for (const step of steps) {
    if (!isOfTree(step)) continue;
    const place = `${step.level} ${step.kind}`;
    let counts = found.get(place);
    if (!counts) found.set(place, counts = {});
    counts[step.status] = (counts[step.status] ?? 0) + 1;
  }
  return found;
}

/**
 * @param {Map<string, Step>} steps
 * @param {number} level
 * @param {number} now
 * @returns {Item[]}
 */
export function itemsOf(steps, level, now) {
  /** @type {Map<string, Item>} */
  const found = new Map();
  for (const step of steps.values()) {
    if (!isOfTree(step) || (step.level ?? 0) !== level) continue;
    const [first] = step.segments;
    const [spent, queued] = [durationOf(step, now), first?.[0] === "queue" ? first[2] - first[1] : 0];
    found.set(step.id, { step, number: step.number ?? found.size, title: step.title || step.id, ms: spent === null ? null : Math.max(0, spent - queued), queued, tokens: tokensOf(step), error: step.error ?? "" });
  }
  for (const step of steps.values()) {
    const item = step.parent === null ? undefined : found.get(step.id.slice(0, step.id.indexOf("/")));
    if (!item) continue;
    const tokens = tokensOf(step);
    if (tokens !== null) item.tokens = (item.tokens ?? 0) + tokens;
    if (step.error && item.step.status === "failed") item.error ||= step.error;
    if (step.kind === "task" && `${item.title}#0` === item.step.id) item.title = step.title; // an item of several tasks has no text of its own
  }
  return [...found.values()];
}

/**
 * How to sort by a column, `-` before its name reverses; any other name puts the failed first, then the slowest.
 * @param {string} sort
 * @returns {(a: Item, b: Item) => number}
 */
export function itemOrder(sort) {
  const column = COLUMNS[sort.replace(/^-/, "")];
  if (!column) {
    const slowest = itemOrder("duration");
    return (a, b) => Number(b.step.status === "failed") - Number(a.step.status === "failed") || slowest(a, b);
  }
  const sign = sort.startsWith("-") ? -column.sign : column.sign;
  return (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null) || a.number - b.number;
    return (x < y ? -sign : x > y ? sign : 0) || a.number - b.number;
  };
}

/**
 * Durations of ended items in bars of equal width, or of growing width if few take much longer than the others.
 * @param {Item[]} items
 * @returns {{bins: Bin[], isGrowing: boolean, middle: number, most: number, longest: number}|null} half of them take at most `middle` ms, 95 of 100 `most`
 */
export function histogramOf(items) {
  const ended = items.filter((item) => item.ms !== null && item.step.ended_at !== null);
  const sorted = ended.map((item) => item.ms ?? 0).sort((a, b) => a - b);
  const [shortest, longest] = [sorted[0], sorted.at(-1)];
  if (shortest === undefined || longest === undefined) return null;
  /** @param {number} share */
  const at = (share) => sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] ?? 0;
  const isGrowing = longest > SPREAD * Math.max(1, at(0.5));
  const first = Math.max(1, shortest);
  const edges = [shortest];
  for (let bar = 1; bar < BARS; bar += 1) {
    const edge = Math.round(isGrowing ? first * (longest / first) ** (bar / BARS) : shortest + ((longest - shortest) * bar) / BARS);
    if (edge > /** @type {number} */ (edges.at(-1)) && edge < longest) edges.push(edge);
  }
  const bins = edges.map((from, bar) => ({ from, to: edges[bar + 1] ?? longest + 1, count: 0, failed: 0 }));
  for (const item of ended) {
    const bin = bins.findLast((one) => one.from <= (item.ms ?? 0));
    if (!bin) continue;
    bin.count += 1;
    if (item.step.status === "failed") bin.failed += 1;
  }
  return { bins, isGrowing, middle: at(0.5), most: at(0.95), longest };
}
