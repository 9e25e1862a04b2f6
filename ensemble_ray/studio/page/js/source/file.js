// Data of one run from the file that the page itself is, or from a file that was dropped on it. Asks nobody anything.

/** @typedef {import("../types.js").Source} Source */
/** @typedef {import("../types.js").RunDetail} RunDetail */
/** @typedef {import("../types.js").Step} Step */
/** @typedef {import("../types.js").StepDetail} StepDetail */
/** @typedef {import("../types.js").Flow} Flow */
/** @typedef {import("../types.js").Actors} Actors */
/** @typedef {import("../types.js").StudioInfo} StudioInfo */

/**
 * What a file holds; a drawing before any run has neither times nor details.
 * @typedef {object} RunFile
 * @property {string} version
 * @property {number} exported_at
 * @property {StudioInfo} info
 * @property {RunDetail} run
 * @property {Step[]} steps
 * @property {Record<string, StepDetail>} details
 * @property {{declared: Flow|null, ran: Flow|null}} flows
 * @property {Actors|null} actors
 */

/** Begins the id of a run that is a file of the server's folder: no other id has a colon. */
export const FILE_PREFIX = "file:";

/** @param {string} run */
export function isFileRun(run) {
  return run.startsWith(FILE_PREFIX);
}

/** @returns {RunFile|null} */
export function embeddedRun() {
  const data = document.getElementById("run-data");
  return data ? JSON.parse(data.textContent ?? "") : null;
}

/**
 * @param {RunFile} file
 * @returns {Source}
 */
export function fileSource(file) {
  const { run, steps, details, flows } = file;
  const refuse = async () => {
    throw new Error("This page is a file: actions are not available");
  };
  return {
    isFile: true,
    info: async () => ({ ...file.info, actions: [], has_actors: file.actors !== null, has_files: false, has_teams: false, has_schedules: false }),
    runs: async () => ({ runs: [run], next_cursor: null, total_known: 1, counts: { [run.status]: 1 } }),
    run: async () => run,
    steps: async () => ({ steps, cursor: run.cursor }),
    live: () => () => undefined,
    async step(_run, id) {
      const detail = details[id];
      const step = steps.find((one) => one.id === id);
      if (!detail && !step) throw new Error(`The file has no step ${id}`);
      return detail ?? withoutDetail(/** @type {Step} */ (step));
    },
    async text(_run, id, field) {
      const value = /** @type {Record<string, unknown>|undefined} */ (/** @type {unknown} */ (details[id]))?.[field];
      return typeof value === "string" ? value : JSON.stringify(value, null, 2);
    },
    attachment: async () => {
      throw new Error("The file does not contain attachments");
    },
    async flow(_run, as) {
      const flow = (as === "declared" ? flows.declared : flows.ran) ?? flows.ran ?? flows.declared;
      if (!flow) throw new Error("The file has no graph");
      return flow;
    },
    actors: async () => file.actors ?? { nodes: [], limiters: [], breakers: [], clusters: [], note: "The file contains no processes" },
    reviews: async () => [],
    decide: refuse,
    resumePreview: refuse,
    forkPreview: refuse,
    cancel: refuse,
    remove: refuse,
    resume: refuse,
    fork: refuse,
    compare: refuse,
    series: async () => ({ first: 1, runs: [run] }),
    trends: refuse,
    evaluations: refuse,
    evaluation: refuse,
    schedules: async () => [],
    controlSchedule: refuse,
    usage: refuse,
    reveal: refuse,
    files: refuse,
    endpoint: refuse,
    file: refuse,
    exported: async () => new Blob([JSON.stringify(file, null, 2)], { type: "application/json" }),
  };
}

/**
 * @param {Step} step
 * @returns {StepDetail}
 */
export function withoutDetail(step) {
  return {
    ...step, prompt: [], answers: [], tools_offered: [], tool_calls: [], output: null, structured_output: null, guardrails: [], constraints: [],
    context_cuts: [], directives: [], reviews: [], failure: null, fork_spec: null, cut: {},
  };
}
