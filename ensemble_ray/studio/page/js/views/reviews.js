// Gates that wait for a person, over all runs: one is shown at a time, and decided there (S-WEB-81).

import { fill, h, icon, syncChildren } from "../dom.js";
import { countOf, formatAgo, formatDuration, formatTime, timeoutWord } from "../format.js";
import { stepLink } from "../router.js";
import { visible } from "../text.js";
import { diffBlock, emptyState, failureState, line, messageOf, staleNotice, statusPill, textBlock, toast } from "../ui/parts.js";
import { RequestError } from "../source/http.js";

/** @typedef {import("../types.js").App} App */
/** @typedef {import("../types.js").Route} Route */
/** @typedef {import("../types.js").Review} Review */
/** @typedef {import("../types.js").View} View */

const EVERY = 2500;
const TIMINGS = /** @type {Record<string, string>} */ ({ before_execution: "Before the task", during_execution: "Asked by the model", after_execution: "After the task" });

/**
 * What the run is about, unless that is the task itself.
 * @param {Review} review
 */
const subjectOf = (review) => (review.subject === review.task_description ? "" : review.subject ?? "");

/** @param {Review} review */
const keyOf = (review) => `${review.run_id}/${review.gate_id}`;

/**
 * What happens when, unless somebody decides.
 * @param {Review} review
 * @param {number} now
 */
export function countdown(review, now) {
  if (review.expires_at === null) return "No timeout";
  const left = review.expires_at - now;
  return left > 0 ? `${timeoutWord(review.on_timeout)[0]?.toUpperCase()}${timeoutWord(review.on_timeout).slice(1)} in ${formatDuration(Math.ceil(left / 1000) * 1000)}` : `Timed out: it ${timeoutWord(review.on_timeout)}`;
}

/**
 * Who decided what, and when.
 * @param {Review} review
 */
function decided(review) {
  const word = { approve: "Approved", edit: "Edited", exit: "Run ended" }[review.decision ?? ""] ?? review.decision ?? "";
  const by = review.timed_out ? "by its time limit" : review.decided_by ? `by ${visible(review.decided_by)}${review.decided_role ? ` (${visible(review.decided_role)})` : ""}` : "";
  return [word, by, review.decided_at === null ? "" : `at ${formatTime(review.decided_at)}`].filter(Boolean).join(" ");
}

/**
 * A gate in the panel of its step: decided, or with a way to where it is decided.
 * @param {App} app
 * @param {Review} review
 */
export function reviewCard(app, review) {
  const isOpen = review.decision === null;
  return h("div", { class: "verdict" }, statusPill(isOpen ? "waiting" : review.decision === "exit" ? "exited" : "completed"),
    h("div", { class: "grow" }, h("div", {}, isOpen ? countdown(review, Date.now()) : decided(review)), review.comment ? line(review.comment, "muted", 400) : null, review.decision === "edit" && review.text !== null ? diffBlock(review.task_output, review.text, "Edit") : null),
    isOpen && review.decidable && h("button", { class: "button small", type: "button", onclick: () => app.go({ view: "reviews", run: "", params: { run: review.run_id, gate: review.gate_id } }) }, "Decide"));
}

/**
 * @param {App} app
 * @param {Route} route
 * @returns {View}
 */
export function reviewsView(app, route) {
  let params = route.params;
  /** @type {Review[]} */
  let reviews = [];
  let isLoaded = false;
  /** The gate that the form is about. */
  let formKey = "";
  /** @type {((decision: string) => void)|null} */
  let act = null;
  /** What this page decided, until the server no longer lists it. @type {Set<string>} */
  const done = new Set();

  const list = h("div", { class: "inbox-list", role: "listbox", "aria-label": "Open reviews", tabindex: 0 });
  const detail = h("section", { class: "inbox-detail", "aria-label": "Review" });
  const inbox = h("div", { class: "inbox" }, list, detail);
  const notice = staleNotice();
  const element = h("div", { class: "inbox-page" }, notice.element, inbox);

  /** @returns {Review|null} */
  function chosen() {
    const wanted = reviews.find((review) => review.gate_id === params.get("gate") && (!params.get("run") || review.run_id === params.get("run")));
    return wanted ?? reviews[0] ?? null;
  }

  /** @param {Review} review */
  function choose(review) {
    app.go({ params: { run: review.run_id, gate: review.gate_id } }, true);
  }

  /** @param {number} by */
  function move(by) {
    const now = chosen();
    const next = reviews[Math.max(0, Math.min(reviews.length - 1, (now ? reviews.indexOf(now) : 0) + by))];
    if (next) choose(next);
  }

  /** @param {Review} review */
  function make(review) {
    const row = h("div", { class: "inbox-row", role: "option", id: `review-${keyOf(review)}`, onclick: () => choose(/** @type {Review} */ (reviews.find((one) => keyOf(one) === keyOf(review)) ?? review)) });
    update(row, review);
    return row;
  }

  /**
   * @param {HTMLElement} row
   * @param {Review} review
   */
  function update(row, review) {
    const now = Date.now();
    const isChosen = review === chosen();
    row.setAttribute("aria-selected", String(isChosen));
    const left = review.expires_at === null ? null : review.expires_at - now;
    fill(row,
      h("div", { class: "row" }, line(review.ensemble || "Unnamed team", "inbox-team", 60), line(subjectOf(review), "muted clip", 120), h("span", { class: "grow" }), h("span", { class: "muted num" }, formatAgo(review.created_at, now))),
      line(review.task_description, "clip", 120),
      h("div", { class: "row muted" }, h("span", { class: "clip" }, TIMINGS[review.timing] ?? review.timing, " · ", h("code", {}, review.run_id)), h("span", { class: "grow" }), left !== null && h("span", { class: left < 60_000 ? "num soon" : "num" }, formatDuration(Math.max(0, Math.ceil(left / 1000) * 1000)))));
  }

  function draw() {
    const now = chosen();
    app.setTitle(now ? ["Review", now.ensemble || "Unnamed team", now.subject || now.task_description].filter(Boolean).join(" · ") : "Reviews");
    inbox.classList.toggle("nothing", reviews.length === 0);
    syncChildren(list, reviews, keyOf, make, update);
    list.setAttribute("aria-activedescendant", now ? `review-${keyOf(now)}` : "");
    if (!now) {
      formKey = "";
      act = null;
      if (isLoaded) fill(detail, emptyState({ symbol: "inbox", title: "No open reviews", text: "Open reviews of all runs appear here. Request one in a task:", command: 'Task(..., review=Review.required("Is this right?"))' }));
      return;
    }
    if (formKey !== keyOf(now)) {
      formKey = keyOf(now);
      buildForm(now);
    }
    const clock = detail.querySelector("[data-countdown]");
    if (clock) {
      clock.textContent = countdown(now, Date.now());
      clock.classList.toggle("soon", now.expires_at !== null && now.expires_at - Date.now() < 60_000);
    }
    const others = detail.querySelector("[data-others]");
    if (others) others.textContent = reviews.length > 1 ? `${countOf(reviews.length - 1, "more review")} ${reviews.length === 2 ? "waits" : "wait"}` : "";
  }

  /** @param {Review} review */
  function buildForm(review) {
    const mayDecide = review.decidable && app.info.actions.includes("decide");
    const field = h("textarea", { id: "edited", rows: 12, dir: "auto", "aria-label": "Your text", value: review.task_output, oninput: () => drawDiff() });
    const changes = h("div", { "aria-live": "off" });
    const editor = h("div", { class: "editor", hidden: true }, h("div", {}, h("h3", {}, "Your text"), field), h("div", {}, h("h3", {}, "What changes"), changes));
    const output = h("div", {}, h("h3", {}, review.timing === "before_execution" ? "Input" : "Output"), review.task_output ? textBlock(review.task_output, { prose: true, label: "Output" }) : h("p", { class: "muted" }, "No text yet."));
    const comment = h("input", { class: "field grow", placeholder: "Comment, recorded with the decision", "aria-label": "Comment" });
    const role = review.required_role;
    const roles = app.info.roles ?? null; // of the reader's key; without a key the reader confirms the role
    const hasRole = h("input", { type: "checkbox", onchange: () => enable() });
    const approve = h("button", { class: "button primary", type: "button", title: "y", onclick: () => void send("approve") }, icon("completed"), "Approve");
    const edit = h("button", { class: "button", type: "button", title: "d", "aria-expanded": "false", onclick: () => openEditor(editor.hidden) }, "Edit…");
    const save = h("button", { class: "button primary", type: "button", hidden: true, onclick: () => void send("edit") }, icon("completed"), "Use this text");
    const exit = h("button", { class: "button danger", type: "button", title: "x", onclick: () => confirmExit() }, icon("exited"), "End run");
    const sure = h("button", { class: "button danger solid", type: "button", hidden: true, onclick: () => void send("exit") }, "Yes, end it here");
    const buttons = [approve, edit, save, exit, sure];
    let typing = 0;

    function enable() {
      const isAllowed = mayDecide && (role === null || (roles === null ? hasRole.checked : roles.includes(role)));
      for (const button of buttons) button.disabled = !isAllowed;
    }
    function drawDiff() {
      window.clearTimeout(typing);
      typing = window.setTimeout(() => fill(changes, field.value === review.task_output ? h("p", { class: "muted" }, "Nothing yet.") : diffBlock(review.task_output, field.value)), 120);
    }
    /** @param {boolean} isOpen */
    function openEditor(isOpen) {
      if (edit.disabled) return;
      editor.hidden = !isOpen;
      output.hidden = isOpen;
      save.hidden = !isOpen;
      approve.hidden = isOpen;
      edit.textContent = isOpen ? "Do not edit" : "Edit…";
      edit.setAttribute("aria-expanded", String(isOpen));
      if (isOpen) {
        drawDiff();
        field.focus();
      }
    }
    function confirmExit() {
      if (exit.disabled) return;
      sure.hidden = !sure.hidden;
      if (!sure.hidden) sure.focus();
    }
    /** @param {string} decision */
    async function send(decision) {
      for (const button of buttons) button.disabled = true;
      try {
        await app.source.decide(review, { decision, ...(decision === "edit" ? { text: field.value } : {}), ...(comment.value ? { comment: comment.value } : {}), ...(role !== null && roles === null ? { role } : {}) });
        toast({ approve: "Approved", edit: "Replaced by your text", exit: "The run ends with its finished steps" }[decision] ?? "Decided");
      } catch (error) {
        toast(messageOf(error), true);
        if (!(error instanceof RequestError && error.status === 409)) return enable();
      }
      done.add(keyOf(review));
      reviews = reviews.filter((one) => keyOf(one) !== keyOf(review));
      app.go({ params: { run: null, gate: null } }, true);
      app.refreshReviews();
      draw();
    }
    act = (what) => {
      if (what === "approve" && !approve.hidden && !approve.disabled) void send("approve");
      else if (what === "edit") openEditor(editor.hidden);
      else if (what === "exit") confirmExit();
    };
    fill(detail,
      h("div", { class: "inbox-head" }, h("div", { class: "row wrap" }, statusPill("waiting"), h("span", { "data-countdown": "", class: "num" }), h("span", { class: "grow" }), h("span", { "data-others": "", class: "muted" })),
        h("h1", { dir: "auto" }, line(review.task_description, "", 400)),
        h("p", { class: "muted" }, `${TIMINGS[review.timing] ?? review.timing} · `, h("a", { href: stepLink(review.run_id, review.step) }, h("code", {}, review.step)), ` of ${visible([review.ensemble || "Unnamed team", subjectOf(review)].filter(Boolean).join(" · "))} `, h("code", {}, review.run_id))),
      review.prompt && h("div", { class: "banner" }, icon("person"), line(review.prompt, "grow", 1000)),
      output, editor,
      h("div", { class: "decide" },
        role !== null && roles === null && h("label", { class: "check" }, hasRole, h("span", {}, "Needs the role ", h("strong", {}, visible(role)), ": I have it")),
        role !== null && roles !== null && h("p", { class: "muted" }, "Needs the role ", h("strong", {}, visible(role)), roles.includes(role) ? ", which your key has." : `, which your key lacks. Its roles: ${roles.length ? visible(roles.join(", ")) : "none"}.`),
        !mayDecide && h("p", { class: "muted" }, app.info.read_only_reason ?? "The program of this run decides it."),
        mayDecide && comment,
        h("div", { class: "row wrap" }, approve, save, edit, h("span", { class: "grow" }), exit, sure)));
    enable();
  }

  let asked = 0;
  async function load() {
    asked += 1;
    const mine = asked;
    try {
      const found = (await app.source.reviews()).filter((review) => review.decision === null);
      if (mine !== asked) return;
      for (const key of [...done]) if (!found.some((review) => keyOf(review) === key)) done.delete(key);
      reviews = found.filter((review) => !done.has(keyOf(review)));
      isLoaded = true;
      notice.clear();
      draw();
    } catch (error) {
      if (mine !== asked) return;
      if (isLoaded) notice.tell(error);
      else fill(detail, failureState(error, () => void load()));
    }
  }

  list.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    move(event.key === "ArrowDown" ? 1 : -1);
  });
  app.setTitle("Reviews");
  void load();
  const poll = window.setInterval(() => document.hidden || void load(), EVERY);
  const clock = window.setInterval(() => reviews.length && draw(), 1000);
  return {
    element,
    update(now) {
      params = now.params;
      draw();
    },
    close() {
      window.clearInterval(poll);
      window.clearInterval(clock);
    },
    keys: { j: () => move(1), k: () => move(-1), y: () => act?.("approve"), d: () => act?.("edit"), x: () => act?.("exit") },
  };
}
