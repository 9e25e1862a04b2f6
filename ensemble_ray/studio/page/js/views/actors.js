// Which agent lives in which process on which node, what waits there and what it does. Of one run, or of all.

import { fill, h } from "../dom.js";
import { countOf, formatCount, formatDuration, runName } from "../format.js";
import { formatRoute, stepLink } from "../router.js";
import { oneLine, visible } from "../text.js";
import { agentName, emptyState, failureState, staleNotice } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Actors} Actors */
/** @typedef {import("../types.js").Breaker} Breaker */
/** @typedef {import("../types.js").Limiter} Limiter */
/** @typedef {import("../types.js").ProcessInfo} ProcessInfo */
/** @typedef {import("../types.js").ProcessRun} ProcessRun */
/** @typedef {import("../types.js").ProcessTask} ProcessTask */
/** @typedef {import("../types.js").View} View */
/** @typedef {import("../model/run.js").RunModel} RunModel */

/** How often it looks again, ms. */
const EVERY = 2000;
/** Runs of a process, agents of a run and steps of a process that are named. */
const MOST = 4;

const STATES = /** @type {Record<string, string>} */ ({
  starting: "has not begun yet", silent: "does not answer", kept: "kept for the next run", retiring: "ends with the runs that it has",
});
const BREAKERS = /** @type {Record<string, [string, string]>} */ ({ closed: ["completed", "closed"], open: ["failed", "open"], half_open: ["waiting", "half open"] });

/**
 * @param {App} app
 * @param {string|null} run
 */
function processes(app, run) {
  const content = h("div", { class: "content actors" }, h("p", { class: "loading" }, "Loading…"));
  const notice = staleNotice();
  let isAsking = false;
  let isDrawn = false;

  async function load() {
    if (isAsking) return; // a cluster may take longer than it is asked again
    isAsking = true;
    try {
      const found = await app.source.actors(run);
      isDrawn = true;
      notice.clear();
      keepPlace(() => draw(found));
    } catch (error) {
      if (isDrawn) notice.tell(error);
      else fill(content, failureState(error, () => void load()));
    } finally {
      isAsking = false;
    }
  }

  /**
   * Draw again, with the focus and the scrolled tables where they were.
   * @param {() => void} redraw
   */
  function keepPlace(redraw) {
    const here = document.activeElement;
    const focused = here && content.contains(here) ? /** @type {HTMLElement} */ (here).dataset.key : undefined;
    const scrolled = new Map([...content.querySelectorAll(".table-box")].map((box) => [/** @type {HTMLElement} */ (box).dataset.key, box.scrollLeft]));
    redraw();
    for (const box of content.querySelectorAll(".table-box")) box.scrollLeft = scrolled.get(/** @type {HTMLElement} */ (box).dataset.key) ?? 0;
    const again = focused && [...content.querySelectorAll("[data-key]")].find((each) => /** @type {HTMLElement} */ (each).dataset.key === focused);
    if (again) /** @type {HTMLElement} */ (again).focus({ preventScroll: true });
  }

  /** @param {Actors} actors */
  function draw(actors) {
    const all = actors.nodes.flatMap((node) => node.processes);
    const longest = Math.max(1, ...all.map((one) => one.queue ?? 0), ...actors.limiters.map((one) => one.queue), ...actors.breakers.map((one) => one.queue));
    const isEmpty = !all.length && !actors.limiters.length && !actors.breakers.length;
    const where = [all.length && `${countOf(all.length, "process", "processes")} on ${countOf(actors.nodes.length, "node")}`, actors.clusters.length && `${actors.clusters.length === 1 ? "cluster" : "clusters"} ${actors.clusters.join(", ")}`];
    fill(content,
      run === null && h("div", { class: "page-head" }, h("h1", {}, "Actors"), h("p", { class: "num" }, oneLine(where.filter(Boolean).join(" · "), 200))),
      actors.note && !isEmpty && h("p", { class: "banner" }, visible(actors.note)),
      isEmpty && emptyState({ symbol: "server", title: "No processes to show", text: visible(actors.note ?? "Runs on Ray have a process for each agent. They appear while a cluster runs."), ...(run === null ? { command: "ensemble-ray run team.yaml --runtime ray" } : {}) }),
      actors.nodes.map((node) => h("section", { class: "card" },
        h("div", { class: "node-title-row" }, h("h2", { class: "mono" }, oneLine(node.node, 40)), h("span", { class: "muted" }, visible(node.address ?? "")), h("span", { class: "grow" }), h("span", { class: "muted num" }, countOf(node.processes.length, "process", "processes"))),
        table(`node ${node.node}`, `Processes on ${node.node}`, ["Process", "Agents", "Doing", "Waiting", "Restarts", "Memory", "PID"], [4, 5, 6], node.processes.map((one) => rowOf(one, longest))))),
      (actors.limiters.length > 0 || actors.breakers.length > 0) && h("div", { class: "panels limits" },
        actors.limiters.length > 0 && h("section", { class: "card" }, h("h2", { class: "card-title" }, "Rate limits"), table("limits", "Rate limits", ["Limit", "Allows", "Waiting", "Permits now"], [3], actors.limiters.map((one) => limitRow(one, longest)))),
        actors.breakers.length > 0 && h("section", { class: "card" }, h("h2", { class: "card-title" }, "Endpoints of models"), table("endpoints", "Endpoints of models", ["Endpoint", "Breaker", "Waiting", "In progress"], [3], actors.breakers.map((one) => breakerRow(one, longest))))));
  }

  /**
   * @param {string} key
   * @param {string} label
   * @param {string[]} words
   * @param {number[]} numbers
   * @param {HTMLElement[]} rows
   */
  function table(key, label, words, numbers, rows) {
    // On a narrow screen a row is a card, in which each cell has its own word.
    for (const row of rows) [...row.children].forEach((cell, at) => cell.setAttribute("data-word", words[at] ?? ""));
    return h("div", { class: "table-box", "data-key": key, tabindex: 0, role: "region", "aria-label": oneLine(label, 80) },
      h("table", { class: "data" }, h("thead", {}, h("tr", {}, words.map((word, at) => h("th", { scope: "col", class: numbers.includes(at) ? "num" : null }, word)))), h("tbody", {}, rows)));
  }

  /**
   * @param {number|null} length
   * @param {number} longest
   */
  function queue(length, longest) {
    return length === null ? "–" : h("span", { class: "queue num" }, h("i", { vars: { "--part": String(length / longest) } }), formatCount(length));
  }

  /**
   * @param {Limiter} one
   * @param {number} longest
   */
  function limitRow(one, longest) {
    const period = one.period_s === 1 ? "second" : one.period_s === 60 ? "minute" : one.period_s === 3600 ? "hour" : formatDuration(one.period_s * 1000);
    return h("tr", {}, h("td", {}, h("div", { class: "mono clip" }, oneLine(one.name, 60)), one.agents.length > 0 && h("div", { class: "run-here" }, one.agents.slice(0, MOST).map((agent) => agentName(agent)), one.agents.length > MOST && h("span", { class: "muted" }, `+${one.agents.length - MOST}`))), h("td", {}, `${formatCount(one.requests)} a ${period}`), h("td", {}, queue(one.queue, longest)),
      h("td", { class: "num" }, formatCount(one.permits), one.leased > 0 && h("span", { class: "muted" }, ` + ${formatCount(one.leased)} lent`)));
  }

  /**
   * @param {Breaker} one
   * @param {number} longest
   */
  function breakerRow(one, longest) {
    const [tone, word] = /** @type {[string, string]} */ (BREAKERS[one.state]);
    const until = one.probe_at === null ? "" : `tried again in ${formatDuration(Math.max(0, one.probe_at - Date.now()))}`;
    const details = [one.open_in > 0 && one.processes > 1 && `in ${one.open_in} of ${countOf(one.processes, "process", "processes")}`, until, one.limit !== null && `at most ${countOf(one.limit, "call")} at once, as it asked for`].filter(Boolean).join(", ");
    return h("tr", {}, h("td", {}, h("div", { class: "mono clip" }, oneLine(one.name, 90)), one.last_failure && h("div", { class: "detail bad" }, oneLine(one.last_failure, 160))),
      h("td", {}, h("span", { class: `status is-${tone}` }, word), details && h("div", { class: "detail" }, details)), h("td", {}, queue(one.queue, longest)), h("td", { class: "num" }, formatCount(one.sent)));
  }

  /**
   * @param {ProcessInfo} one
   * @param {number} longest
   */
  function rowOf(one, longest) {
    const state = STATES[one.state];
    const said = [state, one.reserved && `reserves ${one.reserved}`, one.note].filter(Boolean).join(", ");
    const rest = one.in_flight.length - MOST + one.more_in_flight;
    return h("tr", { class: one.state === "silent" ? "silent" : null },
      h("td", {}, h("span", { class: "row" }, h("span", { class: "badge" }, one.kind.toUpperCase()), h("span", { class: "mono clip" }, oneLine(one.name, 60))), said && h("div", { class: "detail" }, oneLine(said, 200))),
      h("td", {}, one.runs.slice(0, MOST).map((each) => agentsOf(each)), one.runs.length - MOST + one.more_runs > 0 && h("div", { class: "detail" }, `and ${countOf(one.runs.length - MOST + one.more_runs, "more run")}`), !one.runs.length && h("span", { class: "muted" }, "–")),
      h("td", {}, h("span", { class: "row wrap" }, one.in_flight.slice(0, MOST).map(taskLink), rest > 0 && h("span", { class: "muted" }, `+${formatCount(rest)}`), !one.in_flight.length && h("span", { class: "muted" }, one.runs.length ? "nothing" : "–"))),
      h("td", {}, queue(one.queue, longest)),
      h("td", { class: one.restarts ? "num restarted" : "num" }, formatCount(one.restarts)), h("td", { class: "num" }, one.memory_mb === null ? "–" : `${formatCount(Math.round(one.memory_mb))} MB`), h("td", { class: "num" }, one.pid === null ? "–" : String(one.pid)));
  }

  /** @param {ProcessRun} each */
  function agentsOf(each) {
    const more = each.agents.length - MOST + each.more_agents;
    const replica = each.replicas > 1 && `${each.replica} of ${each.replicas}`;
    const address = each.known ? formatRoute({ view: "run", run: each.run_id, tab: "actors" }) : null;
    return h("div", { class: "run-here" }, each.agents.slice(0, MOST).map((agent) => agentName(agent)), more > 0 && h("span", { class: "muted" }, `+${formatCount(more)}`), replica && h("span", { class: "muted num" }, replica),
      run === null && (address ? h("a", { class: "tag", href: address, "data-key": `run ${each.run_id}`, title: each.run_id }, oneLine([runName({ ensemble: each.ensemble ?? "" }), each.subject || each.run_id].join(" · "), 60)) : h("span", { class: "tag mono", title: "This run is not recorded here" }, oneLine(each.run_id, 30))));
  }

  /** @param {ProcessTask} task */
  function taskLink(task) {
    const isWaiting = task.since === null;
    const words = [isWaiting ? "waits" : formatDuration(Date.now() - /** @type {number} */ (task.since)), task.deaths > 0 && `after ${countOf(task.deaths, "death")}`].filter(Boolean).join(", ");
    return h("a", { class: isWaiting ? "tag mono task-here waits" : "tag mono task-here", href: stepLink(task.run_id, task.step), "data-key": `step ${task.run_id} ${task.step}` }, oneLine(task.step, 40), h("small", {}, words));
  }

  void load();
  const timer = app.source.isFile ? 0 : window.setInterval(() => document.hidden || void load(), EVERY);
  return { parts: [notice.element, content], close: () => window.clearInterval(timer) };
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @returns {import("./run.js").Tab}
 */
export function actorsTab(app, model) {
  const { parts, close } = processes(app, model.run.run_id);
  return { element: h("div", { class: "scroll" }, parts), close };
}

/**
 * @param {App} app
 * @returns {View}
 */
export function actorsView(app) {
  const { parts, close } = processes(app, null);
  app.setTitle("Actors");
  return { element: h("div", { class: "page" }, parts), close, update: () => undefined };
}
