// The key that a server with keys asks for. It stays in this tab.

import { h } from "../dom.js";
import { openDialog } from "./parts.js";

/** @type {Promise<string|null>|null} */
let asked = null;

/**
 * Ask for a key; calls at the same time share one dialog.
 * @returns {Promise<string|null>} null: closed without one
 */
export function askKey() {
  asked ??= new Promise((resolve) => {
    const field = h("input", { class: "field", type: "password", id: "key-field", autocomplete: "off", spellcheck: "false", required: true });
    /** @type {string|null} */
    let key = null;
    const form = h("form", { class: "row", method: "dialog", onsubmit: (/** @type {Event} */ event) => {
      event.preventDefault();
      key = field.value.trim() || null;
      dialog.close();
    } }, h("label", { class: "sr", for: "key-field" }, "Key"), field, h("button", { class: "button primary", type: "submit" }, "Use it"));
    field.classList.add("grow");
    const dialog = openDialog({
      title: "This server requires a key",
      body: [h("p", {}, "Create a key with ", h("code", {}, "ensemble-ray keys add NAME"), ". Reading needs the right ", h("code", {}, "read"), ". The page stores the key until you close this tab."), form],
      onClose: () => {
        asked = null;
        resolve(key);
      },
    });
    field.focus();
  });
  return asked;
}
