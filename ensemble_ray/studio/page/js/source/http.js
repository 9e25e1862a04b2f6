// Data from the server that the page came from. Every address is relative: the page asks nobody else.

import { listen } from "./stream.js";

/** @typedef {import("../types.js").Source} Source */
/** @typedef {import("../types.js").RunPreview} RunPreview */

const BASE = "api/studio/";
const KEY = "ensemble-ray-key";

/** An answer that is no success, or none at all. */
export class RequestError extends Error {
  /**
   * @param {number} status 0: nobody answered
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.name = "RequestError";
    this.status = status;
    this.code = code;
  }
}

/** @type {() => Promise<string|null>} */
let askForKey = async () => null;

/**
 * Say who asks for a key where the server wants one.
 * @param {() => Promise<string|null>} ask
 */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** @returns {Record<string, string>} */
function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/**
 * @param {string} path
 * @param {RequestInit} [init]
 * @returns {Promise<Response>}
 */
async function ask(path, init = {}) {
  for (;;) {
    const answer = await send(path, init);
    if (answer.ok) return answer;
    if (answer.status === 401) {
      const key = await askForKey();
      if (key) {
        sessionStorage.setItem(KEY, key);
        continue;
      }
    }
    throw await refusal(answer);
  }
}

/**
 * @param {string} path
 * @param {RequestInit} init
 */
async function send(path, init) {
  try {
    return await fetch(BASE + path, { ...init, headers: { ...headers(), .../** @type {Record<string, string>} */ (init.headers ?? {}) }, cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new RequestError(0, "UNREACHABLE", "The server does not answer. Is it still running?");
  }
}

/** @param {Response} answer */
async function refusal(answer) {
  const body = await answer.text();
  try {
    const { code, message } = JSON.parse(body);
    if (typeof message === "string") return new RequestError(answer.status, String(code), message);
  } catch {
    // no JSON: a proxy answered, say, and its status is all there is
  }
  return new RequestError(answer.status, "HTTP_ERROR", `The server answered ${answer.status} ${answer.statusText}`.trim());
}

/** @param {string} path */
async function get(path) {
  return (await ask(path)).json();
}

/**
 * @param {string} path
 * @param {unknown} [body]
 */
async function post(path, body = {}) {
  return (await ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();
}

/** @param {string} part */
const quote = (part) => encodeURIComponent(part);
/** A step's id keeps its slashes: the server takes the rest of the path. @param {string} step */
const stepPath = (step) => step.split("/").map(quote).join("/");

/** @returns {Source} */
export function httpSource() {
  return {
    isFile: false,
    info: () => get("info"),
    runs(filters, cursor, limit) {
      const query = new URLSearchParams(filters);
      query.set("limit", String(limit));
      if (cursor) query.set("cursor", cursor);
      return get(`runs?${query}`);
    },
    run: (run) => get(`runs/${quote(run)}`),
    steps: (run, after) => get(`runs/${quote(run)}/steps?after=${after}`),
    live: (run, after, listener) => listen({ open: (cursor, signal) => openStream(run, cursor, signal), cursor: after, listener }),
    step: (run, step) => get(`runs/${quote(run)}/steps/${stepPath(step)}`),
    text: async (run, step, field) => (await ask(`runs/${quote(run)}/steps/${stepPath(step)}/text?field=${quote(field)}`)).text(),
    attachment: async (run, digest) => (await ask(`runs/${quote(run)}/attachments/${quote(digest)}`)).blob(),
    flow: (run, as) => get(`runs/${quote(run)}/flow?as=${as}`),
    actors: (run) => get(run === null ? "actors" : `runs/${quote(run)}/actors`),
    deliveries: async (run) => (await get(`runs/${quote(run)}/deliveries`)).deliveries,
    reviews: async () => (await get("reviews")).reviews,
    async decide(review, body) {
      await post(`reviews/${quote(review.run_id)}/${stepPath(review.gate_id)}`, body);
    },
    resumePreview: (run) => get(`runs/${quote(run)}/resume-preview`),
    forkPreview: (run, spec) => get(`runs/${quote(run)}/fork-preview?from=${quote(spec)}`),
    async cancel(run) {
      await post(`runs/${quote(run)}/cancel`);
    },
    async remove(run) {
      await ask(`runs/${quote(run)}`, { method: "DELETE" });
    },
    reveal: async (run) => (await post(`runs/${quote(run)}/reveal`)).values,
    resume: async (run) => (await post(`runs/${quote(run)}/resume`)).run_id,
    fork: async (run, spec, name) => (await post(`runs/${quote(run)}/fork`, name ? { from: spec, run_id: name } : { from: spec })).run_id,
    compare: (a, b) => get(`compare?a=${quote(a)}&b=${quote(b)}`),
    series: (run) => get(`runs/${quote(run)}/series`),
    trends: (days, ensemble) => get(`trends?days=${days}&offset=${-new Date().getTimezoneOffset()}&ensemble=${quote(ensemble)}`),
    evaluations: () => get("evaluations"),
    evaluation: (id, compare) => get(`evaluations/${quote(id)}?compare=${quote(compare)}`),
    schedules: async () => (await get("schedules")).schedules,
    controlSchedule: async (one, action) => (await post(`schedules/${quote(one.ensemble)}/${quote(one.name)}/${action}`)).run_id ?? null,
    usage: () => get("quota"),
    files: () => get("files"),
    endpoint: (hasVersions) => get(`endpoint?versions=${hasVersions}`),
    file: async (name) => (await ask(`files/${quote(name)}`)).text(),
    exported: async (run, format) => (await ask(`runs/${quote(run)}/export?format=${format}`)).blob(),
  };
}

/**
 * @param {string} run
 * @param {number} cursor
 * @param {AbortSignal} signal
 */
function openStream(run, cursor, signal) {
  return ask(`runs/${quote(run)}/live?after=${cursor}`, { signal, headers: { Accept: "text/event-stream", "Last-Event-ID": String(cursor) } });
}
