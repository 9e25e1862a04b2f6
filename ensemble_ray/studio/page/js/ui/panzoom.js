// Move and scale a drawing: by wheel, by two fingers, by dragging, by keys.

const [SMALLEST, LARGEST] = [0.08, 2.5];
/** Narrower windows are telephones, px. */
const TELEPHONE = 480;
/** Below this scale small text cannot be read. */
const FAR = 0.48;

/**
 * @param {HTMLElement} viewport
 * @param {HTMLElement} canvas
 */
export function panZoom(viewport, canvas) {
  let [x, y, scale] = [0, 0, 1];
  let [width, height] = [0, 0];
  /** Nobody moved it: it is fitted again when its room changes. */
  let isFitted = true;
  /** @type {Map<number, PointerEvent>} */
  const pointers = new Map();
  let moved = 0;

  function apply() {
    canvas.classList.toggle("far", scale < FAR);
    canvas.style.transform = `translate(${x}px, ${y}px) scale(${scale})`;
    viewport.style.setProperty("--grid-x", `${x}px`);
    viewport.style.setProperty("--grid-y", `${y}px`);
  }

  /**
   * @param {number} factor
   * @param {number} [atX]
   * @param {number} [atY]
   */
  function zoom(factor, atX = viewport.clientWidth / 2, atY = viewport.clientHeight / 2) {
    const to = Math.min(LARGEST, Math.max(Math.min(SMALLEST, scale), scale * factor));
    x = atX - ((atX - x) * to) / scale;
    y = atY - ((atY - y) * to) / scale;
    scale = to;
    isFitted = false;
    apply();
  }

  /**
   * @param {number} dx
   * @param {number} dy
   */
  function pan(dx, dy) {
    x += dx;
    y += dy;
    isFitted = false;
    apply();
  }

  function fit() {
    const [w, h] = [viewport.clientWidth, viewport.clientHeight];
    if (!w || !h || !width || !height) return;
    const margin = Math.min(28, w / 20);
    scale = Math.min((w - 2 * margin) / width, (h - 2 * margin) / height, 1);
    x = (w - width * scale) / 2;
    y = Math.max(margin, (h - height * scale) / 2.4);
    isFitted = true;
    apply();
  }

  viewport.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = viewport.getBoundingClientRect();
    const step = event.deltaMode === 1 ? 18 : 1;
    if (event.ctrlKey || event.metaKey || (event.deltaX === 0 && !event.shiftKey && Math.abs(event.deltaY) >= 50)) {
      zoom(Math.exp((-event.deltaY * step) / 500), event.clientX - box.left, event.clientY - box.top);
    } else pan(-event.deltaX * step, -event.deltaY * step);
  }, { passive: false });
  viewport.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event);
    moved = 0;
  });
  viewport.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const others = [...pointers.values()].filter((one) => one.pointerId !== event.pointerId);
    pointers.set(event.pointerId, event);
    const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    moved += Math.abs(dx) + Math.abs(dy);
    const other = others[0];
    if (other) {
      const box = viewport.getBoundingClientRect();
      const [was, is] = [Math.hypot(before.clientX - other.clientX, before.clientY - other.clientY), Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY)];
      if (was > 0) zoom(is / was, (event.clientX + other.clientX) / 2 - box.left, (event.clientY + other.clientY) / 2 - box.top);
    } else if (moved > 4) {
      if (!viewport.hasPointerCapture(event.pointerId)) viewport.setPointerCapture(event.pointerId);
      viewport.classList.add("dragging");
      pan(dx, dy);
    }
  });
  /** @param {PointerEvent} event */
  const release = (event) => {
    pointers.delete(event.pointerId);
    viewport.classList.remove("dragging");
  };
  viewport.addEventListener("pointerup", release);
  viewport.addEventListener("pointercancel", release);
  const watcher = new ResizeObserver(() => isFitted && fit());
  watcher.observe(viewport);
  return {
    zoom,
    pan,
    fit,
    /**
     * @param {number} w
     * @param {number} h
     */
    setSize(w, h) {
      [width, height] = [w, h];
    },
    /**
     * Show the drawing for the first time: all of it, or on a telephone at its size, so that texts can be read, with this box at the top.
     * @param {{x: number, y: number, w: number, h: number}|undefined} box
     */
    open(box) {
      fit();
      if (viewport.clientWidth >= TELEPHONE || scale >= 1 || !box) return;
      isFitted = false;
      [x, y, scale] = [(viewport.clientWidth - box.w) / 2 - box.x, 16 - box.y, 1];
      apply();
    },
    /**
     * Bring a box into sight.
     * @param {number} left
     * @param {number} top
     * @param {number} w
     * @param {number} h
     */
    reveal(left, top, w, h) {
      const [l, t, r, b] = [left * scale + x, top * scale + y, (left + w) * scale + x, (top + h) * scale + y];
      const dx = l < 8 ? 8 - l : r > viewport.clientWidth - 8 ? viewport.clientWidth - 8 - r : 0;
      const dy = t < 8 ? 8 - t : b > viewport.clientHeight - 8 ? viewport.clientHeight - 8 - b : 0;
      viewport.scrollTo(0, 0);
      if (dx || dy) pan(dx, dy);
    },
    close: () => watcher.disconnect(),
  };
}
