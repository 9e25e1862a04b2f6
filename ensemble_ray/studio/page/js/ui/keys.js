// Keys. A view brings its own; keys typed into fields are none.

import { h } from "../dom.js";
import { openDialog } from "./parts.js";

/** @typedef {Record<string, (event: KeyboardEvent) => void>} Keys */

/** @type {[string, [string, string][]][]} */
const HELP = [
  ["Everywhere", [["?", "this help"], ["/", "search"], ["r", "runs"], ["v", "reviews"], ["t", "trends"], ["a", "actors"], ["Esc", "close what is open, leave a field"]]],
  ["Lists", [["j k", "next and previous"], ["Enter", "open"], ["x", "select (runs)"], ["← →", "fold and unfold (steps)"]]],
  ["A run", [["1 … 6", "the tabs from left to right"], ["e", "first error"], ["j k", "next and previous step"]]],
  ["Flow", [["+ −", "larger, smaller"], ["0", "all of it"], ["← ↑ ↓ →", "move"]]],
  ["Timeline", [["+ −", "zoom"], ["0", "all of it"], ["← →", "move"], ["f", "follow the latest"]]],
  ["Reviews", [["j k", "next and previous"], ["y", "approve"], ["d", "edit"], ["x", "end the run"]]],
];

/** @returns {{setView: (keys: Keys) => void, setGlobal: (keys: Keys) => void, help: () => void}} */
export function installKeys() {
  /** @type {Keys} */
  let own = {};
  /** @type {Keys} */
  let everywhere = {};
  function help() {
    const rows = HELP.flatMap(([title, keys]) => [
      h("h3", {}, title),
      ...keys.flatMap(([key, text]) => [h("span", { class: "row" }, key.split(" ").map((one) => (one === "…" ? one : h("kbd", {}, one)))), h("span", {}, text)]),
    ]);
    openDialog({ title: "Keyboard shortcuts", body: [h("div", { class: "keys" }, rows)] });
  }
  window.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = /** @type {HTMLElement} */ (event.target);
    const isTyping = target.matches?.("input:not([type=checkbox]), textarea, select");
    if (isTyping) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const act = own[event.key] ?? everywhere[event.key];
    if (act) {
      event.preventDefault();
      act(event);
    } else if (event.key === "?") help();
    else if (event.key === "/") {
      const field = /** @type {HTMLElement|null} */ (document.querySelector("[data-search]"));
      if (field) {
        event.preventDefault();
        field.focus();
      }
    }
  });
  return {
    setView: (keys) => {
      own = keys;
    },
    setGlobal: (keys) => {
      everywhere = keys;
    },
    help,
  };
}
