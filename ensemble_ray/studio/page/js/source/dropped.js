// Files that are dropped on the page: an exported run, a trace, a graph (S-VIZ-70). They are read here, and sent nowhere.

import { fileSource } from "./file.js";
import { dagFile } from "./dag_file.js";
import { traceFile } from "./trace_file.js";
import { messageOf, toast } from "../ui/parts.js";

/** @typedef {import("./file.js").RunFile} RunFile */

/** Files that are larger are surely none of these, bytes. */
const LARGEST = 512 * 1024 * 1024;

/**
 * Tell what a file is by what is in it.
 * @param {string} name
 * @param {string} text
 * @returns {RunFile}
 */
export function readFile(name, text) {
  /** @type {unknown} */
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error(`${name} is no JSON`);
  }
  if (typeof data !== "object" || data === null) throw new Error(`${name} holds no run`);
  const fields = /** @type {Record<string, unknown>} */ (data);
  if (fields.type === "dag") return dagFile(name, fields);
  if (Array.isArray(fields.task_traces)) return traceFile(name, fields);
  if (fields.run && fields.steps && fields.flows) return /** @type {RunFile} */ (data);
  throw new Error(`${name} is neither an exported run nor a trace nor a graph. What to do: drop what 'Export', 'export_trace' or 'export_dag' wrote`);
}

/** @param {(file: RunFile) => void} onFile */
export function acceptDrops(onFile) {
  let depth = 0;
  /** @param {DragEvent} event */
  const isFile = (event) => event.dataTransfer?.types.includes("Files") ?? false;
  document.addEventListener("dragenter", (event) => {
    if (!isFile(event)) return;
    depth += 1;
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => {
    if (!isFile(event)) return;
    depth -= 1;
    if (depth <= 0) document.body.classList.remove("dropping");
  });
  document.addEventListener("dragover", (event) => isFile(event) && event.preventDefault());
  document.addEventListener("drop", async (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    depth = 0;
    document.body.classList.remove("dropping");
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    try {
      if (file.size > LARGEST) throw new Error(`${file.name} is larger than ${LARGEST / 1024 / 1024} MiB`);
      const found = readFile(file.name, await file.text());
      fileSource(found);
      onFile(found);
    } catch (error) {
      toast(messageOf(error), true);
    }
  });
}
