// A live stream of a run that is opened again whenever it breaks, from where it broke (S-WEB-80).
//
// Read with fetch: EventSource cannot send a key.

/** @typedef {import("../types.js").LiveListener} LiveListener */

/** Longest wait before the next try, ms. */
const LONGEST = 30_000;
/** Without a sign of life for so long a connection counts as dead, ms. The server sends one every 15 s. */
const SILENCE = 45_000;

/**
 * Wait before a try: 1, 2, 4 ... 30 s.
 * @param {number} failures one after the other
 */
export function retryDelay(failures) {
  return Math.min(LONGEST, 1000 * 2 ** Math.max(0, failures - 1));
}

/**
 * Cut a stream of server-sent events into events.
 * @param {(event: {event: string, data: string, id: string|null}) => void} onEvent
 * @returns {(chunk: string) => void} takes the text as it comes
 */
export function eventParser(onEvent) {
  let rest = "";
  let [event, id] = ["message", /** @type {string|null} */ (null)];
  /** @type {string[]} */
  let data = [];
  return (chunk) => {
    rest += chunk;
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line === "") {
        if (data.length) onEvent({ event, data: data.join("\n"), id });
        [event, id, data] = ["message", null, []];
        continue;
      }
      const colon = line.indexOf(":");
      if (colon === 0) continue; // a comment: the heartbeat
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "event") event = value;
      else if (field === "data") data.push(value);
      else if (field === "id") id = value;
    }
  };
}

/**
 * Listen until the run ends or the returned function is called.
 * @param {{open: (cursor: number, signal: AbortSignal) => Promise<Response>, cursor: number, listener: LiveListener}} stream
 * @returns {() => void}
 */
export function listen({ open, cursor, listener }) {
  let [isOver, failures] = [false, 0];
  /** @type {AbortController} */
  let connection = new AbortController();
  /** @type {number|undefined} */
  let timer;

  async function connect() {
    timer = undefined;
    connection = new AbortController();
    try {
      const answer = await open(cursor, connection.signal);
      failures = 0;
      listener.onConnection(true, 0);
      await read(answer);
    } catch {
      // whatever broke it, the next try tells whether it lasts
    }
    if (isOver) return;
    failures += 1;
    const delay = retryDelay(failures);
    listener.onConnection(false, delay);
    timer = window.setTimeout(connect, delay);
  }

  /** @param {Response} answer */
  async function read(answer) {
    const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader();
    const decoder = new TextDecoder();
    const parse = eventParser(take);
    while (!isOver) {
      const watch = window.setTimeout(() => connection.abort(), SILENCE);
      const { value, done } = await reader.read().finally(() => window.clearTimeout(watch));
      if (done) return;
      parse(decoder.decode(value, { stream: true }));
    }
  }

  /** @param {{event: string, data: string, id: string|null}} event */
  function take({ event, data, id }) {
    if (isOver) return;
    if (id !== null && /^\d+$/.test(id)) cursor = Number(id);
    if (event === "steps") {
      const news = JSON.parse(data);
      cursor = news.cursor;
      listener.onSteps(news);
    } else if (event === "answer") listener.onAnswer(JSON.parse(data));
    else if (event === "token") listener.onToken(JSON.parse(data));
    else if (event === "end") {
      isOver = true;
      connection.abort();
      listener.onEnd();
    }
  }

  /** The network is back: no need to wait. */
  function hurry() {
    if (isOver || timer === undefined) return; // it is connected, or just trying
    window.clearTimeout(timer);
    void connect();
  }

  window.addEventListener("online", hurry);
  void connect();
  return () => {
    isOver = true;
    window.clearTimeout(timer);
    window.removeEventListener("online", hurry);
    connection.abort();
  };
}
