// What may be done with a run, each after a dialog that says what will happen.

import { fill, h, icon } from "../dom.js";
import { countOf, runLine, runName } from "../format.js";
import { formatRoute } from "../router.js";
import { copyText, line, messageOf, openDialog, statusPill, textBlock, toast } from "./parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").RunPreview} RunPreview */
/** @typedef {import("../types.js").RunRow} RunRow */
/** @typedef {import("../model/run.js").RunModel} RunModel */

/** Steps that are named in a preview before there is only their number. */
const NAMED = 50;

/**
 * @param {HTMLButtonElement} button
 * @param {() => Promise<void>} act
 */
export async function during(button, act) {
  button.disabled = true;
  try {
    await act();
  } catch (error) {
    toast(messageOf(error), true);
  } finally {
    button.disabled = false;
  }
}

/**
 * @param {string} title
 * @param {string} symbol
 * @param {{step: string, title: string}[]} steps
 * @param {boolean} isOpen
 */
function stepList(title, symbol, steps, isOpen) {
  if (!steps.length) return null;
  return h("details", { class: "preview", open: isOpen }, h("summary", {}, icon(symbol), title),
    h("ul", {}, steps.slice(0, NAMED).map((one) => h("li", {}, h("code", {}, one.step), " ", line(one.title, "muted", 100))), steps.length > NAMED && h("li", { class: "muted" }, `and ${steps.length - NAMED} more`)));
}

/** @param {RunPreview} preview */
function previewBody(preview) {
  const { reused, asked_again: again, unknown_effects: unknown, blocked } = preview;
  return h("div", { class: "previews" },
    blocked !== null && h("div", { class: "banner bad" }, icon("failed"), h("div", { class: "grow" }, line(blocked, "", 800))),
    unknown.length > 0 && h("div", { class: "banner" }, icon("interrupted"), h("div", { class: "grow" }, h("strong", {}, `The outcome of ${countOf(unknown.length, "call")} is unknown. `), "Check them first: the run may repeat them.")),
    unknown.map((call) => h("details", { class: "preview" }, h("summary", {}, h("code", {}, `${call.step} · ${call.tool}`)), textBlock(call.arguments, { label: "Arguments" }))),
    stepList(`${countOf(again.length, "step")} will be repeated or finished`, "running", again, true),
    stepList(`${countOf(reused.length, "step")} are reused from the record, without cost`, "completed", reused, false),
    !again.length && !blocked && h("p", { class: "muted" }, "No step is repeated."));
}

/**
 * @param {App} app
 * @param {RunModel} model
 */
export function cancelRun(app, model) {
  const running = [...model.steps.values()].filter((step) => step.status === "running").length;
  const button = h("button", { class: "button danger solid", type: "button", onclick: () => during(button, async () => {
    await app.source.cancel(model.run.run_id);
    dialog.close();
    toast("The run is ending");
  }) }, "End run");
  const dialog = openDialog({
    title: "End this run?",
    body: [h("p", {}, `${running ? `${countOf(running, "step")} in progress ${running === 1 ? "is" : "are"} cancelled, and no new step starts.` : "No new step starts."} The record stays, and you can continue the run later.`)],
    buttons: [h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Keep it running"), button],
  });
}

/**
 * @param {App} app
 * @param {RunModel} model
 */
export async function resumeRun(app, model) {
  const body = h("div", {}, h("p", { class: "muted" }, "Loading the preview…"));
  const button = h("button", { class: "button primary", type: "button", disabled: true, onclick: () => during(button, async () => {
    await app.source.resume(model.run.run_id);
    dialog.close();
    toast("The run continues");
    await model.refresh();
  }) }, icon("play"), "Continue");
  const dialog = openDialog({ title: "Continue this run", body: [body], buttons: [h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Close"), button] });
  try {
    const preview = await app.source.resumePreview(model.run.run_id);
    fill(body, previewBody(preview));
    button.disabled = preview.blocked !== null;
  } catch (error) {
    fill(body, h("div", { class: "banner bad" }, icon("failed"), messageOf(error)));
  }
}

/**
 * @param {App} app
 * @param {RunModel} model
 * @param {string|null} spec the step to fork from; null: it is asked for
 */
export async function forkRun(app, model, spec) {
  const body = h("div", { "aria-live": "polite" }, h("p", { class: "muted" }, "Enter the step to repeat. All steps that depend on it are repeated too."));
  const from = h("input", { class: "field grow", id: "fork-from", list: "fork-steps", spellcheck: "false", autocomplete: "off", value: spec ?? "", placeholder: "writer" });
  const options = [...new Set([...model.steps.values()].slice(0, 500).map((step) => step.id.replace(/#0$/, "")))];
  const name = h("input", { class: "field grow", id: "fork-name", spellcheck: "false", autocomplete: "off", placeholder: "generated" });
  let looked = "";
  async function look() {
    const wanted = from.value.trim();
    if (!wanted || wanted === looked) return;
    looked = wanted;
    button.disabled = true;
    fill(body, h("p", { class: "muted" }, "Loading the preview…"));
    try {
      const preview = await app.source.forkPreview(model.run.run_id, wanted);
      if (wanted !== looked) return;
      fill(body, previewBody(preview));
      button.disabled = preview.blocked !== null;
    } catch (error) {
      if (wanted === looked) fill(body, h("div", { class: "banner bad" }, icon("failed"), messageOf(error)));
    }
  }
  const button = h("button", { class: "button primary", type: "button", disabled: true, onclick: () => during(button, async () => {
    const run = await app.source.fork(model.run.run_id, from.value.trim(), name.value.trim() || null);
    dialog.close();
    toast(`Fork ${run} started`);
    window.location.hash = formatRoute({ view: "run", run });
  }) }, icon("fork"), "Fork");
  from.addEventListener("change", () => void look());
  const dialog = openDialog({
    title: "Fork this run",
    body: [
      h("p", { class: "muted" }, "A fork is a new run. It reuses the steps before a step from the record of this run. This run does not change."),
      h("div", { class: "form" }, h("label", { for: "fork-from" }, "From step"), from, h("label", { for: "fork-name" }, "Its id"), name, h("datalist", { id: "fork-steps" }, options.map((option) => h("option", { value: option })))),
      body,
    ],
    buttons: [h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Close"), button],
  });
  if (spec) await look();
  else from.focus();
}

const RETRIES = {
  resume: "Resume the run: it repeats the failed items and does the rest. Recorded results are reused.",
  fork: "Fork the run: the new run repeats the failed items and the steps that depend on them. All other results are reused from the record.",
  run: "Start a new run over these items: a resume does not repeat items that were left out.",
};

/**
 * Show how to repeat failed items of a map-reduce, and offer to do it where the page may.
 * @param {App} app
 * @param {RunModel} model
 * @param {import("../model/items.js").Item[]} failed
 */
export function retryItems(app, model, failed) {
  const retry = model.run.item_retry;
  if (!retry) return;
  const command = retry.command.replace("INDICES", `[${failed.map((item) => item.number).sort((a, b) => a - b).join(", ")}]`);
  const { action, step } = retry;
  const act = action === "resume" ? () => resumeRun(app, model) : () => forkRun(app, model, step);
  const isOffered = action !== "run" && retry.is_shell && !model.isFile && app.info.actions.includes(action);
  const dialog = openDialog({
    title: `Retry ${countOf(failed.length, "failed item")}`,
    body: [
      h("p", {}, RETRIES[action], action !== "run" && model.run.counts.failed !== failed.length ? " This repeats all failed items of the run, not only those that are listed here." : ""),
      h("p", { class: "muted" }, !retry.is_shell ? "In the program that started the run:" : command.includes("DEAD_LETTERS") ? "In a shell. DEAD_LETTERS is the file to which the team writes its failed items:" : "In a shell:"),
      textBlock(command, { label: "Command" }),
      h("details", { class: "preview" }, h("summary", {}, icon("failed"), countOf(failed.length, "item")),
        h("ul", {}, failed.slice(0, NAMED).map((item) => h("li", {}, h("code", {}, `#${item.number}`), " ", line(item.title, "", 80), " ", line(item.error, "muted", 120))), failed.length > NAMED && h("li", { class: "muted" }, `and ${failed.length - NAMED} more`))),
    ],
    buttons: [
      h("button", { class: "button", type: "button", onclick: () => void copyText(command) }, icon("copy"), "Copy"),
      ...(isOffered ? [h("button", { class: "button primary", type: "button", onclick: () => {
        dialog.close();
        void act();
      } }, icon(action === "resume" ? "play" : "fork"), action === "resume" ? "Resume…" : "Fork…")] : []),
    ],
  });
}

/**
 * Which runs an action is about.
 * @param {RunRow[]} rows
 * @param {(row: RunRow) => HTMLElement|null} [more]
 */
function runList(rows, more = () => null) {
  return h("ul", { class: "run-list" }, rows.map((row) => h("li", {}, h("div", { class: "row" }, statusPill(row.status), line(runName(row), "run-name clip", 80), h("span", { class: "run-id mono clip" }, row.run_id)), line(runLine(row), "muted clip", 200), more(row))));
}

/**
 * Do one thing with several runs, one after the other; those that were refused are named.
 * @param {RunRow[]} rows
 * @param {(run: string) => Promise<unknown>} act
 * @param {string} done such as `deleted`
 */
async function forEach(rows, act, done) {
  const refused = [];
  for (const row of rows) {
    try {
      await act(row.run_id);
    } catch (error) {
      refused.push(`${row.run_id}: ${messageOf(error)}`);
    }
  }
  if (refused.length < rows.length) toast(`${countOf(rows.length - refused.length, "run")} ${done}`);
  for (const text of refused.slice(0, 3)) toast(text, true);
}

/**
 * A dialog about several runs.
 * @param {{title: string, text: string, rows: RunRow[], keep: string, word: string, act: () => Promise<void>}} what
 */
function confirmRuns({ title, text, rows, keep, word, act }) {
  const button = h("button", { class: "button danger solid", type: "button", onclick: () => during(button, async () => {
    await act();
    dialog.close();
  }) }, word);
  const dialog = openDialog({ title, body: [h("p", {}, text), runList(rows)], buttons: [h("button", { class: "button", type: "button", onclick: () => dialog.close() }, keep), button] });
}

/**
 * @param {App} app
 * @param {RunRow[]} rows
 * @param {() => void} done
 */
export function cancelRuns(app, rows, done) {
  confirmRuns({
    title: `End ${countOf(rows.length, "run")}?`, text: "Steps in progress are cancelled, and no new step starts. The records stay, and you can continue the runs later.", rows, keep: "Keep running", word: `End ${countOf(rows.length, "run")}`,
    async act() {
      await forEach(rows, app.source.cancel, "will end");
      done();
    },
  });
}

/**
 * @param {App} app
 * @param {RunRow[]} rows
 * @param {() => void} done
 */
export function deleteRuns(app, rows, done) {
  const waiting = rows.filter((row) => row.open_reviews).length;
  confirmRuns({
    title: `Delete ${countOf(rows.length, "run")}?`, text: `The ${rows.length === 1 ? "record is" : "records are"} removed permanently, with all outputs. ${waiting ? `${countOf(waiting, "run")} ${waiting === 1 ? "waits" : "wait"} for a review. ` : ""}Export what you still need.`, rows, keep: "Keep", word: `Delete ${countOf(rows.length, "run")}`,
    async act() {
      await forEach(rows, app.source.remove, "deleted");
      done();
    },
  });
}

/**
 * Resume several runs, after a preview of each.
 * @param {App} app
 * @param {RunRow[]} rows
 * @param {() => void} done
 */
export async function resumeRuns(app, rows, done) {
  /** @type {Map<string, HTMLElement>} */
  const bodies = new Map(rows.map((row) => [row.run_id, h("div", {}, h("p", { class: "muted" }, "Loading the preview…"))]));
  /** @type {RunRow[]} */
  const possible = [];
  const button = h("button", { class: "button primary", type: "button", disabled: true, onclick: () => during(button, async () => {
    await forEach(possible, app.source.resume, "continued");
    dialog.close();
    done();
  }) }, icon("play"), "Continue");
  const dialog = openDialog({ title: `Continue ${countOf(rows.length, "run")}`, body: [runList(rows, (row) => bodies.get(row.run_id) ?? null)], buttons: [h("button", { class: "button", type: "button", onclick: () => dialog.close() }, "Close"), button] });
  for (const row of rows) {
    const body = /** @type {HTMLElement} */ (bodies.get(row.run_id));
    try {
      const preview = await app.source.resumePreview(row.run_id);
      fill(body, previewBody(preview));
      if (preview.blocked === null) possible.push(row);
    } catch (error) {
      fill(body, h("div", { class: "banner bad" }, icon("failed"), messageOf(error)));
    }
  }
  fill(button, icon("play"), `Continue ${countOf(possible.length, "run")}`);
  button.disabled = possible.length === 0;
}

/**
 * @param {App} app
 * @param {string} run
 * @param {string} format
 */
export async function exportRun(app, run, format) {
  try {
    const address = URL.createObjectURL(await app.source.exported(run, format));
    h("a", { href: address, download: `${run}.${format}` }).click();
    window.setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (error) {
    toast(messageOf(error), true);
  }
}
