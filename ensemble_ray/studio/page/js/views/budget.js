// What a run spent of what it may, by agent, and why it ended.

import { fill, h } from "../dom.js";
import { formatCount, formatMoney, formatShort, roleClass } from "../format.js";
import { visible } from "../text.js";
import { agentName, emptyState } from "../ui/parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").AgentBudget} AgentBudget */
/** @typedef {import("../model/run.js").RunModel} RunModel */

/**
 * @param {string} title
 * @param {string} spent
 * @param {string|null} allowed
 * @param {number|null} part of what is allowed
 */
function meter(title, spent, allowed, part) {
  const state = part === null ? "" : part >= 1 ? "over" : part > 0.8 ? "near" : "";
  return h("section", { class: "card panel" }, h("h2", {}, title),
    h("p", { class: "big num" }, spent, allowed === null ? null : h("small", {}, ` of ${allowed}`)),
    part === null ? h("p", { class: "muted" }, "No limit is set") : h("div", { class: `meter ${state}`, role: "meter", "aria-label": title, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(Math.min(1, part) * 100) }, h("i", { vars: { "--part": String(Math.min(1, part)) } })),
    part === null ? null : h("p", { class: "muted" }, `${(part * 100).toFixed(part < 0.1 ? 1 : 0)} % is spent`));
}

/**
 * @param {App} _app
 * @param {RunModel} model
 * @returns {import("./run.js").Tab}
 */
export function budgetTab(_app, model) {
  const content = h("div", { class: "content" });
  const element = h("div", { class: "scroll" }, content);
  let drawn = "";

  function draw() {
    const { budget } = model.run;
    const state = JSON.stringify(budget);
    if (state === drawn) return;
    drawn = state;
    const { tokens, cost } = budget;
    const agents = [...budget.by_agent].sort((a, b) => (b.tokens ?? 0) - (a.tokens ?? 0));
    const most = Math.max(1, ...agents.map((agent) => agent.tokens ?? 0));
    const tokenPart = tokens.allowed && tokens.spent !== null ? tokens.spent / tokens.allowed : null;
    const costPart = cost.allowed && cost.spent !== null ? Number(cost.spent) / Number(cost.allowed) : null;
    fill(content,
      h("div", { class: "panels" },
        meter("Tokens", formatCount(tokens.spent), tokens.allowed === null ? null : formatCount(tokens.allowed), tokenPart),
        meter("Cost", formatMoney(cost.spent, cost.currency), cost.allowed === null ? null : formatMoney(cost.allowed, cost.currency), costPart),
        h("section", { class: "card panel" }, h("h2", {}, "How it ended"), h("p", {}, budget.end_reason === null ? "It is active." : visible(budget.end_reason)))),
      agents.length
        ? h("section", { class: "card" }, h("h2", { class: "card-title" }, "By agent"), h("div", { class: "table-box" }, h("table", { class: "data" },
            h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Agent"), h("th", { scope: "col", class: "num" }, "Steps"), h("th", { scope: "col", class: "num" }, "Tokens"), h("th", { scope: "col" }, h("span", { class: "sr" }, "Share")), h("th", { scope: "col", class: "num" }, "Cost"))),
            h("tbody", {}, agents.map((agent) => rowOf(agent, most, cost.currency))))))
        : emptyState({ title: "No usage yet", text: "Tokens and cost appear after the first answer of a model." }));
  }

  /**
   * @param {AgentBudget} agent
   * @param {number} most
   * @param {string|null} currency
   */
  function rowOf(agent, most, currency) {
    return h("tr", {}, h("td", {}, agentName(agent.agent)), h("td", { class: "num" }, formatCount(agent.steps)), h("td", { class: "num", title: formatCount(agent.tokens) }, formatShort(agent.tokens)),
      h("td", {}, h("span", { class: `bar-cell ${roleClass(agent.agent)}` }, h("i", { vars: { "--part": String((agent.tokens ?? 0) / most) } }))), h("td", { class: "num" }, formatMoney(agent.cost, currency)));
  }

  draw();
  return { element, draw };
}
