// Addresses: `#/runs/ID/TAB?key=value`. Pure, but for `currentRoute`.

/** @typedef {import("./types.js").Route} Route */

/** Tabs of a run, in their order. */
export const TABS = ["flow", "timeline", "steps", "items", "budget", "actors"];

/**
 * Read an address; what it does not know is the list of runs.
 * @param {string} hash
 * @returns {Route}
 */
export function parseRoute(hash) {
  const [path = "", query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decode);
  const params = new URLSearchParams(query);
  const [view = "runs", run = "", tab = ""] = parts;
  if (view === "runs" && run) return { view: "run", run, tab: TABS.includes(tab) ? tab : "flow", params };
  return { view: ["reviews", "compare", "actors", "files", "trends", "evaluations", "teams", "schedules", "usage"].includes(view) ? view : "runs", run: "", tab: "", params };
}

/** @param {string} part */
function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a stray percent sign that somebody typed
  }
}

/**
 * Write an address; empty values are left out.
 * @param {{view: string, run?: string, tab?: string, params?: URLSearchParams|Record<string, string|null|undefined>}} route
 */
export function formatRoute({ view, run = "", tab = "", params = {} }) {
  const query = new URLSearchParams();
  const entries = params instanceof URLSearchParams ? [...params] : Object.entries(params);
  for (const [key, value] of entries) if (value) query.set(key, value);
  const path = view === "run" ? `#/runs/${encodeURIComponent(run)}/${tab || "flow"}` : `#/${view}`;
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/**
 * Address of a step of a run.
 * @param {string} run
 * @param {string} step
 * @param {string} [tab]
 */
export function stepLink(run, step, tab = "steps") {
  return formatRoute({ view: "run", run, tab, params: { step } });
}

/** @returns {Route} */
export function currentRoute() {
  return parseRoute(window.location.hash);
}
