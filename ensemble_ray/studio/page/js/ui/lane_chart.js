// Draws lanes on a canvas: only what is in sight, bars under a pixel together. Says what lies under a point.

import { ROLE_COLOURS, formatDuration, roleClass, statusTone } from "../format.js";
import { firstInSight, tickStep } from "../model/lanes.js";
import { oneLine } from "../text.js";
import { colour } from "./theme.js";

/** @typedef {import("../model/lanes.js").Lane} Lane */
/** @typedef {import("../model/lanes.js").Bar} Bar */
/** @typedef {{from: number, to: number}} Span instants in sight, ms */

const AXIS = 28;
const LANE_GAP = 10;
const KINDS = ["queue", "rate_limit", "model", "tool", "person", "other"];
const TONES = ["running", "waiting", "completed", "failed", "exited", "stopped"];

/** @param {number} rows */
function rowHeight(rows) {
  return rows > 64 ? 4 : rows > 24 ? 6 : rows > 8 ? 11 : 24;
}

export class LaneChart {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    /** @type {Lane[]} */
    this.lanes = [];
    /** @type {Span} */
    this.span = { from: 0, to: 1 };
    this.origin = 0;
    this.now = 0;
    this.scroll = 0;
    /** @type {string|null} */
    this.chosen = null;
    this.gutter = 150;
    /** @type {Record<string, string>} */
    this.colours = {};
    this.drawn = 0;
    this.readColours();
  }

  /** Take the colours of the theme. */
  readColours() {
    const names = ["text", "muted", "line", "line-strong", "surface", "bg", "sunken", "accent", "on-bar", ...TONES, ...TONES.map((tone) => `${tone}-bg`), "queue", "rate-limit", "model", "tool", "person", "other", ...Array.from({ length: ROLE_COLOURS }, (_, at) => `role-${at}`)];
    this.colours = Object.fromEntries(names.map((name) => [name, colour(`--${name}`)]));
    this.font = getComputedStyle(document.body).fontFamily;
  }

  /** @param {string} name */
  paint(name) {
    this.context.fillStyle = this.colours[name] ?? "gray";
  }

  get width() {
    return this.canvas.clientWidth;
  }

  get height() {
    return this.canvas.clientHeight;
  }

  /** Width of the part that shows time. */
  get room() {
    return Math.max(10, this.width - this.gutter - 12);
  }

  /** Height of all lanes. */
  get content() {
    return this.lanes.reduce((sum, lane) => sum + lane.rows.length * rowHeight(lane.rows.length) + 2 * LANE_GAP, AXIS + 4);
  }

  /** @param {number} instant */
  xOf(instant) {
    return this.gutter + ((instant - this.span.from) / (this.span.to - this.span.from)) * this.room;
  }

  /** @param {number} x */
  instantAt(x) {
    return this.span.from + ((x - this.gutter) / this.room) * (this.span.to - this.span.from);
  }

  draw() {
    const { context, width, height } = this;
    if (!width || !height) return;
    const dots = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * dots) || this.canvas.height !== Math.round(height * dots)) {
      this.canvas.width = Math.round(width * dots);
      this.canvas.height = Math.round(height * dots);
    }
    context.setTransform(dots, 0, 0, dots, 0, 0);
    context.font = `560 12px ${this.font}`;
    const names = this.lanes.map((lane) => context.measureText(oneLine(lane.agent, 60)).width + 40);
    this.gutter = width < 620 ? 112 : Math.round(Math.min(Math.max(168, ...names), width / 4));
    this.paint("surface");
    context.fillRect(0, 0, width, height);
    this.drawn = 0;
    this.drawGrid();
    context.save();
    context.beginPath();
    context.rect(0, AXIS, width, height - AXIS);
    context.clip();
    this.eachLane((lane, top, size) => this.drawLane(lane, top, size));
    context.restore();
    this.drawAxis();
  }

  /** @param {(lane: Lane, top: number, size: number) => void} act */
  eachLane(act) {
    let top = AXIS + 4 - this.scroll;
    for (const lane of this.lanes) {
      const size = lane.rows.length * rowHeight(lane.rows.length) + 2 * LANE_GAP;
      if (top + size > AXIS && top < this.height) act(lane, top, size);
      top += size;
    }
  }

  get tick() {
    return tickStep(this.span.to - this.span.from, this.room / 110);
  }

  /** @param {(instant: number, x: number) => void} act */
  eachTick(act) {
    const step = this.tick;
    const first = Math.ceil((this.span.from - this.origin) / step);
    for (let at = first; this.origin + at * step <= this.span.to; at += 1) act(this.origin + at * step, this.xOf(this.origin + at * step));
  }

  drawGrid() {
    this.paint("line");
    this.eachTick((_instant, x) => this.context.fillRect(Math.round(x), AXIS, 1, this.height));
  }

  drawAxis() {
    const { context } = this;
    this.paint("surface");
    context.fillRect(0, 0, this.width, AXIS);
    this.paint("line");
    context.fillRect(0, AXIS - 1, this.width, 1);
    context.fillRect(this.gutter - 1, 0, 1, this.height);
    this.paint("muted");
    context.font = `500 12px ${this.font}`;
    context.textBaseline = "middle";
    this.eachTick((instant, x) => {
      const ms = Math.round(instant - this.origin);
      if (x < this.width - 30) context.fillText(ms === 0 ? "0" : formatDuration(ms).replace(/\.0+(?= s)/, "").replace(/(\.\d)0(?= s)/, "$1"), x + 4, AXIS / 2);
    });
    const x = this.xOf(this.now);
    if (this.now && x > this.gutter && x < this.width) {
      this.paint("running");
      context.fillRect(Math.round(x), 0, 1, this.height);
    }
  }

  /**
   * @param {Lane} lane
   * @param {number} top
   * @param {number} size
   */
  drawLane(lane, top, size) {
    const { context } = this;
    const high = rowHeight(lane.rows.length);
    context.save();
    context.beginPath();
    context.rect(this.gutter, top, this.width - this.gutter, size);
    context.clip();
    lane.rows.forEach((row, at) => {
      const y = top + LANE_GAP + at * high;
      if (y + high > AXIS && y < this.height) this.drawRow(row, /** @type {number[]} */ (lane.reach[at]), y, high);
    });
    context.restore();
    this.paint("line");
    context.fillRect(0, Math.round(top + size) - 1, this.width, 1);
    const middle = Math.max(top + LANE_GAP + 10, Math.min(top + size / 2, AXIS + 16));
    const y = size < 60 ? top + size / 2 : Math.max(top + 20, middle);
    this.paint(roleClass(lane.agent) || "other");
    context.beginPath();
    context.arc(17, y, 4, 0, 7);
    context.fill();
    this.paint("text");
    context.font = `560 12px ${this.font}`;
    context.textBaseline = "middle";
    const few = lane.bars < 2;
    context.fillText(this.shorten(oneLine(lane.agent, 60), this.gutter - 36), 28, few ? y : y - 7);
    this.paint("muted");
    context.font = `400 12px ${this.font}`;
    if (!few) context.fillText(`${lane.bars.toLocaleString("en-US")} steps`, 28, y + 8);
  }

  /**
   * @param {string} text
   * @param {number} room
   */
  shorten(text, room) {
    if (this.context.measureText(text).width <= room) return text;
    let cut = text;
    while (cut.length > 1 && this.context.measureText(`${cut}…`).width > room) cut = cut.slice(0, -1);
    return `${cut}…`;
  }

  /**
   * @param {Bar[]} row
   * @param {number[]} reach
   * @param {number} y
   * @param {number} high
   */
  drawRow(row, reach, y, high) {
    const pad = high > 12 ? 2 : 1;
    /** A run of bars that are too narrow to be drawn each: from, to, loudest tone. @type {[number, number, string]|null} */
    let narrow = null;
    const flush = () => {
      if (!narrow) return;
      this.paint(narrow[2]);
      this.context.fillRect(narrow[0], y + pad, Math.max(1, narrow[1] - narrow[0]), high - 2 * pad);
      this.drawn += 1;
      narrow = null;
    };
    let covered = 0;
    for (let at = firstInSight(reach, this.span.from); at < row.length; at += 1) {
      const bar = /** @type {Bar} */ (row[at]);
      if (bar.start > this.span.to) break;
      const [x, end] = [this.xOf(bar.start), this.xOf(bar.end)];
      const tone = statusTone(bar.step.status);
      const isLoud = bar.step.id === this.chosen;
      if (end < covered && tone === "completed" && !isLoud) continue; // it lies under others
      covered = Math.max(covered, end);
      if (end - x < 2.5 && !isLoud) {
        const fillName = tone === "failed" ? "failed" : tone === "running" ? "running" : "model";
        if (narrow && x - narrow[1] < 1 && (narrow[2] === fillName || narrow[2] === "failed")) narrow[1] = Math.max(narrow[1], end);
        else {
          flush();
          narrow = [x, Math.max(end, x + 1), fillName];
        }
        continue;
      }
      flush();
      this.drawBar(bar, x, Math.max(end - 0.8, x + 2), y + pad, high - 2 * pad, tone);
      this.drawn += 1;
    }
    flush();
  }

  /**
   * @param {Bar} bar
   * @param {number} x
   * @param {number} end
   * @param {number} y
   * @param {number} high
   * @param {string} tone
   */
  drawBar(bar, x, end, y, high, tone) {
    const { context } = this;
    if (high < 8) return this.drawThin(bar, x, end, y, high, tone);
    const radius = Math.min(3, high / 3, (end - x) / 2);
    context.save();
    context.beginPath();
    context.roundRect(x, y, end - x, high, radius);
    this.paint(bar.step.segments.length ? "other" : tone === "completed" ? "model" : tone);
    if (!bar.step.segments.length) context.globalAlpha = 0.75;
    context.fill();
    context.globalAlpha = 1;
    if (bar.step.segments.length) {
      context.clip();
      for (const [kind, from, to] of bar.step.segments) {
        const [left, right] = [this.xOf(from), this.xOf(to)];
        this.paint(KINDS.includes(kind) ? kind.replace("_", "-") : "other");
        context.fillRect(left, y, Math.max(0.5, right - left), high);
      }
    }
    context.restore();
    if (tone === "failed" || tone === "running" || tone === "waiting" || bar.step.id === this.chosen) {
      context.strokeStyle = this.colours[bar.step.id === this.chosen ? "text" : tone] ?? "red";
      context.lineWidth = bar.step.id === this.chosen ? 2 : 1.5;
      context.beginPath();
      context.roundRect(x, y, end - x, high, radius);
      context.stroke();
    }
    if (high >= 14 && end - x > 44) this.drawTitle(bar, Math.max(x, this.gutter), end, y + high / 2);
    if (high >= 8) for (const [, outcome, at] of bar.step.tools) this.drawMark(this.xOf(at), y + high - 1, outcome, Math.min(5, high / 3));
  }

  /**
   * A bar of a crowded lane: rectangles alone, for there may be thousands.
   * @param {Bar} bar
   * @param {number} x
   * @param {number} end
   * @param {number} y
   * @param {number} high
   * @param {string} tone
   */
  drawThin(bar, x, end, y, high, tone) {
    const isMarked = tone !== "completed" || bar.step.id === this.chosen;
    this.paint(bar.step.id === this.chosen ? "text" : isMarked ? tone : bar.step.segments.length ? "other" : "model");
    this.context.fillRect(x, y, end - x, high);
    if (isMarked) return;
    for (const [kind, from, to] of bar.step.segments) {
      const [left, right] = [Math.max(x, this.xOf(from)), Math.min(end, this.xOf(to))];
      if (right - left < 0.3) continue;
      this.paint(KINDS.includes(kind) ? kind.replace("_", "-") : "other");
      this.context.fillRect(left, y, right - left, high);
    }
  }

  /**
   * @param {Bar} bar
   * @param {number} x
   * @param {number} end
   * @param {number} y
   */
  drawTitle(bar, x, end, y) {
    const { context } = this;
    const { segments, status } = bar.step;
    const queue = segments.find(([kind, from]) => kind === "queue" && this.xOf(from) <= x + 1);
    const behind = queue ? Math.max(x, this.xOf(queue[2])) : x;
    const left = end - behind > 70 ? behind : x;
    const room = end - left - 14;
    if (room < 30) return;
    const isPale = left < behind || (!segments.length && status !== "completed" && status !== "running");
    context.font = `560 12px ${this.font}`;
    context.textBaseline = "middle";
    this.paint(isPale ? "text" : "on-bar");
    context.fillText(this.shorten(oneLine(bar.step.title, 90), room), left + 7, y + 0.5);
  }

  /**
   * @param {number} x
   * @param {number} y
   * @param {string} outcome
   * @param {number} size
   */
  drawMark(x, y, outcome, size) {
    const { context } = this;
    this.paint(outcome === "success" ? "completed" : outcome.startsWith("skipped") ? "stopped" : "failed");
    context.strokeStyle = this.colours.surface ?? "white";
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, y - size);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.lineTo(x - size, y);
    context.closePath();
    context.stroke();
    context.fill();
  }

  /**
   * The bar under a point, or the nearest within three pixels.
   * @param {number} x
   * @param {number} y
   * @returns {Bar|null}
   */
  barAt(x, y) {
    if (x < this.gutter || y < AXIS) return null;
    /** @type {Bar|null} */
    let found = null;
    const slack = ((this.span.to - this.span.from) / this.room) * 3;
    const instant = this.instantAt(x);
    this.eachLane((lane, top) => {
      const high = rowHeight(lane.rows.length);
      const at = Math.floor((y - top - LANE_GAP) / high);
      const row = lane.rows[at];
      if (!row || y < top + LANE_GAP) return;
      for (let index = firstInSight(/** @type {number[]} */ (lane.reach[at]), instant - slack); index < row.length; index += 1) {
        const bar = /** @type {Bar} */ (row[index]);
        if (bar.start > instant + slack) break;
        if (bar.end >= instant - slack) found = bar;
        if (bar.start <= instant && bar.end >= instant) break;
      }
    });
    return found;
  }
}
