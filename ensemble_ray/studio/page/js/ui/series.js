// A run among those before and behind it (S-VIZ-76): a list to choose another from, and finished runs stacked above it.

import { fill, h, icon, syncChildren } from "../dom.js";
import { countOf, formatDuration, formatTime, runLine, statusWord } from "../format.js";
import { lanesOf } from "../model/lanes.js";
import { formatRoute, stepLink } from "../router.js";
import { oneLine } from "../text.js";
import { LaneChart } from "./lane_chart.js";
import { messageOf, statusMark } from "./parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").RunRow} RunRow */
/** @typedef {import("../model/run.js").RunModel} RunModel */
/**
 * A run of a series; where not all before it were counted, it has no number.
 * @typedef {{number: number|null, run: RunRow}} Numbered
 */

/** How often a series is asked for again, ms. */
const EVERY = 4000;
const GOING_ON = ["accepted", "running", "waiting"];
/** Height of a stacked run, px: lanes that need more are scrolled to on the run's own page. */
const [LOWEST, HIGHEST] = [70, 190];

/**
 * Ask for the series of a run again and again.
 * @param {App} app
 * @param {RunModel} model
 * @param {(runs: Numbered[]) => void} onChange
 * @returns {() => void} ends it
 */
function watchSeries(app, model, onChange) {
  if (model.isFile) return () => undefined;
  let isOver = false;
  let drawn = "";
  async function load() {
    try {
      const { first, runs } = await app.source.series(model.run.run_id);
      const state = JSON.stringify([first, runs]);
      if (isOver || state === drawn) return;
      drawn = state;
      onChange(runs.map((run, at) => ({ number: first === null ? null : first + at, run })));
    } catch {
      // the run itself says that its server is gone; what was shown stays
    }
  }
  void load();
  const timer = window.setInterval(() => document.hidden || void load(), EVERY);
  return () => {
    isOver = true;
    window.clearInterval(timer);
  };
}

/**
 * A list of the runs of a series, to go to another one.
 * @param {App} app
 * @param {RunModel} model
 * @returns {{element: HTMLElement, close: () => void}}
 */
export function runSelector(app, model) {
  const select = h("select", { class: "field run-select", "aria-label": "Run", onchange: () => app.go({ run: select.value, params: { step: null } }) });
  const element = h("label", { class: "row", hidden: true }, select);
  const close = watchSeries(app, model, (runs) => {
    element.hidden = runs.length < 2;
    fill(select, [...runs].reverse().map(({ number, run }) => h("option", { value: run.run_id, selected: run.run_id === model.run.run_id }, [number === null ? formatTime(run.created_at) : `#${number}`, statusWord(run.status), run.duration_ms === null ? null : formatDuration(run.duration_ms), oneLine(runLine(run), 60)].filter(Boolean).join(" · "))));
  });
  return { element, close };
}

/**
 * Finished runs, each a line that opens into its lanes, the newest at the bottom.
 * @param {App} app
 * @param {RunModel} model
 * @returns {{element: HTMLElement, close: () => void}}
 */
export function runStack(app, model) {
  const list = h("div", { class: "stack-rows" });
  const head = h("summary", {}, icon("right"), h("span"));
  const element = h("details", { class: "stack", hidden: true, open: model.run.is_live }, head, list);
  /** @type {Set<() => void>} */
  const redraws = new Set();
  const watcher = new ResizeObserver(() => redraws.forEach((draw) => draw()));
  const recolour = () => redraws.forEach((draw) => draw());

  /** @param {Numbered} one */
  function make(one) {
    const body = h("div", { class: "stack-body" }, h("p", {}, h("a", { href: formatRoute({ view: "run", run: one.run.run_id, tab: "timeline" }) }, "Open this run")));
    const line = h("details", { class: "stack-run" }, h("summary", {}), body);
    line.addEventListener("toggle", () => {
      if (line.open && !body.dataset.drawn) void open(one, body);
    });
    update(line, one);
    return line;
  }

  /**
   * @param {HTMLElement} line
   * @param {Numbered} one
   */
  function update(line, { number, run }) {
    fill(/** @type {HTMLElement} */ (line.firstElementChild), icon("right"), statusMark(run.status), number === null ? null : h("strong", { class: "num" }, `#${number}`), h("span", {}, oneLine(run.workflow, 30)), h("span", { class: "num" }, countOf(run.tasks, "task")), h("span", { class: "num" }, formatDuration(run.duration_ms)),
      h("time", { class: "muted wide", datetime: new Date(run.created_at).toISOString() }, formatTime(run.created_at)), h("bdi", { class: run.failure ? "clip grow bad" : "clip grow muted" }, oneLine(runLine(run), 120)), h("span", { class: "mono clip muted" }, run.run_id));
  }

  /**
   * @param {Numbered} one
   * @param {HTMLElement} body
   */
  async function open({ number, run }, body) {
    body.dataset.drawn = "asked";
    const canvas = h("canvas", { class: "stack-lanes", role: "img", "aria-label": `Lanes of run ${number ?? run.run_id}` });
    try {
      const { steps } = await app.source.steps(run.run_id, 0);
      body.prepend(canvas);
      const end = run.ended_at ?? run.created_at;
      const chart = new LaneChart(canvas);
      chart.lanes = lanesOf(steps, end);
      chart.origin = Math.min(run.created_at, ...steps.slice(0, 100).map((step) => step.started_at ?? run.created_at));
      chart.span = { from: chart.origin, to: chart.origin + Math.max(1, end - chart.origin) * 1.02 + 1 };
      canvas.style.setProperty("height", `${Math.min(HIGHEST, Math.max(LOWEST, chart.content))}px`);
      const draw = () => {
        chart.readColours();
        if (canvas.clientWidth) chart.draw();
      };
      redraws.add(draw);
      watcher.observe(canvas);
      draw();
      body.dataset.drawn = String(chart.drawn);
      canvas.addEventListener("click", (event) => {
        const bar = chart.barAt(event.offsetX, event.offsetY);
        if (bar) window.location.hash = stepLink(run.run_id, bar.step.id, "timeline");
      });
    } catch (error) {
      body.dataset.drawn = "";
      fill(body, h("p", { class: "muted" }, messageOf(error)));
    }
  }

  const close = watchSeries(app, model, (runs) => {
    const mine = runs.findIndex(({ run }) => run.run_id === model.run.run_id);
    const before = runs.slice(0, mine < 0 ? runs.length : mine).filter(({ run }) => !GOING_ON.includes(run.status));
    element.hidden = before.length === 0;
    /** @type {HTMLElement} */ (head.lastElementChild).textContent = `${countOf(before.length, "finished run")} before this one`;
    syncChildren(list, before, ({ run }) => run.run_id, make, update);
    list.scrollTop = list.scrollHeight;
  });
  window.addEventListener("themechange", recolour);
  return {
    element,
    close() {
      close();
      watcher.disconnect();
      window.removeEventListener("themechange", recolour);
    },
  };
}
