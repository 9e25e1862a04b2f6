// Light, dark, or as the system says; the choice is kept in this browser.

import { fill, h, icon } from "../dom.js";

const KEY = "ensemble-ray-theme";
const NEXT = /** @type {Record<string, string>} */ ({ auto: "light", light: "dark", dark: "auto" });
const SYMBOL = /** @type {Record<string, string>} */ ({ auto: "auto", light: "sun", dark: "moon" });
const SAID = /** @type {Record<string, string>} */ ({ auto: "as the system", light: "light", dark: "dark" });

/** @returns {string} */
function kept() {
  try {
    return localStorage.getItem(KEY) ?? "auto";
  } catch {
    return "auto"; // a file's page may have no storage
  }
}

/** @param {string} theme */
function apply(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  window.dispatchEvent(new Event("themechange"));
}

export function themeButton() {
  let theme = NEXT[kept()] ? kept() : "auto";
  const button = h("button", { class: "icon-button", type: "button", onclick: () => {
    theme = /** @type {string} */ (NEXT[theme]);
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // then it holds until the page is closed
    }
    apply(theme);
    label();
  } });
  function label() {
    fill(button, icon(/** @type {string} */ (SYMBOL[theme])));
    button.title = `Colours: ${SAID[theme]}`;
    button.setAttribute("aria-label", button.title);
  }
  apply(theme);
  label();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
  return button;
}

/**
 * What a custom property of a colour is just now, for canvases.
 * @param {string} name such as `--line`
 */
export function colour(name) {
  const probe = h("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
