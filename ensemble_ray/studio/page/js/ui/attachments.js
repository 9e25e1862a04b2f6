// Pictures, audio and files of a run. Contents are loaded one after the other, with the key of the page, and shown as data.

import { fill, h, icon } from "../dom.js";
import { formatBytes } from "../format.js";
import { oneLine } from "../text.js";
import { line, messageOf, toast } from "./parts.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").AttachmentInfo} AttachmentInfo */

/** Types that the server sends as what they are. All others are downloads. */
const PICTURES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp"]);
/** Larger pictures are loaded on request, bytes. */
const LARGE = 20_000_000;
/** Contents that stay in memory, so that a panel that is drawn again shows them at once. */
const KEPT = 24;
/** @type {Map<string, string>} */
const kept = new Map();
/** The load before. @type {Promise<unknown>} */
let last = Promise.resolve();

/** @param {Blob} blob @returns {Promise<string>} */
function asData(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/**
 * The content as a `data:` address, if the server says that it is of that kind.
 * @param {App} app
 * @param {string} run
 * @param {AttachmentInfo} attachment
 */
function load(app, run, attachment) {
  const key = `${run} ${attachment.sha256}`;
  const found = last.then(async () => {
    const known = kept.get(key);
    if (known) return known;
    const blob = await app.source.attachment(run, attachment.sha256);
    if (!blob.type.startsWith(`${attachment.kind}/`)) throw new Error(`its content is no ${attachment.kind} that a page may show`);
    const data = await asData(blob);
    kept.set(key, data);
    if (kept.size > KEPT) kept.delete(/** @type {string} */ (kept.keys().next().value));
    return data;
  });
  last = found.catch(() => undefined);
  return found;
}

/**
 * @param {App} app
 * @param {string} run
 * @param {AttachmentInfo} attachment
 */
async function download(app, run, attachment) {
  try {
    const address = URL.createObjectURL(await app.source.attachment(run, attachment.sha256));
    h("a", { href: address, download: oneLine(attachment.name, 120) || attachment.kind }).click();
    window.setTimeout(() => URL.revokeObjectURL(address), 60_000);
  } catch (error) {
    toast(messageOf(error), true);
  }
}

/**
 * @param {App} app
 * @param {string} run
 * @param {AttachmentInfo[]} attachments
 */
export function attachmentList(app, run, attachments) {
  return h("ul", { class: "attachments" }, attachments.map((each) => attachmentOf(app, run, each)));
}

/**
 * @param {App} app
 * @param {string} run
 * @param {AttachmentInfo} attachment
 */
function attachmentOf(app, run, attachment) {
  const isPicture = attachment.kind === "image" && PICTURES.has(attachment.media_type);
  const isShown = !app.source.isFile && (isPicture || attachment.kind === "audio");
  const size = formatBytes(attachment.size_bytes);
  const name = oneLine(attachment.name, 120);
  const place = h("div", { class: "shown" });
  const show = async () => {
    try {
      const src = await load(app, run, attachment);
      fill(place, isPicture ? h("img", { src, alt: name }) : h("audio", { src, controls: true, "aria-label": name }));
    } catch (error) {
      fill(place, h("p", { class: "muted note" }, `Not shown: ${messageOf(error)}`));
    }
  };
  if (isShown && isPicture && attachment.size_bytes <= LARGE) whenVisible(place, () => void show());
  else if (isShown) fill(place, h("button", { class: "button small", type: "button", onclick: () => void show() }, icon("play"), isPicture ? "Show" : "Load the player"));
  return h("li", { class: `attachment ${attachment.kind}` },
    isShown && place,
    h("div", { class: "row" }, line(attachment.name, "clip grow", 120), h("span", { class: "muted num" }, [attachment.media_type, size].filter(Boolean).map((word) => oneLine(word, 60)).join(" · ")),
      !app.source.isFile && h("button", { class: "icon-button", type: "button", title: `Download ${name}`, "aria-label": `Download ${name}`, onclick: () => void download(app, run, attachment) }, icon("export"))));
}

/**
 * @param {Element} element
 * @param {() => void} act
 */
function whenVisible(element, act) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    act();
  });
  observer.observe(element);
}
