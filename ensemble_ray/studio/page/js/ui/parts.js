// Small parts that every view is made of: states, texts, dialogs, menus, messages.

import { fill, h, icon } from "../dom.js";
import { formatCount, roleClass, statusGlyph, statusTone, statusWord } from "../format.js";
import { FIRST_SHOWN, diff, head, oneLine, pieces, visible } from "../text.js";

/** Statuses in the order in which a bar shows them. */
const ORDER = ["completed", "running", "waiting", "interrupted", "failed", "exited", "cancelled", "skipped", "pending"];

/**
 * A state with its word.
 * @param {string} status
 */
export function statusPill(status) {
  return h("span", { class: `status is-${statusTone(status)}` }, icon(statusGlyph(status), status === "running" ? "turning" : ""), statusWord(status));
}

/**
 * A state without a word on the screen; a screen reader says it.
 * @param {string} status
 */
export function statusMark(status) {
  return h("span", { class: `glyph is-${statusTone(status)}`, title: statusWord(status) }, icon(statusGlyph(status), status === "running" ? "turning" : ""), h("span", { class: "sr" }, statusWord(status)));
}

/**
 * How many steps there are of each state, as a bar.
 * @param {Record<string, number>} counts
 */
export function progressBar(counts) {
  return h("span", { class: "progress", "aria-hidden": "true" }, ORDER.filter((status) => counts[status]).map((status) => h("i", { class: `is-${statusTone(status)}`, vars: { "--n": String(counts[status]) } })));
}

/**
 * The same in words.
 * @param {Record<string, number>} counts
 */
export function progressWords(counts) {
  return ORDER.filter((status) => counts[status]).map((status) => `${formatCount(counts[status])} ${statusWord(status).toLowerCase()}`).join(", ");
}

/** @param {Record<string, number>} counts */
export function progress(counts) {
  const words = progressWords(counts);
  return h("span", { class: "row", title: words }, progressBar(counts), h("span", {}, words || "none"));
}

/**
 * The name of an agent with its colour.
 * @param {string} agent
 */
export function agentName(agent) {
  return agent ? h("span", { class: `row clip ${roleClass(agent)}` }, h("span", { class: "dot" }), h("bdi", { class: "clip" }, oneLine(agent, 80))) : h("span", { class: "muted" }, "–");
}

/**
 * One line of somebody's text.
 * @param {string} text
 * @param {string} [classes]
 * @param {number} [limit]
 */
export function line(text, classes = "", limit = 240) {
  return h("bdi", { class: classes || null, dir: "auto" }, oneLine(text, limit));
}

/**
 * Somebody's text: whole if it is short, else its beginning and a button for the rest.
 * @param {string} text
 * @param {{prose?: boolean, label?: string, whole?: {length: number, load: () => Promise<string>}}} [options] `whole`: there is more on the server
 */
export function textBlock(text, { prose = false, label = "Text", whole } = {}) {
  const pre = h("pre", { dir: "auto", tabindex: 0, role: "region", "aria-label": label });
  const block = h("div", { class: prose ? "text prose" : "text" }, pre);
  /** @param {string} shown */
  const show = (shown) => fill(pre, pieces(visible(shown)).map((piece) => h("span", { class: "piece", dir: "auto" }, piece)));
  const isCut = whole !== undefined || text.length > FIRST_SHOWN;
  show(isCut ? head(text, FIRST_SHOWN) : text);
  if (isCut) {
    const length = whole?.length ?? text.length;
    const button = h("button", { class: "button small", type: "button", onclick: async () => {
      button.disabled = true;
      try {
        show(whole ? await whole.load() : text);
        more.remove();
      } catch (error) {
        button.disabled = false;
        toast(messageOf(error), true);
      }
    } }, "Show all");
    const more = h("div", { class: "more" }, button, `${formatCount(Math.min(FIRST_SHOWN, text.length))} of ${formatCount(length)} characters are shown`);
    block.append(more);
  }
  return block;
}

/**
 * What is different between two texts.
 * @param {string} before
 * @param {string} after
 * @param {string} [label]
 */
export function diffBlock(before, after, label = "Changes") {
  const changes = diff(before, after).map(({ kind, text }) => {
    const shown = visible(text);
    if (kind === "same") return h("span", {}, shown);
    return kind === "added" ? h("ins", {}, shown) : h("del", {}, shown);
  });
  return h("div", { class: "text prose diff" }, h("pre", { dir: "auto", tabindex: 0, role: "region", "aria-label": label }, changes));
}

/** @param {unknown} error */
export function messageOf(error) {
  return error instanceof Error ? error.message : String(error);
}

const toasts = h("div", { class: "toasts", role: "status", "aria-live": "polite" });

/**
 * Say something that goes away by itself.
 * @param {string} text
 * @param {boolean} [isBad]
 */
export function toast(text, isBad = false) {
  if (!toasts.isConnected) document.body.append(toasts);
  const one = h("div", { class: isBad ? "toast bad" : "toast" }, visible(text));
  toasts.append(one);
  window.setTimeout(() => one.remove(), isBad ? 9000 : 4000);
}

/**
 * What to say where there is nothing.
 * @param {{symbol?: string, title: string, text?: string, command?: string, action?: HTMLElement}} what
 */
export function emptyState({ symbol = "list", title, text, command, action }) {
  return h("div", { class: "empty" }, icon(symbol), h("h2", {}, title), text && h("p", {}, text), command && h("pre", {}, command), action);
}

/**
 * A failure in place of what could not be shown.
 * @param {unknown} error
 * @param {() => void} [retry]
 */
export function failureState(error, retry) {
  return emptyState({ symbol: "failed", title: "Cannot be displayed", text: messageOf(error), ...(retry ? { action: h("button", { class: "button", type: "button", onclick: retry }, "Try again") } : {}) });
}

/**
 * What says over rows that are kept that they could not be had again.
 * @returns {{element: HTMLElement, tell: (error: unknown) => void, clear: () => void}}
 */
export function staleNotice() {
  const element = h("div", { class: "notice bad", role: "status", hidden: true });
  return {
    element,
    tell(error) {
      const text = `The page may be outdated: ${visible(messageOf(error))}`;
      if (element.textContent !== text) element.textContent = text; // told once, not at each look
      element.hidden = false;
    },
    clear() {
      element.hidden = true;
      element.textContent = "";
    },
  };
}

/**
 * Open a dialog; it is closed by Esc, by its buttons and by a click beside it.
 * @param {{title: string, body: (HTMLElement|string)[], buttons?: HTMLElement[], onClose?: () => void}} what
 * @returns {HTMLDialogElement}
 */
export function openDialog({ title, body, buttons = [], onClose }) {
  const close = h("button", { class: "icon-button", type: "button", "aria-label": "Close", onclick: () => dialog.close() }, icon("close"));
  const heading = h("h2", { class: "grow", id: "dialog-title" }, title);
  const footer = buttons.length ? h("footer", {}, buttons) : null;
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, h("header", {}, heading, close), h("div", { class: "body" }, body), footer);
  dialog.addEventListener("close", () => {
    dialog.remove();
    onClose?.();
  });
  dialog.addEventListener("mousedown", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/**
 * A button that opens a list of things to do; arrows move in it.
 * @param {(Element|string)[]} label
 * @param {{label: string, hint?: string, run: () => void}[]} items
 */
export function menu(label, items) {
  const list = h("div", { class: "menu-list", role: "menu", hidden: true });
  const opener = h("button", { class: "button", type: "button", "aria-haspopup": "menu", "aria-expanded": "false", onclick: () => set(list.hidden) }, label);
  const element = h("div", { class: "menu" }, opener, list);
  /** @param {boolean} isOpen */
  function set(isOpen) {
    list.hidden = !isOpen;
    opener.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) /** @type {HTMLElement|null} */ (list.firstElementChild)?.focus();
  }
  for (const item of items) {
    list.append(h("button", { type: "button", role: "menuitem", onclick: () => {
      set(false);
      item.run();
    } }, item.label, item.hint && h("small", {}, item.hint)));
  }
  element.addEventListener("keydown", (event) => {
    const buttons = /** @type {HTMLElement[]} */ ([...list.children]);
    const at = buttons.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    if (event.key === "Escape" && !list.hidden) {
      event.stopPropagation();
      set(false);
      opener.focus();
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (list.hidden) set(true);
      else buttons.at((at + (event.key === "ArrowDown" ? 1 : -1)) % buttons.length)?.focus();
    }
  });
  element.addEventListener("focusout", (event) => {
    if (!element.contains(/** @type {Node|null} */ (event.relatedTarget))) set(false);
  });
  return element;
}

/**
 * Buttons of which one is pressed.
 * @param {string} label
 * @param {[string, string][]} choices value and word
 * @param {string} chosen
 * @param {(value: string) => void} onChoose
 */
export function segmented(label, choices, chosen, onChoose) {
  const group = h("div", { class: "segmented", role: "group", "aria-label": label });
  for (const [value, word] of choices) {
    group.append(h("button", { type: "button", "data-value": value, "aria-pressed": String(value === chosen), onclick: () => {
      for (const button of group.children) button.setAttribute("aria-pressed", String(/** @type {HTMLElement} */ (button).dataset.value === value));
      onChoose(value);
    } }, word));
  }
  return group;
}

/** @param {string} text */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied");
  } catch {
    toast("The browser blocks copying: select the text instead", true);
  }
}
