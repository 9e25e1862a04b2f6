// Numbers, times and states as people read them. Pure.

/** @typedef {import("./types.js").Cost} Cost */

const WORDS = /** @type {Record<string, string>} */ ({ budget_exhausted: "Budget exhausted", exited: "Ended early", interrupted: "Process died" });

/** @type {Record<string, string>} */
const TONES = {
  accepted: "stopped", pending: "stopped", ready: "stopped", skipped: "stopped", cancelled: "stopped", rejected: "failed",
  running: "running", waiting: "waiting", completed: "completed", failed: "failed", exited: "exited",
  interrupted: "failed", budget_exhausted: "exited",
};

/** @type {Record<string, string>} */
const GLYPHS = {
  accepted: "pending", pending: "pending", ready: "pending", skipped: "stopped", cancelled: "stopped", rejected: "failed",
  budget_exhausted: "stopped", interrupted: "interrupted",
};

/** @param {string} status */
export function statusWord(status) {
  return WORDS[status] ?? status.charAt(0).toUpperCase() + status.slice(1);
}

/**
 * Name of the colour of a status: running, waiting, completed, failed, exited, stopped.
 * @param {string} status
 */
export function statusTone(status) {
  return TONES[status] ?? "stopped";
}

/** @param {string} status */
export function statusGlyph(status) {
  return GLYPHS[status] ?? status;
}

/** @param {number|null|undefined} value */
export function formatCount(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

/**
 * 1,240 as 1.2k: for places where there is little room.
 * @param {number|null|undefined} value
 */
export function formatShort(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return String(value);
  if (value < 1e6) return `${(value / 1000).toFixed(value < 10000 ? 1 : 0)}k`;
  return `${(value / 1e6).toFixed(1)}M`;
}

/**
 * Tokens of a run; estimated ones, where a provider did not count, are marked.
 * @param {{tokens: number|null, estimated_tokens?: number|null}} run
 * @param {(value: number|null) => string} [format]
 */
export function formatTokens(run, format = formatShort) {
  return run.tokens === null && run.estimated_tokens ? `~${format(run.estimated_tokens)}` : format(run.tokens);
}

/**
 * What the number of tokens says.
 * @param {{tokens: number|null, estimated_tokens?: number|null}} run
 */
export function tokensTitle(run) {
  if (run.tokens === null && run.estimated_tokens) return "Estimated: the provider did not report the tokens of each call";
  return run.tokens === null ? "No model was called, or the provider reported no tokens" : formatCount(run.tokens);
}

/** @param {{ensemble: string}} run */
export function runName(run) {
  return run.ensemble || "Unnamed team";
}

/**
 * What tells a run from others of its team: its error, or else its inputs.
 * @param {{failure?: string, subject?: string, summary?: string}} run
 */
export function runLine(run) {
  return run.failure || run.subject || run.summary || "";
}

/** @param {Cost|null|undefined} cost with "+" if it lacks model calls of unknown price */
export function formatCost(cost) {
  return cost ? `${formatMoney(cost.amount, cost.currency)}${cost.unpriced_calls ? "+" : ""}` : "–";
}

/**
 * @param {string|null} amount decimal text
 * @param {string|null} currency
 */
export function formatMoney(amount, currency) {
  if (amount === null) return "–";
  const value = Number(amount);
  const digits = value !== 0 && Math.abs(value) < 0.01 ? Number(value.toPrecision(2)).toFixed(Math.min(8, 1 - Math.floor(Math.log10(Math.abs(value))))) : value.toFixed(2);
  return currency === "USD" || currency === null ? `$${digits}` : `${digits} ${currency}`;
}

/** @param {number|null|undefined} ms */
export function formatDuration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const total_s = Math.round(ms / 1000);
  const [hours, minutes, seconds] = [Math.floor(total_s / 3600), Math.floor((total_s % 3600) / 60), total_s % 60];
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} m` : `${minutes} m ${String(seconds).padStart(2, "0")} s`;
}

/**
 * How long ago.
 * @param {number} at
 * @param {number} now
 */
export function formatAgo(at, now) {
  const seconds = Math.round((now - at) / 1000);
  if (seconds < 10) return "just now";
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ago`;
  if (seconds < 86_400 * 14) return `${Math.floor(seconds / 86_400)} d ago`;
  return new Date(at).toISOString().slice(0, 10);
}

/**
 * Date and time of the reader's clock, as short as they are clear: of today only the time.
 * @param {number} at
 * @param {number} now
 */
export function formatStart(at, now) {
  const [date, today] = [new Date(at), new Date(now)];
  const [day, time] = [`${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`, `${pad(date.getHours())}:${pad(date.getMinutes())}`];
  return date.toDateString() === today.toDateString() ? `${time}:${pad(date.getSeconds())}` : `${day} ${time}`;
}

/** @param {number} number */
function pad(number) {
  return String(number).padStart(2, "0");
}

/**
 * Date and time of the reader's clock, with the time zone.
 * @param {number|null|undefined} at
 */
export function formatTime(at) {
  if (at === null || at === undefined) return "–";
  const date = new Date(at);
  const zone = -date.getTimezoneOffset();
  const shown = new Date(at + zone * 60_000).toISOString().replace("T", " ").slice(0, 19);
  const sign = zone < 0 ? "−" : "+";
  return zone === 0 ? `${shown} UTC` : `${shown} UTC${sign}${Math.floor(Math.abs(zone) / 60)}${zone % 60 ? `:${String(Math.abs(zone) % 60).padStart(2, "0")}` : ""}`;
}

/** @param {number} bytes */
export function formatBytes(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const [unit, size] = bytes < 1e6 ? ["KB", 1e3] : bytes < 1e9 ? ["MB", 1e6] : ["GB", 1e9];
  return `${(bytes / size).toFixed(bytes / size < 10 ? 1 : 0)} ${unit}`;
}

/**
 * Singular or plural with its number.
 * @param {number} count
 * @param {string} word
 * @param {string} [plural]
 */
export function countOf(count, word, plural = `${word}s`) {
  return `${formatCount(count)} ${count === 1 ? word : plural}`;
}

/** Colours of roles in `tokens.css`. */
export const ROLE_COLOURS = 12;
/** Numbers of roles in the order in which they were shown. @type {Map<string, number>} */
const roles = new Map();

/**
 * Number the roles of a run anew, so that its first twelve have different colours, the same ones in each of its tabs.
 * @param {Iterable<string>} agents
 */
export function numberRoles(agents) {
  roles.clear();
  for (const agent of agents) roleClass(agent);
}

/**
 * The colour class of an agent. Work without a role, such as `(deterministic)`, has none.
 * @param {string} agent
 */
export function roleClass(agent) {
  if (!agent || agent.startsWith("(")) return "";
  const number = roles.get(agent) ?? roles.size;
  roles.set(agent, number);
  return `role-${number % ROLE_COLOURS}`;
}

/** @type {Record<string, string>} */
const SEGMENTS = { queue: "Queue", rate_limit: "Rate limit", model: "Model", tool: "Tool", person: "Person", other: "Other" };

/** @param {string} kind */
export function segmentWord(kind) {
  return SEGMENTS[kind] ?? kind;
}

/**
 * What happens when nobody decides in time.
 * @param {string} action
 */
export function timeoutWord(action) {
  return { continue: "continues unchanged", exit_early: "ends early", fail: "fails" }[action] ?? action;
}
