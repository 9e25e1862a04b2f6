// The page begins here: its frame, its addresses and its keys.

import { fill, h, icon } from "./dom.js";
import { askKey } from "./ui/access.js";
import { countOf } from "./format.js";
import { installKeys } from "./ui/keys.js";
import { emptyState, failureState, toast } from "./ui/parts.js";
import { themeButton } from "./ui/theme.js";
import { currentRoute, formatRoute } from "./router.js";
import { embeddedRun, fileSource, isFileRun } from "./source/file.js";
import { withFolder } from "./source/folder.js";
import { oneLine } from "./text.js";
import { httpSource, onKeyNeeded } from "./source/http.js";
import { acceptDrops } from "./source/dropped.js";
import { actorsView } from "./views/actors.js";
import { compareView } from "./views/compare.js";
import { evaluationsView } from "./views/evaluations.js";
import { filesView } from "./views/files.js";
import { reviewsView } from "./views/reviews.js";
import { runView } from "./views/run.js";
import { runsView } from "./views/runs.js";
import { teamsView } from "./views/teams.js";
import { schedulesView } from "./views/schedules.js";
import { trendsView } from "./views/trends.js";
import { usageView } from "./views/usage.js";

/** @typedef {import("./types.js").App} App */
/** @typedef {import("./types.js").Route} Route */
/** @typedef {import("./types.js").View} View */

/** @type {Record<string, (app: App, route: Route) => Promise<View>|View>} */
const VIEWS = { runs: runsView, run: runView, reviews: reviewsView, compare: compareView, actors: actorsView, files: filesView, trends: trendsView, evaluations: evaluationsView, teams: teamsView, schedules: schedulesView, usage: usageView };
/** How often the number of open reviews, and the state of an endpoint, are asked for, ms. */
const REVIEWS_EVERY = 5000;

const main = h("main", { id: "main", tabindex: -1 });
const spoken = h("div", { class: "sr", role: "status", "aria-live": "polite" });
const drainNotice = h("div", { class: "notice drain-notice", role: "status", hidden: true });
const waiting = h("span", { class: "count", hidden: true });
const place = h("small", { class: "wide clip" });
const nav = h("nav", { "aria-label": "Main" });
const keys = installKeys();

/** @type {{key: string, view: View}|null} */
let shown = null;
let opened = 0;

/** @param {App} app */
function frame(app) {
  const links = app.source.isFile ? [] : [
    h("a", { href: "#/runs", "data-view": "runs" }, icon("list", "nav-icon"), h("span", {}, "Runs")),
    h("a", { href: "#/reviews", "data-view": "reviews" }, icon("inbox", "nav-icon"), h("span", {}, "Reviews"), waiting),
    h("a", { href: "#/trends", "data-view": "trends" }, icon("trend", "nav-icon"), h("span", {}, "Trends")),
    h("a", { href: "#/evaluations", "data-view": "evaluations" }, icon("columns", "nav-icon"), h("span", {}, "Evaluations")),
    app.info.has_teams ? h("a", { href: "#/teams", "data-view": "teams" }, icon("person", "nav-icon"), h("span", {}, "Teams")) : null,
    app.info.has_schedules ? h("a", { href: "#/schedules", "data-view": "schedules" }, icon("clock", "nav-icon"), h("span", {}, "Schedules")) : null,
    app.info.has_actors ? h("a", { href: "#/actors", "data-view": "actors" }, icon("server", "nav-icon"), h("span", {}, "Actors")) : null,
    app.info.has_quotas ? h("a", { href: "#/usage", "data-view": "usage" }, icon("trend", "nav-icon"), h("span", {}, "Usage")) : null,
    app.info.has_files ? h("a", { href: "#/files", "data-view": "files" }, icon("file", "nav-icon"), h("span", {}, "Files")) : null,
  ];
  fill(nav, links);
  place.textContent = app.info.title;
  const help = h("button", { class: "icon-button", type: "button", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)", onclick: () => keys.help() }, icon("help"));
  document.body.prepend(
    h("a", { class: "skip", href: "#main", onclick: (/** @type {Event} */ event) => {
      event.preventDefault();
      main.focus();
    } }, "Skip to content"),
    h("header", { class: "topbar" }, h("a", { class: "brand", href: "#/runs", "aria-label": "ensemble_ray Studio" }, icon("brand"), h("span", {}, "Studio"), place), nav, h("span", { class: "grow" }), themeButton(), help),
    drainNotice,
    main,
    spoken,
  );
}

/**
 * Which of the links leads to where an address is.
 * @param {Route} route
 */
function placeOf(route) {
  if (route.view === "run" && isFileRun(route.run)) return "files";
  return route.view === "run" || route.view === "compare" ? "runs" : route.view;
}

/**
 * @param {App} app
 * @param {Route} route
 */
async function show(app, route) {
  const key = route.view === "run" ? `run ${route.run}` : route.view;
  for (const link of nav.children) {
    const isHere = /** @type {HTMLElement} */ (link).dataset.view === placeOf(route);
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown && shown.key === key && shown.view.update) {
    shown.view.update(route);
    return;
  }
  opened += 1;
  const mine = opened;
  shown?.view.close?.();
  shown = null;
  keys.setView({});
  const later = window.setTimeout(() => mine === opened && fill(main, h("p", { class: "loading" }, "Loading…")), 250);
  try {
    const make = /** @type {(app: App, route: Route) => Promise<View>} */ (VIEWS[route.view]);
    const view = await make(app, route);
    if (mine !== opened) {
      view.close?.();
      return;
    }
    shown = { key, view };
    keys.setView(view.keys ?? {});
    fill(main, view.element);
  } catch (error) {
    if (mine === opened) fill(main, failureState(error, () => void show(app, currentRoute())));
  } finally {
    window.clearTimeout(later);
  }
}

/** @param {App} app */
async function countReviews(app) {
  try {
    const open = (await app.source.reviews()).filter((review) => review.decision === null).length;
    waiting.textContent = String(open);
    waiting.setAttribute("aria-label", `${open} open`);
    waiting.hidden = open === 0;
  } catch {
    waiting.hidden = true; // the view itself says what is wrong
  }
}

/** @param {App} app */
async function showDrain(app) {
  try {
    const { drain, open_runs: open } = await app.source.endpoint(false);
    const left = open === null || drain === "drained" ? "" : `: ${countOf(open, "run")} still open`;
    const text = drain === "serving" ? "" : `This endpoint is ${drain} and accepts no new runs${left}`;
    if (drainNotice.textContent !== text) drainNotice.textContent = text; // told once, not at each look
    drainNotice.hidden = !text;
  } catch {
    drainNotice.hidden = true; // the view itself says what is wrong
  }
}

async function start() {
  const file = embeddedRun();
  const source = file ? fileSource(file) : withFolder(httpSource());
  onKeyNeeded(askKey);
  const info = await source.info();
  /** @type {App} */
  const app = {
    source,
    info,
    go(target, replace = false) {
      const here = currentRoute();
      const view = target.view ?? here.view;
      const params = new URLSearchParams(target.view && target.view !== here.view ? "" : here.params);
      for (const [key, value] of Object.entries(target.params ?? {})) {
        if (value) params.set(key, value);
        else params.delete(key);
      }
      const address = formatRoute({ view, run: target.run ?? here.run, tab: target.tab ?? here.tab, params });
      if (replace) {
        history.replaceState(null, "", address);
        void show(app, currentRoute());
      } else if (address !== window.location.hash) window.location.hash = address;
    },
    announce(text) {
      spoken.textContent = text;
    },
    setTitle(title) {
      document.title = title ? `${oneLine(title, 120)} · Studio` : "ensemble_ray Studio";
    },
    refreshReviews: () => void countReviews(app),
  };
  if (file && !window.location.hash) history.replaceState(null, "", formatRoute({ view: "run", run: file.run.run_id, tab: "flow" }));
  if (info.has_files && !window.location.hash) history.replaceState(null, "", formatRoute({ view: "files" }));
  frame(app);
  keys.setGlobal({
    r: () => app.go({ view: "runs", run: "" }),
    v: () => app.go({ view: "reviews", run: "" }),
    t: () => app.source.isFile || app.go({ view: "trends", run: "" }),
    a: () => info.has_actors && app.go({ view: "actors", run: "" }),
  });
  acceptDrops((dropped) => {
    app.source = fileSource(dropped);
    app.info = dropped.info;
    shown?.view.close?.();
    shown = null;
    place.textContent = dropped.info.title;
    for (const link of nav.querySelectorAll("[data-view=trends], [data-view=evaluations]")) link.remove();
    history.replaceState(null, "", formatRoute({ view: "run", run: dropped.run.run_id, tab: "flow" }));
    void show(app, currentRoute());
    toast("Showing the dropped file. Reload the page to go back");
  });
  window.addEventListener("hashchange", () => void show(app, currentRoute()));
  if (!source.isFile) {
    void countReviews(app);
    window.setInterval(() => document.hidden || app.source.isFile || countReviews(app), REVIEWS_EVERY);
  }
  if (info.has_teams) {
    void showDrain(app);
    window.setInterval(() => document.hidden || app.source.isFile || showDrain(app), REVIEWS_EVERY);
  }
  await show(app, currentRoute());
}

start().catch((error) => {
  document.body.append(main);
  fill(main, emptyState({ symbol: "failed", title: "Studio cannot start", text: error instanceof Error ? error.message : String(error) }));
});
