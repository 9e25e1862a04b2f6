// Which agent lives in which process on which node, what waits there and what it does. Of one run, or of all.

import { fill, h } from "../dom.js";
import { countOf, formatCount } from "../format.js";
import { stepLink } from "../router.js";
import { oneLine, visible } from "../text.js";
import { agentName, emptyState, failureState, statusPill } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Actors} Actors */
/** @typedef {import("../types.js").ProcessInfo} ProcessInfo */
/** @typedef {import("../types.js").View} View */
/** @typedef {import("../model/run.js").RunModel} RunModel */

const EVERY = 2000;

/**
 * @param {App} app
 * @param {string|null} run
 */
function processes(app, run) {
  const content = h("div", { class: "content" });
  let asked = 0;
  let drawn = "";

  async function load() {
    asked += 1;
    const mine = asked;
    try {
      const found = await app.source.actors(run);
      const state = JSON.stringify(found);
      if (mine !== asked || state === drawn) return;
      drawn = state;
      draw(found);
    } catch (error) {
      if (mine === asked && !drawn) fill(content, failureState(error, () => void load()));
    }
  }

  /** @param {Actors} actors */
  function draw(actors) {
    const all = actors.nodes.flatMap((node) => node.processes);
    const longest = Math.max(1, ...all.map((one) => one.queue ?? 0), ...actors.limiters.map((one) => one.queue));
    const isEmpty = !all.length && !actors.limiters.length && !actors.breakers.length;
    fill(content,
      run === null && h("div", { class: "page-head" }, h("h1", {}, "Actors"), h("p", { class: "num" }, all.length ? `${countOf(all.length, "process", "processes")} on ${countOf(actors.nodes.length, "node")}` : "")),
      actors.note && !isEmpty && h("p", { class: "banner" }, visible(actors.note)),
      isEmpty && emptyState({ symbol: "server", title: "No processes to show", text: actors.note ?? "Runs on Ray have a process for each agent. They are here while a cluster runs.", ...(run === null ? { command: "ensemble-ray run team.yaml --runtime ray" } : {}) }),
      actors.nodes.map((node) => h("section", { class: "card" }, h("div", { class: "node-title-row" }, h("h2", { class: "mono" }, oneLine(node.node, 40)), h("span", { class: "muted" }, visible(node.address ?? "")), h("span", { class: "grow" }), h("span", { class: "muted num" }, countOf(node.processes.length, "process", "processes"))),
        h("div", { class: "table-box" }, h("table", { class: "data" }, h("thead", {}, h("tr", {}, ["Process", "Agent", "PID", "Queue", "Doing", "Restarts", "Memory"].map((word, at) => h("th", { scope: "col", class: [2, 5, 6].includes(at) ? "num" : null }, word)))), h("tbody", {}, node.processes.map((one) => rowOf(one, longest))))))),
      (actors.limiters.length > 0 || actors.breakers.length > 0) && h("div", { class: "panels limits" },
        actors.limiters.length > 0 && h("section", { class: "card" }, h("h2", { class: "card-title" }, "Rate limits"), h("table", { class: "data" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Limit"), h("th", { scope: "col" }, "Waiting"), h("th", { scope: "col", class: "num" }, "Permits now"))), h("tbody", {}, actors.limiters.map((one) => h("tr", {}, h("td", { class: "mono clip" }, oneLine(one.name, 60)), h("td", {}, queue(one.queue, longest)), h("td", { class: "num" }, one.permits === null ? "–" : one.permits.toFixed(1))))))),
        actors.breakers.length > 0 && h("section", { class: "card" }, h("h2", { class: "card-title" }, "Circuit breakers"), h("table", { class: "data" }, h("tbody", {}, actors.breakers.map((one) => h("tr", {}, h("td", { class: "mono clip" }, oneLine(one.name, 60)), h("td", {}, h("span", { class: `status is-${one.state === "closed" ? "completed" : one.state === "open" ? "failed" : "waiting"}` }, oneLine(one.state, 30))))))))));
  }

  /**
   * @param {number|null} length
   * @param {number} longest
   */
  function queue(length, longest) {
    return length === null ? "–" : h("span", { class: "queue num" }, h("i", { vars: { "--part": String(length / longest) } }), formatCount(length));
  }

  /**
   * @param {ProcessInfo} one
   * @param {number} longest
   */
  function rowOf(one, longest) {
    const doing = one.in_flight.slice(0, 4).map((step) => h("a", { class: "tag mono", href: one.run_id || run ? stepLink(one.run_id ?? run ?? "", step) : null }, oneLine(step, 40)));
    return h("tr", { class: one.alive ? null : "dead" },
      h("td", {}, h("span", { class: "row" }, h("span", { class: "badge" }, one.kind.toUpperCase()), h("span", { class: "mono clip" }, oneLine(one.name, 60)), !one.alive && statusPill("failed"))),
      h("td", {}, one.agent ? agentName(one.agent) : h("span", { class: "muted" }, "–")),
      h("td", { class: "num" }, one.pid === null ? "–" : String(one.pid)), h("td", {}, queue(one.queue, longest)),
      h("td", {}, h("span", { class: "row wrap" }, doing, one.in_flight.length > 4 && h("span", { class: "muted" }, `+${one.in_flight.length - 4}`), !doing.length && h("span", { class: "muted" }, "idle"))),
      h("td", { class: "num" }, formatCount(one.restarts)), h("td", { class: "num" }, one.memory_mb === null ? "–" : `${formatCount(Math.round(one.memory_mb))} MB`));
  }

  void load();
  const timer = app.source.isFile ? 0 : window.setInterval(() => document.hidden || void load(), EVERY);
  return { content, close: () => window.clearInterval(timer) };
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @returns {import("./run.js").Tab}
 */
export function actorsTab(app, model) {
  const { content, close } = processes(app, model.run.run_id);
  return { element: h("div", { class: "scroll" }, content), close };
}

/**
 * @param {App} app
 * @returns {View}
 */
export function actorsView(app) {
  const { content, close } = processes(app, null);
  app.setTitle("Actors");
  return { element: h("div", { class: "page" }, content), close, update: () => undefined };
}
