// A list of rows of one height of which only those in sight are in the document: ten thousand are as fast as ten.

import { fill } from "../dom.js";

const SPARE = 12;

/**
 * @template T
 * @param {{box: HTMLElement, height: number, make: (item: T, at: number) => HTMLElement, onMove?: (at: number) => void}} options `box` scrolls
 */
export function rowList({ box, height, make, onMove }) {
  /** @type {T[]} */
  let items = [];
  const body = document.createElement("div");
  body.className = "rows-body";
  body.setAttribute("role", "presentation");
  box.append(body);
  let [first, last] = [-1, -1];

  /** @param {boolean} [isNew] */
  function draw(isNew = false) {
    const from = Math.max(0, Math.floor((box.scrollTop - body.offsetTop) / height) - SPARE);
    const to = Math.min(items.length, Math.ceil((box.scrollTop - body.offsetTop + box.clientHeight) / height) + SPARE);
    if (!isNew && from === first && to === last) return;
    [first, last] = [from, to];
    body.style.height = `${items.length * height}px`;
    fill(body, items.slice(from, to).map((item, at) => {
      const row = make(item, from + at);
      row.style.transform = `translateY(${(from + at) * height}px)`;
      return row;
    }));
  }

  box.addEventListener("scroll", () => draw(), { passive: true });
  const watcher = new ResizeObserver(() => draw());
  watcher.observe(box);
  return {
    /** @param {T[]} now */
    set(now) {
      items = now;
      draw(true);
    },
    redraw: () => draw(true),
    /** @param {number} at */
    reveal(at) {
      const top = body.offsetTop + at * height;
      if (top - body.offsetTop < box.scrollTop) box.scrollTop = Math.max(0, top - body.offsetTop);
      else if (top + height > box.scrollTop + box.clientHeight) box.scrollTop = top + height - box.clientHeight;
      draw();
      onMove?.(at);
    },
    close: () => watcher.disconnect(),
  };
}

/**
 * Keys that move in a list.
 * @param {(by: number) => void} move
 * @param {number} length
 * @returns {Record<string, () => void>}
 */
export function moveKeys(move, length) {
  return { ArrowDown: () => move(1), ArrowUp: () => move(-1), PageDown: () => move(15), PageUp: () => move(-15), Home: () => move(-length), End: () => move(length) };
}
