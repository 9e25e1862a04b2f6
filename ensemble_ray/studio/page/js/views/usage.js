// What the runs of the reader's key have used today, of its quotas (S-QUO-42).

import { fill, h } from "../dom.js";
import { formatCount, formatTime } from "../format.js";
import { visible } from "../text.js";
import { emptyState, failureState, staleNotice } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").QuotaBar} QuotaBar */
/** @typedef {import("../types.js").Usage} Usage */
/** @typedef {import("../types.js").View} View */

const EVERY = 5000;
const TITLES = /** @type {Record<string, string>} */ ({ runs: "Runs", tokens: "Tokens", cost: "Cost" });

/** @param {QuotaBar} bar @param {string} amount */
const shown = (bar, amount) => (bar.quantity === "cost" ? amount : formatCount(Number(amount)));

/** @param {QuotaBar} bar */
function card(bar) {
  const title = TITLES[bar.quantity] ?? bar.quantity;
  const percent = Math.round(bar.used_share * 100);
  const state = bar.used_share >= 1 ? "over" : bar.used_share > 0.8 ? "near" : "";
  return h("section", { class: "card panel", "data-quota": bar.quantity }, h("h2", {}, title),
    h("p", { class: "big num" }, shown(bar, bar.used), h("small", {}, ` of ${shown(bar, bar.limit)}`)),
    h("div", { class: `meter parts ${state}`, role: "meter", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent },
      h("i", { vars: { "--part": String(bar.used_share) } }), h("i", { class: "reserved", vars: { "--part": String(bar.reserved_share) } })),
    h("p", { class: "muted" }, `${percent} % is used`, Number(bar.reserved) > 0 ? `, ${shown(bar, bar.reserved)} reserved by open runs` : ""));
}

/**
 * @param {App} app
 * @returns {View}
 */
export function usageView(app) {
  const content = h("div", { class: "content" });
  const notice = staleNotice();
  const element = h("div", { class: "scroll" }, notice.element, content);
  let drawn = "";

  /** @param {Usage} usage */
  function draw(usage) {
    const state = JSON.stringify(usage);
    if (state === drawn) return;
    drawn = state;
    if (!usage.quotas.length) {
      fill(content, emptyState({ title: "No quotas", text: "The key of this page has no quotas." }));
      return;
    }
    fill(content, h("h1", {}, "Usage today"),
      h("p", { class: "muted" }, "Key ", h("strong", {}, visible(usage.key)), usage.resets_at === null ? "" : `. The quotas are full again at ${formatTime(usage.resets_at)}.`),
      h("div", { class: "panels" }, usage.quotas.map(card)));
  }

  async function load() {
    try {
      draw(await app.source.usage());
      notice.clear();
    } catch (error) {
      if (drawn) notice.tell(error);
      else fill(content, failureState(error, () => void load()));
    }
  }

  app.setTitle("Usage");
  void load();
  const poll = window.setInterval(() => document.hidden || void load(), EVERY);
  return { element, close: () => window.clearInterval(poll) };
}
