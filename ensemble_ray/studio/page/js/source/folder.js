// Files of the server's folder as runs (S-VIZ-70): the run `file:NAME` is what the file NAME holds; all others are the server's.

import { readFile } from "./dropped.js";
import { FILE_PREFIX, fileSource, isFileRun } from "./file.js";

/** @typedef {import("../types.js").Source} Source */

/**
 * The run that stands for a file of the folder.
 * @param {string} name
 */
export function fileRun(name) {
  return FILE_PREFIX + name;
}

/**
 * A source that has the files of the server's folder, too.
 * @param {Source} server
 * @returns {Source}
 */
export function withFolder(server) {
  /** The file that was opened last: its views ask for its parts one by one. @type {{id: string, source: Source}|null} */
  let opened = null;

  /** @param {string} id */
  async function open(id) {
    const name = id.slice(FILE_PREFIX.length);
    const file = readFile(name, await server.file(name));
    opened = { id, source: fileSource({ ...file, run: { ...file.run, run_id: id, is_live: false, forks: [], forked_from: null } }) };
    return opened.source;
  }

  /** @param {string} id */
  async function sourceOf(id) {
    if (!isFileRun(id)) return server;
    return opened?.id === id ? opened.source : open(id);
  }

  return {
    ...server,
    run: async (run) => (isFileRun(run) ? (await open(run)).run(run) : server.run(run)), // read anew, since it may have changed
    steps: async (run, after) => (await sourceOf(run)).steps(run, after),
    live: (run, after, listener) => (isFileRun(run) ? () => undefined : server.live(run, after, listener)),
    step: async (run, step) => (await sourceOf(run)).step(run, step),
    text: async (run, step, field) => (await sourceOf(run)).text(run, step, field),
    attachment: async (run, digest) => (await sourceOf(run)).attachment(run, digest),
    flow: async (run, as) => (await sourceOf(run)).flow(run, as),
    exported: async (run, format) => (await sourceOf(run)).exported(run, format),
  };
}
