// Elements. Whatever comes from a run is put in as text nodes: no HTML is ever made from it.

/** @typedef {Node|string|number|null|undefined|false} Child */
/** @typedef {Record<string, unknown>} Props */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Set attributes; `on...` are listeners, `class` the class, `vars` custom properties, booleans are there or not.
 * @param {Element} element
 * @param {Props} props
 */
function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on") && typeof value === "function") {
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (name === "vars") {
      const style = /** @type {HTMLElement} */ (element).style;
      for (const [key, text] of Object.entries(/** @type {Record<string, string>} */ (value))) style.setProperty(key, text);
    } else if (name === "value" && "value" in element) {
      /** @type {HTMLInputElement} */ (element).value = String(value);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
}

/**
 * Make an HTML element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Props} [props]
 * @param {...(Child|Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  append(element, children);
  return element;
}

/**
 * Make an SVG element.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Props} [props]
 * @param {...(Child|Child[])} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function s(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  setProps(element, props);
  append(element, children);
  return element;
}

/**
 * @param {Element} element
 * @param {(Child|Child[])[]} children
 */
export function append(element, children) {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "number" ? String(child) : child);
  }
}

/**
 * Replace what is in an element.
 * @param {Element} element
 * @param {...(Child|Child[])} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/**
 * Make the children of `parent` those of `items`, keeping the elements of the keys that stay.
 * @template T
 * @param {HTMLElement} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => HTMLElement} make
 * @param {(element: HTMLElement, item: T) => void} update
 */
export function syncChildren(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [/** @type {HTMLElement} */ (child).dataset.key, /** @type {HTMLElement} */ (child)]));
  /** @type {Element|null} */
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = known.get(key);
    known.delete(key);
    if (element) update(element, item);
    else {
      element = make(item);
      element.dataset.key = key;
    }
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  for (const rest of known.values()) rest.remove();
}

/** @type {Record<string, string>} */
const ICONS = {
  brand: "M12 7v3.5M10.6 13l-3.9 3M13.4 13l3.9 3M12 2a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM5 15.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5zM19 15.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z",
  completed: "M5 12.5l4.5 4.5L19 7.5",
  failed: "M7 7l10 10M17 7L7 17",
  running: "M12 4a8 8 0 1 1-8 8",
  waiting: "M9 6v12M15 6v12",
  pending: "M12 11.5v1",
  stopped: "M7 12h10",
  exited: "M14 5h5v14h-5M4 12h10M10 8l4 4-4 4",
  interrupted: "M13 3L6 13.5h5L10 21l7-10.5h-5z",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM20 20l-4-4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  help: "M9.2 9a2.9 2.9 0 1 1 4.3 2.6c-1 .6-1.5 1.1-1.5 2.4M12 17.5v.1",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  link: "M10 14a4 4 0 0 0 5.7 0l3-3A4 4 0 0 0 13 5.300l-1 1M14 10a4 4 0 0 0-5.7 0l-3 3a4 4 0 0 0 5.700 5.700l1-1",
  down: "M6 9l6 6 6-6",
  up: "M6 15l6-6 6 6",
  right: "M9 6l6 6-6 6",
  left: "M15 6l-6 6 6 6",
  plus: "M12 5v14M5 12h14",
  minus: "M5 12h14",
  fit: "M4 9V4h5M20 9V4h-5M4 15v5h5M20 15v5h-5",
  fork: "M7 5v14M7 13c0-4 10-2 10-8M7 3a2 2 0 1 0 0 4M17 3a2 2 0 1 0 0 4",
  play: "M8 5l11 7-11 7z",
  stop: "M7 7h10v10H7z",
  export: "M12 15V4M8 8l4-4 4 4M5 14v6h14v-6",
  compare: "M8 4v16M16 4v16M4 8h4M4 14h4M16 8h4M16 14h4",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  inbox: "M4 13l3-8h10l3 8v6H4zM4 13h5l1 2.500h4l1-2.500h5",
  person: "M12 4a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM4.500 20a7.500 7.500 0 0 1 15 0",
  columns: "M4 5h16v14H4zM10 5v14M15 5v14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  list: "M8 6h12M8 12h12M8 18h12M4 6h.1M4 12h.1M4 18h.1",
  trend: "M4 4v16h16M8 15l4-5 3 3 5-7",
  clock: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 8v4l3 2",
  server: "M4 5h16v6H4zM4 13h16v6H4zM7 8h.1M7 16h.1",
};

/**
 * A drawing that says nothing to a screen reader: a text stands beside it.
 * @param {string} name
 * @param {string} [classes]
 * @returns {SVGSVGElement}
 */
export function icon(name, classes = "") {
  const shape = s("path", { d: ICONS[name] ?? ICONS.pending });
  return s("svg", { viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": 2.2, "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true", class: classes || null }, shape);
}
