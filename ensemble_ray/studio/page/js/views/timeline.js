// A lane for each agent, a bar for each step, and in it what its time went to. The same as a table for who cannot see it.

import { fill, h, icon } from "../dom.js";
import { formatCount, formatDuration, segmentWord, statusWord } from "../format.js";
import { lanesOf, waitsOf } from "../model/lanes.js";
import { durationOf, isFrame } from "../model/run.js";
import { stepLink } from "../router.js";
import { oneLine } from "../text.js";
import { LaneChart } from "../ui/lane_chart.js";
import { agentName, emptyState, line, segmented, statusPill } from "../ui/parts.js";
import { runStack } from "../ui/series.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../model/run.js").RunModel} RunModel */

const KINDS = ["queue", "rate_limit", "model", "tool", "person", "other"];
const ROWS = 200;

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {Route} route
 * @returns {import("./run.js").Tab}
 */
export function timelineTab(app, model, route) {
  let as = route.params.get("as") === "table" ? "table" : "chart";
  let isFollowing = model.run.is_live;
  let isWhole = true;
  let version = -1;
  let frame = 0;
  let page = 0;

  const canvas = h("canvas", { class: "lanes", tabindex: 0, role: "img" });
  const tip = h("div", { class: "tip-box", hidden: true });
  const holder = h("div", { class: "lanes-view" }, canvas, tip);
  const table = h("div", { class: "scroll" });
  const chart = new LaneChart(canvas);
  const follow = h("input", { type: "checkbox", checked: isFollowing, onchange: () => {
    isFollowing = follow.checked;
    if (isFollowing) isWhole = chart.span.to - chart.span.from >= model.end - model.start;
    request();
  } });
  const toolbar = h("div", { class: "toolbar" },
    segmented("Show as", [["chart", "Chart"], ["table", "Table"]], as, (value) => app.go({ params: { as: value === "table" ? value : null } })),
    h("div", { class: "legend wide" }, KINDS.map((kind) => h("span", {}, h("i", { vars: { "--k": `var(--${kind.replace("_", "-")})` } }), segmentWord(kind))), h("span", {}, h("i", { class: "mark", vars: { "--k": "var(--completed)" } }), "tool call"), h("span", {}, h("i", { class: "mark", vars: { "--k": "var(--failed)" } }), "failed call")),
    h("span", { class: "grow" }),
    model.run.is_live && h("label", { class: "check" }, follow, "Follow latest"),
    h("div", { class: "row zooms" },
      h("button", { class: "icon-button", type: "button", title: "Wider (−)", "aria-label": "Zoom out", onclick: () => zoom(1.5) }, icon("minus")),
      h("button", { class: "icon-button", type: "button", title: "Closer (+)", "aria-label": "Zoom in", onclick: () => zoom(1 / 1.5) }, icon("plus")),
      h("button", { class: "icon-button", type: "button", title: "All of it (0)", "aria-label": "All of it", onclick: () => whole() }, icon("fit"))));
  const stack = runStack(app, model);
  const element = h("div", { class: "timeline" }, toolbar, stack.element, holder, table);
  chart.chosen = route.params.get("step");

  function request() {
    if (frame) return;
    frame = window.requestAnimationFrame(() => {
      frame = 0;
      paint();
    });
  }

  function paint() {
    if (as !== "chart") return;
    const now = model.end;
    if (version !== model.version || model.run.is_live) {
      version = model.version;
      chart.lanes = lanesOf(model.steps.values(), now);
      chart.origin = model.start;
      chart.now = model.run.is_live ? now : 0;
      const bars = chart.lanes.reduce((sum, lane) => sum + lane.bars, 0);
      canvas.setAttribute("aria-label", `Timeline of ${formatCount(bars)} steps of ${chart.lanes.length} agents over ${formatDuration(now - chart.origin)}. The table has the same.`);
    }
    const length = Math.max(1, now - chart.origin);
    if (isWhole) chart.span = { from: chart.origin, to: chart.origin + length * 1.02 + 1 };
    else if (isFollowing) {
      const width = chart.span.to - chart.span.from;
      chart.span = { from: now + width * 0.05 - width, to: now + width * 0.05 };
    }
    chart.scroll = Math.max(0, Math.min(chart.scroll, chart.content - chart.height));
    chart.draw();
    canvas.dataset.drawn = String(chart.drawn);
  }

  /**
   * @param {number} factor under 1: closer
   * @param {number} [x]
   */
  function zoom(factor, x) {
    const at = x === undefined || x < chart.gutter ? (chart.span.from + chart.span.to) / 2 : chart.instantAt(x);
    const whole_ms = Math.max(1, model.end - chart.origin) * 1.1;
    const width = chart.span.to - chart.span.from;
    const to = Math.min(whole_ms, Math.max(2, width * factor));
    if (to >= whole_ms) return whole();
    isWhole = false;
    if (x !== undefined) stopFollowing();
    chart.span = { from: at - ((at - chart.span.from) / width) * to, to: at + ((chart.span.to - at) / width) * to };
    request();
  }

  /** @param {number} pixels */
  function pan(pixels) {
    const by = (pixels / chart.room) * (chart.span.to - chart.span.from);
    isWhole = false;
    stopFollowing();
    chart.span = { from: chart.span.from + by, to: chart.span.to + by };
    request();
  }

  function whole() {
    isWhole = true;
    request();
  }

  function stopFollowing() {
    isFollowing = false;
    follow.checked = false;
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const step = event.deltaMode === 1 ? 18 : 1;
    const canScroll = chart.content > chart.height;
    if (event.ctrlKey || event.metaKey || (!canScroll && !event.shiftKey && event.deltaX === 0)) zoom(Math.exp((event.deltaY * step) / 400), event.offsetX);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) * step);
    else {
      chart.scroll += event.deltaY * step;
      request();
    }
  }, { passive: false });

  /** @type {{x: number, y: number, moved: number}|null} */
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: 0 };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      drag = { x: event.clientX, y: event.clientY, moved: drag.moved + Math.abs(dx) + Math.abs(dy) };
      if (drag.moved > 4) {
        if (!canvas.hasPointerCapture(event.pointerId)) canvas.setPointerCapture(event.pointerId);
        chart.scroll -= dy;
        if (dx) pan(-dx);
        else request();
      }
      return;
    }
    point(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointerup", (event) => {
    const wasClick = drag !== null && drag.moved <= 4;
    drag = null;
    if (!wasClick) return;
    const bar = chart.barAt(event.offsetX, event.offsetY);
    if (bar) app.go({ params: { step: bar.step.id } });
  });
  canvas.addEventListener("pointercancel", () => {
    drag = null;
  });
  canvas.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, event.offsetX));

  /**
   * Say what lies under the pointer.
   * @param {number} x
   * @param {number} y
   */
  function point(x, y) {
    const bar = chart.barAt(x, y);
    canvas.classList.toggle("over", bar !== null);
    tip.hidden = bar === null;
    if (!bar) return;
    const { step } = bar;
    const waits = Object.entries(waitsOf(step)).sort((a, b) => b[1] - a[1]);
    fill(tip, h("div", { class: "row" }, statusPill(step.status), h("span", { class: "num" }, formatDuration(durationOf(step, model.end)))), line(step.title, "tip-title", 140),
      h("div", { class: "muted" }, `${step.id} · starts at ${formatDuration(bar.start - chart.origin)}`),
      waits.map(([kind, ms]) => h("div", { class: "tip-wait" }, h("i", { vars: { "--k": `var(--${kind.replace("_", "-")})` } }), segmentWord(kind), h("span", { class: "grow" }), formatDuration(ms))),
      step.tools.slice(0, 6).map(([name, outcome]) => h("div", { class: "muted" }, `${oneLine(name, 40)}: ${outcome}`)));
    const [right, low] = [x + 300 > chart.width, y + 150 > chart.height];
    tip.style.transform = `translate(${right ? x - 272 : x + 14}px, ${low ? Math.max(0, y - tip.offsetHeight - 10) : y + 14}px)`;
  }

  function drawTable() {
    const steps = [...model.steps.values()].filter((step) => step.started_at !== null && !isFrame(step)).sort((a, b) => (a.started_at ?? 0) - (b.started_at ?? 0));
    if (!steps.length) return fill(table, emptyState({ title: "No step has started", text: "A row appears when a step starts." }));
    const pages = Math.ceil(steps.length / ROWS);
    page = Math.min(page, pages - 1);
    const origin = model.start;
    const now = model.end;
    const rows = steps.slice(page * ROWS, (page + 1) * ROWS).map((step) => {
      const waits = waitsOf(step);
      return h("tr", {}, h("td", {}, h("a", { href: stepLink(model.run.run_id, step.id, "timeline"), class: "mono" }, step.id)), h("td", {}, agentName(step.agent)), h("td", {}, statusWord(step.status)),
        h("td", { class: "num" }, formatDuration((step.started_at ?? 0) - origin)), h("td", { class: "num" }, formatDuration(durationOf(step, now))),
        KINDS.map((kind) => h("td", { class: "num" }, waits[kind] ? formatDuration(waits[kind]) : "")), h("td", { class: "clip" }, oneLine(step.tools.map(([name, outcome]) => (outcome === "success" ? name : `${name} (${outcome})`)).join(", "), 80)));
    });
    fill(table,
      h("table", { class: "data" }, h("caption", { class: "sr" }, "Steps by start time, with their time by activity"), h("thead", {}, h("tr", {}, ["Step", "Agent", "Status", "Starts at", "Duration", ...KINDS.map(segmentWord), "Tools"].map((word, at) => h("th", { scope: "col", class: at > 2 && at < 11 ? "num" : null }, word)))), h("tbody", {}, rows)),
      pages > 1 && h("div", { class: "list-foot row" }, h("button", { class: "button", type: "button", disabled: page === 0, onclick: () => turn(-1) }, "Earlier"), `${formatCount(page * ROWS + 1)} to ${formatCount(Math.min(steps.length, (page + 1) * ROWS))} of ${formatCount(steps.length)}`, h("button", { class: "button", type: "button", disabled: page === pages - 1, onclick: () => turn(1) }, "Later")));
  }

  /** @param {number} by */
  function turn(by) {
    page += by;
    drawTable();
    table.scrollTop = 0;
  }

  function draw() {
    holder.hidden = as !== "chart";
    table.hidden = as !== "table";
    if (as === "chart") request();
    else drawTable();
  }

  function recolour() {
    chart.readColours();
    request();
  }

  const watcher = new ResizeObserver(request);
  watcher.observe(holder);
  window.addEventListener("themechange", recolour);
  const clock = window.setInterval(() => model.run.is_live && model.run.status === "running" && request(), 250);
  draw();
  return {
    element,
    draw,
    update(now) {
      chart.chosen = now.params.get("step");
      as = now.params.get("as") === "table" ? "table" : "chart";
      draw();
    },
    close() {
      window.clearInterval(clock);
      window.cancelAnimationFrame(frame);
      watcher.disconnect();
      stack.close();
      window.removeEventListener("themechange", recolour);
    },
    keys: {
      "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: () => whole(), ArrowLeft: () => pan(-80), ArrowRight: () => pan(80),
      ArrowDown: () => ((chart.scroll += 60), request()), ArrowUp: () => ((chart.scroll -= 60), request()),
      f: () => {
        isFollowing = follow.checked = !isFollowing;
        request();
      },
    },
  };
}
