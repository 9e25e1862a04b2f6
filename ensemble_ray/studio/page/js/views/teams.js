// The teams of an endpoint: the versions of their files, with shares of new runs and open runs.

import { fill, h } from "../dom.js";
import { countOf, formatCount } from "../format.js";
import { formatRoute } from "../router.js";
import { oneLine } from "../text.js";
import { emptyState, failureState, staleNotice } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").EndpointTeam} EndpointTeam */
/** @typedef {import("../types.js").View} View */

/** How often it looks again, ms. */
const EVERY = 5000;
const WORDS = ["Version", "Share of new runs", "Open runs", "Loaded"];

/**
 * @param {App} app
 * @returns {Promise<View>}
 */
export async function teamsView(app) {
  const content = h("div", { class: "content actors" }, h("p", { class: "loading" }, "Loading…"));
  const notice = staleNotice();
  let isDrawn = false;

  async function load() {
    try {
      const { teams } = await app.source.endpoint(true);
      isDrawn = true;
      notice.clear();
      fill(content,
        h("div", { class: "page-head" }, h("h1", {}, "Teams"), h("p", { class: "num" }, countOf(teams.length, "team"))),
        !teams.length && emptyState({ symbol: "server", title: "No teams to show", text: "This key has no team of this endpoint." }),
        teams.map(card));
    } catch (error) {
      if (isDrawn) notice.tell(error);
      else fill(content, failureState(error, () => void load()));
    }
  }

  await load();
  app.setTitle("Teams");
  const timer = window.setInterval(() => document.hidden || void load(), EVERY);
  return { element: h("div", { class: "page" }, notice.element, content), close: () => window.clearInterval(timer) };
}

/** @param {EndpointTeam} team */
function card(team) {
  const rows = team.versions.map((one) => h("tr", {},
    h("td", {}, h("a", { class: "mono", href: formatRoute({ view: "runs", params: { tag: `version:${one.version}` } }) }, oneLine(one.version, 20))),
    h("td", { class: "num" }, `${Math.round(one.share * 1000) / 10} %`),
    h("td", { class: "num" }, formatCount(one.open_runs)),
    h("td", { class: "num" }, new Date(one.loaded_at).toLocaleString())));
  for (const row of rows) [...row.children].forEach((cell, at) => cell.setAttribute("data-word", WORDS[at] ?? ""));
  return h("section", { class: "card" },
    h("div", { class: "node-title-row" }, h("h2", {}, oneLine(team.ensemble, 60)), h("span", { class: "grow" }), h("span", { class: "muted num" }, countOf(team.versions.length, "version"))),
    rows.length > 0 ? h("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": oneLine(`Versions of ${team.ensemble}`, 80) },
      h("table", { class: "data" }, h("thead", {}, h("tr", {}, WORDS.map((word, at) => h("th", { scope: "col", class: at ? "num" : null }, word)))), h("tbody", {}, rows)))
      : h("p", { class: "muted" }, "Served from a Python module: it has no versions."));
}
