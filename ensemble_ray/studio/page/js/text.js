// Texts of models, tools and users: made visible, never interpreted. Pure.

/** @type {Record<string, string>} */
const DIRECTIONS = {
  "\u200b": "ZWSP", "\u200e": "LRM", "\u200f": "RLM", "\u061c": "ALM", "\u202a": "LRE", "\u202b": "RLE", "\u202c": "PDF",
  "\u202d": "LRO", "\u202e": "RLO", "\u2066": "LRI", "\u2067": "RLI", "\u2068": "FSI", "\u2069": "PDI", "\ufeff": "BOM",
  "\u2028": "LS", "\u2029": "PS",
};
// eslint-disable-next-line no-control-regex
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u061c\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]/g;

/** Characters of a text that are shown before somebody asks for all of them. */
export const FIRST_SHOWN = 12_000;
const PIECE = 4_000;

/**
 * Show control characters as their symbols and marks of direction by their names, so that a text cannot dress up.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(/\r\n/g, "\n").replace(INVISIBLE, (char) => {
    const code = char.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    if (code < 0xa0) return `\u27e6${code.toString(16).toUpperCase().padStart(4, "0")}\u27e7`;
    return `\u27e6${DIRECTIONS[char] ?? code.toString(16)}\u27e7`;
  });
}

/**
 * One line of a text, for lists.
 * @param {string} text
 * @param {number} [limit] characters
 */
export function oneLine(text, limit = 400) {
  const cut = text.length > limit ? `${text.slice(0, limit)}…` : text;
  return visible(cut.replace(/\s+/g, " ").trim());
}

/**
 * Cut a text into pieces that a browser lays out fast, at ends of lines where there are some.
 * @param {string} text
 * @returns {string[]}
 */
export function pieces(text) {
  const found = [];
  let at = 0;
  while (at < text.length) {
    let end = Math.min(text.length, at + PIECE);
    if (end < text.length) {
      const line = text.lastIndexOf("\n", end);
      if (line > at + PIECE / 2) end = line + 1;
      else if (isHighSurrogate(text, end - 1)) end += 1;
    }
    found.push(text.slice(at, end));
    at = end;
  }
  return found;
}

/**
 * The first characters of a text, no half of a pair at the end.
 * @param {string} text
 * @param {number} limit
 */
export function head(text, limit) {
  return text.slice(0, isHighSurrogate(text, limit - 1) ? limit - 1 : limit);
}

/**
 * @param {string} text
 * @param {number} at
 */
function isHighSurrogate(text, at) {
  const code = text.charCodeAt(at);
  return code >= 0xd800 && code <= 0xdbff;
}

/**
 * JSON laid out; what is no JSON stays as it is.
 * @param {unknown} value
 */
export function pretty(value) {
  if (typeof value !== "string") return JSON.stringify(value, null, 2);
  const trimmed = value.trim();
  if (trimmed.length > 200_000 || !/^[[{]/.test(trimmed)) return value;
  try {
    return JSON.stringify(JSON.parse(trimmed), null, 2);
  } catch {
    return value; // arguments are as the model wrote them, which may be no JSON
  }
}

/**
 * @typedef {{kind: "same"|"added"|"removed", text: string}} Change
 */

/**
 * What is different between two texts, by words; by whole texts where the way from one to the other is long.
 * @param {string} before
 * @param {string} after
 * @returns {Change[]}
 */
export function diff(before, after) {
  const [a, b] = [words(before), words(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  /** @type {Change[]} */
  const changes = [];
  push(changes, "same", a.slice(0, start).join(""));
  for (const change of shortest(a.slice(start, a.length - end), b.slice(start, b.length - end))) push(changes, change.kind, change.text);
  push(changes, "same", a.slice(a.length - end, a.length).join(""));
  return changes;
}

/** @param {string} text */
function words(text) {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

/**
 * @param {Change[]} changes
 * @param {Change["kind"]} kind
 * @param {string} text
 */
function push(changes, kind, text) {
  if (!text) return;
  const last = changes.at(-1);
  if (last && last.kind === kind) last.text += text;
  else changes.push({ kind, text });
}

/**
 * The shortest edit script (Myers, 1986), given up behind a number of edits.
 * @param {string[]} a
 * @param {string[]} b
 * @returns {Change[]}
 */
function shortest(a, b) {
  /** @type {Change[]} */
  const whole = [{ kind: "removed", text: a.join("") }, { kind: "added", text: b.join("") }];
  if (!a.length || !b.length) return whole;
  const most = Math.min(a.length + b.length, 800);
  /** @type {Map<number, number>[]} */
  const traces = [];
  const ends = new Map([[1, 0]]);
  for (let edits = 0; edits <= most; edits += 1) {
    traces.push(new Map(ends));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
      let x = down ? (ends.get(k + 1) ?? 0) : (ends.get(k - 1) ?? 0) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      ends.set(k, x);
      if (x >= a.length && x - k >= b.length) return walkBack(a, b, traces);
    }
  }
  return whole;
}

/**
 * @param {string[]} a
 * @param {string[]} b
 * @param {Map<number, number>[]} traces
 * @returns {Change[]}
 */
function walkBack(a, b, traces) {
  /** @type {Change[]} */
  const back = [];
  let [x, y] = [a.length, b.length];
  for (let edits = traces.length - 1; edits >= 0; edits -= 1) {
    const ends = /** @type {Map<number, number>} */ (traces[edits]);
    const k = x - y;
    const down = k === -edits || (k !== edits && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
    const fromX = edits === 0 ? 0 : (ends.get(down ? k + 1 : k - 1) ?? 0);
    const fromY = edits === 0 ? 0 : fromX - (down ? k + 1 : k - 1);
    while (x > fromX && y > fromY && x > 0 && y > 0 && a[x - 1] === b[y - 1]) {
      back.push({ kind: "same", text: /** @type {string} */ (a[x - 1]) });
      x -= 1;
      y -= 1;
    }
    if (edits === 0) break;
    if (down) back.push({ kind: "added", text: /** @type {string} */ (b[y - 1]) });
    else back.push({ kind: "removed", text: /** @type {string} */ (a[x - 1]) });
    [x, y] = [fromX, fromY];
  }
  return back.reverse();
}
