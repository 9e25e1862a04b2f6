// The graph of a run: places from the server, states from the steps. Edges are SVG, nodes are buttons.

import { fill, h, icon, s } from "../dom.js";
import { countOf, formatCount, formatDuration, formatShort, roleClass, statusTone, statusWord } from "../format.js";
import { isOfTree, tallyLevels } from "../model/items.js";
import { durationOf, tokensOf } from "../model/run.js";
import { oneLine, visible } from "../text.js";
import { agentName, emptyState, failureState, progressBar, progressWords, segmented, statusMark } from "../ui/parts.js";
import { panZoom } from "../ui/panzoom.js";
import { runSelector } from "../ui/series.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").Flow} Flow */
/** @typedef {import("../types.js").FlowNode} FlowNode */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../model/run.js").RunModel} RunModel */

/** Statuses by how much they say of a node whose steps have several. */
const LOUDEST = ["failed", "running", "waiting", "interrupted", "exited", "cancelled", "completed", "skipped", "pending"];

/** Kinds of lines and their meanings; each kind has one style. */
const LINES = /** @type {[string, string][]} */ ([["dependency", "needs its output"], ["unconditional", "next in order"], ["conditional", "on a condition"], ["loop", "again"], ["delegation", "delegates"]]);

/**
 * A line of the legend.
 * @param {string} kind
 * @param {string} look
 */
function sample(kind, look) {
  return s("svg", { class: "sample", width: 34, height: 10, "aria-hidden": "true" }, s("path", { class: `edge-line ${kind} ${look}`, d: "M1 5H33" }));
}

/**
 * The status that stands for many.
 * @param {Record<string, number>} counts
 */
export function loudest(counts) {
  return LOUDEST.find((status) => counts[status]) ?? "pending";
}

/**
 * A line through points, its corners rounded.
 * @param {[number, number][]} points
 * @param {number} [radius]
 */
export function roundedPath(points, radius = 10) {
  const [first, ...rest] = points;
  if (!first) return "";
  let path = `M${first[0]} ${first[1]}`;
  let [x, y] = first;
  rest.forEach(([toX, toY], at) => {
    const next = rest[at + 1];
    if (!next) {
      path += `L${toX} ${toY}`;
      return;
    }
    const before = Math.hypot(toX - x, toY - y);
    const after = Math.hypot(next[0] - toX, next[1] - toY);
    const cut = Math.min(radius, before / 2, after / 2);
    if (cut < 0.5) return;
    const [ax, ay] = [toX - ((toX - x) / before) * cut, toY - ((toY - y) / before) * cut];
    const [bx, by] = [toX + ((next[0] - toX) / after) * cut, toY + ((next[1] - toY) / after) * cut];
    path += `L${ax.toFixed(1)} ${ay.toFixed(1)}Q${toX} ${toY} ${bx.toFixed(1)} ${by.toFixed(1)}`;
    [x, y] = [bx, by];
  });
  return path;
}

/**
 * A gentle curve between two points, along the way the graph runs.
 * @param {[number, number][]} points
 */
function edgePath(points) {
  const [from, to] = [points[0], points.at(-1)];
  if (points.length !== 2 || !from || !to) return roundedPath(points);
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  if (Math.abs(dx) < 2 || Math.abs(dy) < 2) return roundedPath(points);
  const down = Math.abs(dy) > Math.abs(dx);
  const [cx, cy] = down ? [0, dy / 2] : [dx / 2, 0];
  return `M${from[0]} ${from[1]}C${from[0] + cx} ${from[1] + cy} ${to[0] - cx} ${to[1] - cy} ${to[0]} ${to[1]}`;
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {Route} route
 * @returns {import("./run.js").Tab}
 */
export function flowTab(app, model, route) {
  let as = route.params.get("as") === "ran" ? "ran" : "declared";
  let chosen = route.params.get("step");
  /** @type {Flow|null} */
  let flow = null;
  let asked = 0;
  let isLoading = false;
  let isLive = model.run.is_live;
  let places = -1;
  /** Steps of each level of a map-reduce, as of `tallied`. @type {Map<string, Record<string, number>>} */
  let tally = new Map();
  let tallied = -1;
  /** @type {Map<string, HTMLElement>} */
  const cards = new Map();

  const canvas = h("div", { class: "flow-canvas" });
  const viewport = h("div", { class: "flow-view", role: "group", "aria-label": "Graph of the run", tabindex: 0 }, canvas);
  const view = panZoom(viewport, canvas);
  const legend = h("div", { class: "legend flow-legend", role: "note", "aria-label": "Legend" });
  const selector = runSelector(app, model);
  const toolbar = h("div", { class: "toolbar" },
    selector.element, segmented("Which graph", [["declared", "As declared"], ["ran", "As it ran"]], as, (value) => app.go({ params: { as: value === "ran" ? value : null } })),
    h("span", { class: "grow" }),
    h("div", { class: "row zooms" },
      h("button", { class: "icon-button", type: "button", title: "Smaller (−)", "aria-label": "Smaller", onclick: () => view.zoom(1 / 1.25) }, icon("minus")),
      h("button", { class: "icon-button", type: "button", title: "Larger (+)", "aria-label": "Larger", onclick: () => view.zoom(1.25) }, icon("plus")),
      h("button", { class: "icon-button", type: "button", title: "All of it (0)", "aria-label": "All of it", onclick: () => view.fit() }, icon("fit"))));
  const element = h("div", { class: "flow" }, toolbar, legend, viewport);

  async function load() {
    asked += 1;
    const mine = asked;
    const needed = placeCount();
    isLoading = true;
    try {
      const found = await app.source.flow(model.run.run_id, as);
      if (mine !== asked) return;
      const isFirst = flow === null;
      const isOther = isFirst || flow?.width !== found.width || flow?.height !== found.height;
      flow = found;
      [places, tallied, isLoading] = [needed, -1, false];
      if (model.run.is_live) for (const each of [...found.nodes, ...found.edges]) each.critical = false; // until the end it may change
      build(found);
      if (isOther) view.open(found.nodes[0]);
      draw();
    } catch (error) {
      if (mine !== asked) return;
      [places, isLoading] = [needed, false];
      fill(canvas, failureState(error, () => void load()));
    }
  }

  /** Nodes that the steps need: a level of a map-reduce is one, and in the graph as it ran each other step. */
  function placeCount() {
    /** @type {Set<string>} */
    const found = new Set();
    for (const step of model.steps.values()) {
      if (as === "ran" && step.status === "pending") continue;
      const top = step.parent === null ? step : model.steps.get(step.id.slice(0, step.id.indexOf("/"))) ?? step;
      const place = isOfTree(top) ? `${top.level} ${top.kind}` : as === "ran" ? step.id : "";
      found.add(top === step && found.has(place) ? `several of ${place}` : place);
    }
    return found.size;
  }

  /** @param {Flow} now */
  function build(now) {
    cards.clear();
    if (!now.nodes.length) {
      fill(legend);
      return fill(canvas, emptyState({ title: "No task has started", text: "Tasks appear when they start." }));
    }
    const picture = s("svg", { class: "edges", width: now.width, height: now.height, "aria-hidden": "true" });
    const tips = ["edge", "critical", "faint"].map((name) => s("marker", { id: `tip-${name}`, class: `tip ${name}`, viewBox: "0 0 8 8", refX: 7.5, refY: 4, markerWidth: 11, markerHeight: 11, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, s("path", { d: "M0.500 0.500 7.500 4 0.500 7.500z" })));
    picture.append(s("defs", {}, tips));
    for (const edge of now.edges) {
      const look = edge.critical ? "critical" : isUnfired(edge) ? "faint" : "edge";
      picture.append(s("path", { class: `edge-line ${edge.kind} ${look}`, d: edgePath(edge.points), "marker-end": `url(#tip-${look})` }));
    }
    const groups = now.groups.map((group) => h("div", { class: `flow-group ${group.kind}`, vars: place(group) }, h("span", { class: "group-title" }, h("bdi", { class: "clip" }, oneLine(group.title, 80)))));
    const labels = now.edges.filter((edge) => edge.label).map((edge) => {
      const middle = edge.label_at ?? middleOf(edge.points);
      return h("span", { class: edge.fired === false ? "edge-label faint" : "edge-label", vars: { "--x": `${middle[0]}px`, "--y": `${middle[1]}px` } }, h("bdi", {}, oneLine(edge.label ?? "", 80)));
    });
    for (const node of now.nodes) cards.set(node.id, makeNode(node));
    canvas.style.setProperty("--w", `${now.width}px`);
    canvas.style.setProperty("--h", `${now.height}px`);
    view.setSize(now.width, now.height);
    fill(canvas, groups, picture, labels, [...cards.values()]);
    /** @type {HTMLElement[]} */ ([...cards.values()]).forEach((card, at) => card.setAttribute("tabindex", at === 0 ? "0" : "-1"));
    const kinds = new Set(now.edges.map((edge) => edge.kind));
    fill(legend,
      LINES.filter(([kind]) => kinds.has(kind)).map(([kind, word]) => h("span", {}, sample(kind, "edge"), word)),
      now.edges.some((edge) => edge.critical) && h("span", { title: "The steps that determined when the run ended: each began when the one before it had ended" }, sample("dependency", "critical"), "critical path by time"),
      now.edges.some(isUnfired) && h("span", {}, sample("dependency", "faint"), "not taken"),
      [...new Set(now.nodes.map((node) => node.agent))].filter((agent) => roleClass(agent) && !/^\d+ agents$/.test(agent)).map((agent) => h("span", { class: "wide" }, agentName(agent))));
  }

  /** @param {import("../types.js").FlowEdge} edge */
  function isUnfired(edge) {
    return edge.fired === false && model.run.status !== "accepted";
  }

  /** @param {{x: number, y: number, w: number, h: number}} box */
  function place(box) {
    return { "--x": `${box.x}px`, "--y": `${box.y}px`, "--bw": `${box.w}px`, "--bh": `${box.h}px` };
  }

  /** @param {FlowNode} node */
  function makeNode(node) {
    const card = h("button", { class: `node ${roleClass(node.agent)} kind-${node.kind}`, type: "button", vars: { ...place(node), "--far-lines": String(Math.max(1, Math.floor((node.h - 17) / 26.4))) }, onclick: () => choose(node) });
    card.addEventListener("focus", () => view.reveal(node.x, node.y, node.w, node.h));
    return card;
  }

  /** @param {FlowNode} node */
  function choose(node) {
    const steps = stepsOf(node);
    const step = steps.find((one) => one.status === "failed") ?? steps.at(-1);
    if (step) app.go({ params: { step: step.id } });
    else if (node.count && model.steps.size) app.go({ tab: isLevel(node) ? "items" : "steps", params: { level: node.level === null ? null : String(node.level), step: null } });
    else app.announce("This step has not started");
  }

  /** @param {FlowNode} node */
  function isLevel(node) {
    return node.count !== null && isOfTree(node);
  }

  /**
   * Statuses of the steps of a folded node: as the page knows them, which follows the run; a file has only some of the steps.
   * @param {FlowNode} node
   */
  function countsOf(node) {
    const now = isLevel(node) && !model.isFile ? tally.get(`${node.level} ${node.kind}`) : undefined;
    if (!now) return node.counts;
    const missing = (node.count ?? 0) - Object.values(now).reduce((sum, one) => sum + one, 0);
    return missing > 0 ? { ...now, pending: (now.pending ?? 0) + missing } : now;
  }

  /**
   * @param {FlowNode} node
   * @returns {Step[]}
   */
  function stepsOf(node) {
    return (node.steps ?? []).map((id) => model.steps.get(id)).filter((step) => step !== undefined);
  }

  function draw() {
    if (!flow) return;
    if (model.run.is_live !== isLive) {
      isLive = model.run.is_live;
      return void load();
    }
    if (tallied !== model.version) {
      tallied = model.version;
      tally = tallyLevels(model.steps.values());
      if (!isLoading && placeCount() !== places) return void load();
    }
    const now = Date.now();
    for (const node of flow.nodes) drawNode(node, now);
  }

  /**
   * @param {FlowNode} node
   * @param {number} now
   */
  function drawNode(node, now) {
    const card = /** @type {HTMLElement} */ (cards.get(node.id));
    const steps = stepsOf(node);
    /** @type {Record<string, number>} */
    const counts = {};
    for (const step of steps) counts[step.status] = (counts[step.status] ?? 0) + 1;
    const totals = countsOf(node) ?? counts;
    const all = Object.values(totals).reduce((sum, one) => sum + one, 0);
    const ended = all - (totals.pending ?? 0) - (totals.running ?? 0) - (totals.waiting ?? 0);
    const status = node.count !== null && model.run.is_live && ended > 0 && ended < all ? "running" : loudest(totals);
    const last = steps.at(-1);
    const spent = last ? durationOf(last, now) : null;
    const tokens = steps.reduce((sum, step) => sum + (tokensOf(step) ?? 0), 0);
    const isChosen = steps.some((step) => step.id === chosen);
    const times = node.count === null ? steps.length : Math.max(node.count, all);
    const badge = [node.badges[0], times > 1 && `×${formatCount(times)}`].filter(Boolean).join(" ");
    const state = JSON.stringify([totals, status === "running" ? Math.floor(now / 1000) : spent, tokens, isChosen, steps.length]);
    if (card.dataset.state === state) return;
    card.dataset.state = state;
    card.classList.remove(...[...card.classList].filter((name) => name.startsWith("is-")));
    card.classList.add(`is-${statusTone(status)}`);
    card.classList.toggle("is-pending", status === "pending");
    card.classList.toggle("critical", node.critical);
    card.setAttribute("aria-pressed", String(isChosen));
    const words = [node.title, node.agent, statusWord(status), node.critical ? "on the critical path" : "", node.count ? `${countOf(Math.max(node.count, all), "step")}: ${progressWords(totals)}` : ""].filter(Boolean);
    card.setAttribute("aria-label", words.map((word) => oneLine(word, 320)).join(", "));
    card.title = visible(node.title.slice(0, 400));
    const folded = node.count !== null && node.count > 1;
    if (node.kind === "end") return fill(card, h("bdi", { class: "node-title" }, oneLine(node.title, 40)));
    if (folded) {
      const failed = totals.failed ?? 0;
      return fill(card,
        h("span", { class: "node-top whole" }, statusMark(status), h("span", { class: "grow" }), h("span", { class: "badge" }, badge)),
        h("bdi", { class: "node-title", dir: "auto" }, oneLine(node.title, 320)),
        h("span", { class: "node-foot whole" }, progressBar(totals)),
        h("span", { class: "node-foot whole", title: progressWords(totals) },
          failed > 0 && h("strong", { class: "num bad" }, `${formatCount(failed)} failed`),
          h("span", { class: "row clip" }, ended < all && all > 0 ? `${formatCount(ended)} of ${formatCount(all)} ended` : progressWords({ ...totals, failed: 0 }))));
    }
    fill(card,
      h("span", { class: "node-top" }, statusMark(status), h("bdi", { class: "node-title", dir: "auto" }, oneLine(node.title, 320))),
      h("span", { class: "node-foot" },
        node.agent ? h("span", { class: "node-agent" }, h("span", { class: "dot" }), h("bdi", {}, oneLine(node.agent, 120))) : null,
        spent !== null && h("span", { class: "num", title: tokens ? `${formatShort(tokens)} tokens` : null }, formatDuration(spent)),
        h("span", { class: "grow" }),
        badge && h("span", { class: "badge", title: times > 1 ? `Executed ${times} times` : null }, badge)));
  }

  /** @param {number} by */
  function moveFocus(by) {
    const all = [...cards.values()];
    const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    const next = all[Math.max(0, Math.min(all.length - 1, at + by))];
    for (const card of all) card.tabIndex = -1;
    if (!next) return;
    next.tabIndex = 0;
    next.focus();
  }

  const clock = window.setInterval(() => model.run.is_live && draw(), 1000);
  void load();
  return {
    element,
    draw,
    update(now) {
      chosen = now.params.get("step");
      const wanted = now.params.get("as") === "ran" ? "ran" : "declared";
      if (wanted === as) return draw();
      as = wanted;
      flow = null;
      void load();
    },
    close() {
      window.clearInterval(clock);
      view.close();
      selector.close();
    },
    keys: {
      j: () => moveFocus(1), k: () => moveFocus(-1), "+": () => view.zoom(1.25), "=": () => view.zoom(1.25), "-": () => view.zoom(1 / 1.25), 0: () => view.fit(),
      ArrowLeft: () => view.pan(80, 0), ArrowRight: () => view.pan(-80, 0), ArrowUp: () => view.pan(0, 80), ArrowDown: () => view.pan(0, -80),
    },
  };
}

/**
 * @param {[number, number][]} points
 * @returns {[number, number]}
 */
function middleOf(points) {
  const at = (points.length - 1) / 2;
  const [ax, ay] = points[Math.floor(at)] ?? [0, 0];
  const [bx, by] = points[Math.ceil(at)] ?? [0, 0];
  return [(ax + bx) / 2, (ay + by) / 2];
}
