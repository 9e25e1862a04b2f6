// One run: its head, its tabs, and the panel of the step that is chosen.

import { fill, h, icon } from "../dom.js";
import { countOf, formatAgo, formatCost, formatCount, formatDuration, formatTime, formatTokens, numberRoles, runLine, runName, tokensTitle } from "../format.js";
import { RunModel } from "../model/run.js";
import { TABS, formatRoute } from "../router.js";
import { oneLine, visible } from "../text.js";
import { copyText, line, menu, progress, statusPill } from "../ui/parts.js";
import { cancelRun, during, exportRun, forkRun, resumeRun } from "../ui/actions.js";
import { actorsTab } from "./actors.js";
import { budgetTab } from "./budget.js";
import { failedSteps, failureCard, nextStep } from "./failure.js";
import { flowTab } from "./flow.js";
import { hasItems, itemsTab } from "./items.js";
import { Revealing } from "../ui/revealing.js";
import { stepPanel } from "./step.js";
import { stepsTab } from "./steps.js";
import { timelineTab } from "./timeline.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Delivery} Delivery */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").View} View */
/**
 * A tab of a run.
 * @typedef {object} Tab
 * @property {HTMLElement} element
 * @property {() => void} [draw] the run changed
 * @property {(route: Route) => void} [update] the address changed
 * @property {() => void} [close]
 * @property {Record<string, (event: KeyboardEvent) => void>} [keys]
 */

/** Interval of looks for webhooks. */
const LOOK_MS = 5000;
const WORDS = /** @type {Record<string, string>} */ ({ flow: "Flow", timeline: "Timeline", steps: "Steps", items: "Items", budget: "Budget", actors: "Actors" });
/** @type {Record<string, (app: App, model: RunModel, route: Route) => Tab>} */
const MAKE = { flow: flowTab, timeline: timelineTab, steps: stepsTab, items: itemsTab, budget: budgetTab, actors: actorsTab };

/**
 * @param {App} app
 * @param {Route} first
 * @returns {Promise<View>}
 */
export async function runView(app, first) {
  const model = await RunModel.load(app, first.run);
  numberRoles([...model.steps.values()].map((step) => step.agent));
  let route = first;
  /** @type {Tab|null} */
  let tab = null;
  /** @type {ReturnType<typeof stepPanel>|null} */
  let panel = null;

  const head = h("div", { class: "run-head" });
  const banners = h("div", { class: "banners" });
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run" });
  const stage = h("div", { class: "stage", role: "tabpanel", tabindex: -1 });
  const side = h("aside", { class: "side", "aria-label": "Step", hidden: true });
  const connection = h("div", { class: "notice bad", role: "status", hidden: true });
  const element = h("div", { class: "run-page" }, connection, head, banners, tabs, h("div", { class: "run-body" }, stage, side));
  const revealing = new Revealing(element);
  /** @type {Record<string, (event: KeyboardEvent) => void>} */
  const keys = {};

  const shownTabs = TABS.filter((name) => (name !== "actors" || (app.info.has_actors && (app.source.isFile || !model.isFile))) && (name !== "items" || hasItems(model)));
  for (const name of shownTabs) {
    tabs.append(h("button", { role: "tab", type: "button", id: `tab-${name}`, "data-tab": name, onclick: () => app.go({ tab: name }) }, WORDS[name]));
  }
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = (shownTabs.indexOf(route.tab) + step + shownTabs.length) % shownTabs.length;
    app.go({ tab: /** @type {string} */ (shownTabs[at]) });
    /** @type {HTMLElement} */ (tabs.children[at]).focus();
  });

  let retryAt = 0;
  model.onConnection = (isConnected, retryInMs) => {
    retryAt = Date.now() + retryInMs;
    connection.hidden = isConnected;
    if (!isConnected) tellConnection();
  };
  function tellConnection() {
    const seconds = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
    const text = `The connection is lost: the page may be outdated. ${seconds ? `Next try in ${seconds} s` : "Trying…"}`;
    if (connection.textContent !== text) connection.textContent = text;
  }

  function drawTabs() {
    for (const button of tabs.children) {
      const isHere = /** @type {HTMLElement} */ (button).dataset.tab === route.tab;
      button.setAttribute("aria-selected", String(isHere));
      /** @type {HTMLElement} */ (button).tabIndex = isHere ? 0 : -1;
    }
    stage.setAttribute("aria-labelledby", `tab-${route.tab}`);
  }

  function openTab() {
    tab?.close?.();
    stage.className = `stage stage-${route.tab}`;
    tab = /** @type {(app: App, model: RunModel, route: Route) => Tab} */ (MAKE[route.tab])(app, model, route);
    fill(stage, tab.element);
    for (const key of Object.keys(keys)) delete keys[key];
    Object.assign(keys, {
      e: () => model.run.first_error_step && app.go({ params: { step: model.run.first_error_step } }),
      Escape: () => route.params.get("step") && app.go({ params: { step: null } }),
    }, Object.fromEntries(shownTabs.map((name, at) => [String(at + 1), () => app.go({ tab: name })])), tab.keys ?? {});
    drawTabs();
  }

  function openStep() {
    const id = route.params.get("step");
    if (panel && panel.id === id) return;
    panel?.close();
    panel = null;
    side.hidden = !id;
    element.classList.toggle("with-side", Boolean(id));
    if (!id) return fill(side);
    panel = stepPanel(app, model, id);
    fill(side, panel.element);
    side.scrollTop = 0;
  }

  /** @type {Delivery[]} */
  let deliveries = [];
  let looks = 0;
  /** Webhooks change beside the record: look until none is pending, and once more behind the end of the run. */
  async function lookForDeliveries() {
    if (!app.info.has_deliveries || model.isFile || !app.source.deliveries) return;
    const isOpen = model.run.is_live || deliveries.some((each) => each.state === "pending");
    looks = isOpen ? 0 : looks + 1;
    if (looks > 2) return;
    try {
      deliveries = await app.source.deliveries(model.run.run_id);
      draw();
    } catch {
      // the page says elsewhere that the server does not answer
    }
  }

  /** The values of a redacted run are asked for by a click, each time. */
  function revealButton() {
    if (!model.run.can_reveal || model.isFile) return null;
    const isShown = revealing.values !== null;
    const button = h("button", { class: "button", type: "button", "aria-pressed": String(isShown), title: isShown ? "Show placeholders" : "Show the values of the placeholders. The server logs who asked", onclick: async () => {
      if (isShown) revealing.hide();
      else await during(button, async () => revealing.show(await app.source.reveal(model.run.run_id)));
      draw();
    } }, isShown ? "Hide values" : "Reveal");
    return button;
  }

  let drawn = "";
  function draw() {
    const run = model.run;
    const state = JSON.stringify([run.status, run.tokens, run.estimated_tokens, run.reused_calls, run.cost, run.counts, run.reviews, run.error, run.next_step, run.offers, run.forks, run.duration_ms, run.can_reveal, revealing.values !== null, deliveries]);
    if (state !== drawn) {
      drawn = state;
      app.setTitle([runName(run), runLine(run)].filter(Boolean).join(" · "));
      drawHead(app, model, head, deliveries, revealButton());
      drawBanners(app, model, banners);
    }
    tab?.draw?.();
    panel?.draw();
  }

  const clock = window.setInterval(() => {
    if (!connection.hidden) tellConnection();
    const spent = head.querySelector("[data-clock]");
    if (spent && model.run.status === "running") spent.textContent = formatDuration(Date.now() - model.run.created_at);
  }, 1000);
  const looking = app.info.has_deliveries ? window.setInterval(() => void lookForDeliveries(), LOOK_MS) : 0;
  void lookForDeliveries();
  const unwatch = model.watch(draw);
  openTab();
  openStep();
  draw();
  model.follow();
  return {
    element,
    keys,
    update(now) {
      const isSameTab = now.tab === route.tab;
      route = now;
      if (isSameTab) tab?.update?.(now);
      else openTab();
      openStep();
    },
    close() {
      window.clearInterval(clock);
      window.clearInterval(looking);
      unwatch();
      revealing.hide();
      tab?.close?.();
      panel?.close();
      model.close();
    },
  };
}

/** @param {Delivery} each */
function deliveryLine(each) {
  const words = [`${each.event} to ${each.receiver}: ${each.state}`, countOf(each.attempt_count, "attempt")];
  if (each.error) words.push(each.error);
  if (each.next_attempt_at && each.attempt_count) words.push(`next attempt ${formatTime(each.next_attempt_at)}`);
  return visible(words.join(", "));
}

/** @param {Delivery[]} deliveries */
function deliveryCounts(deliveries) {
  const counts = ["delivered", "pending", "failed"].map((state) => ({ state, count: deliveries.filter((each) => each.state === state).length }));
  return counts.filter(({ count }) => count).map(({ state, count }) => `${formatCount(count)} ${state}`).join(", ");
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {HTMLElement} head
 * @param {Delivery[]} deliveries
 * @param {HTMLElement|null} reveal
 */
function drawHead(app, model, head, deliveries, reveal) {
  const { run } = model;
  /** @param {string} action */
  const may = (action) => app.info.actions.includes(action) && (run.offers ?? []).includes(action) && !model.isFile;
  const spent = run.duration_ms ?? (run.status === "running" ? Date.now() - run.created_at : null);
  const origin = run.forked_from;
  const facts = [
    ["Started", h("time", { datetime: new Date(run.created_at).toISOString(), title: formatTime(run.created_at) }, formatAgo(run.created_at, Date.now()))],
    ["Duration", h("span", { "data-clock": run.duration_ms === null ? "" : null }, formatDuration(spent))],
    ["Tokens", h("span", { title: tokensTitle(run) }, formatTokens(run))],
    ...(run.reused_calls ? [["Reused", h("span", { title: `${formatCount(run.reused_tokens)} tokens of earlier runs` }, countOf(run.reused_calls, "answer"))]] : []),
    ["Cost", formatCost(run.cost)],
    ["Steps", progress(run.counts)],
    ...(deliveries.length ? [["Webhooks", h("span", { class: "deliveries", title: deliveries.map(deliveryLine).join("\n") }, deliveryCounts(deliveries))]] : []),
  ];
  fill(head,
    h("div", { class: "run-title" },
      h("a", { class: "icon-button", href: model.isFile ? "#/files" : "#/runs", "aria-label": model.isFile ? "All files" : "All runs", title: model.isFile ? "All files" : "All runs", hidden: app.source.isFile }, icon("left")),
      h("h1", { class: "clip" }, line(runName(run), "", 80)),
      statusPill(run.status),
      h("button", { class: "copy mono", type: "button", title: "Copy the run's id", onclick: () => void copyText(run.run_id) }, h("span", { class: "clip" }, run.run_id), icon("copy")),
      Object.entries(run.tags).slice(0, 4).map(([key, value]) => h("span", { class: "tag wide" }, visible(value ? `${key}: ${value}` : key))),
      h("span", { class: "grow" }),
      reveal,
      may("cancel") && h("button", { class: "button danger", type: "button", onclick: () => cancelRun(app, model) }, icon("stop"), "End run"),
      may("resume") && h("button", { class: "button", type: "button", onclick: () => void resumeRun(app, model) }, icon("play"), "Continue"),
      may("fork") && h("button", { class: "button", type: "button", onclick: () => void forkRun(app, model, null) }, icon("fork"), "Fork"),
      (origin || run.forks.length > 0) && !model.isFile && h("a", { class: "button", href: formatRoute({ view: "compare", params: { a: origin?.run_id ?? run.run_id, b: origin ? run.run_id : run.forks[0] ?? "" } }) }, icon("compare"), "Compare"),
      menu([icon("export"), "Export"], [
        ...(model.isFile ? [] : [{ label: "One HTML file", hint: "Opens offline and contains the whole run", run: () => void exportRun(app, run.run_id, "html") }]),
        { label: "JSON", hint: "For programs", run: () => void exportRun(app, run.run_id, "json") },
      ])),
    run.subject && h("p", { class: "run-subject", title: oneLine(run.subject) }, line(run.subject, "", 400)),
    h("dl", { class: "facts" }, facts.map(([word, value]) => h("div", {}, h("dt", {}, /** @type {string} */ (word)), h("dd", {}, value))),
      origin && h("div", {}, h("dt", {}, "Fork of"), h("dd", {}, h("a", { href: formatRoute({ view: "run", run: origin.run_id }), class: "mono" }, origin.run_id), ` from ${origin.step}`)),
      run.forks.length > 0 && h("div", {}, h("dt", {}, "Forks"), h("dd", {}, run.forks.slice(0, 3).map((fork) => h("a", { class: "mono", href: formatRoute({ view: "run", run: fork }) }, `${fork} `))))));
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {HTMLElement} banners
 */
function drawBanners(app, model, banners) {
  const { run } = model;
  const open = run.reviews.filter((review) => review.decision === null);
  fill(banners,
    failureCard(app, model),
    failedSteps(model),
    open.length > 0 && !model.isFile && h("div", { class: "banner", role: "note" }, icon("person"), h("div", { class: "grow" }, `${countOf(open.length, "review")} ${open.length === 1 ? "waits" : "wait"} for a person: `, line(open[0]?.task_description ?? "", "", 120)), open.some((review) => review.decidable) && h("a", { class: "button small", href: formatRoute({ view: "reviews", params: { run: run.run_id, gate: open[0]?.gate_id } }) }, "Decide")),
    run.exit_reason_text && !run.error && run.exit_reason !== "completed" && run.status !== "interrupted" && h("div", { class: "banner", role: "note" }, icon("exited"), h("div", { class: "grow" }, visible(run.exit_reason_text), nextStep(model))),
    run.problem && h("div", { class: "banner bad", role: "note" }, icon("failed"), h("div", { class: "grow" }, `The record cannot be read to its end: ${visible(run.problem)}`)));
}
