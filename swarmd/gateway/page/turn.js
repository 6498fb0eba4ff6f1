// One turn of a conversation, drawn: files, thoughts, text, calls of tools, and what can be done with it.

import { button, h } from "./dom.js";
import { code, markdown } from "./markdown.js";

const NAMES = { user: "You" };

// ``acts``: edit, again, goOn, answerCall, showBranch, each of a turn's place. ``at``: {place, branches, isLast, model,
// results}: what came of calls, and whether those of this turn still wait for it (isLast).
export function drawTurn(turn, at, acts) {
  const said = h("div", { class: "said" }), told = h("p", { class: "dim told" });
  const element = h("article", { class: `turn ${turn.role}` },
    h("p", { class: "who" }, turn.role === "tool" ? `Result of ${turn.name}` : NAMES[turn.role] ?? (turn.model || at.model)), said, told, actions(turn, at, acts));
  fill(said, turn, at.results, at.isLast && acts);
  tell(told, turn);
  return { element, said, told };
}

// What is said in it, anew: while an answer grows, nothing else of it is drawn again.
export function fill(said, turn, results = new Map(), acts = null) {
  const isOpen = said.querySelector("details.thought")?.open;
  const shown = turn.role === "user" || turn.role === "tool" ? h("div", { class: "plain" }, turn.text) : markdown(turn.text);
  const parts = [
    turn.files.map((file) => h("details", { class: "file" }, h("summary", {}, `${file.name}, ${file.text.length} characters`), code(file.text))),
    turn.thoughts && h("details", { class: "thought", open: isOpen }, h("summary", {}, turn.text ? "Thoughts" : "Thinking ..."),
      h("div", { class: "thoughts" }, turn.thoughts)),
    shown,
    turn.calls.map((call) => drawCall(call, results.get(call.id), acts)),
  ].flat(Infinity).filter(Boolean);
  said.replaceChildren(...parts);
}

export function tell(told, { told: text, kind }) {
  told.textContent = text;
  told.className = `dim told ${kind}`;
}

function drawCall(call, result, acts) {
  const field = h("textarea", { "aria-label": `Result of ${call.name}`, placeholder: "What came of it, or what went wrong",
    oninput: () => (call.draft = field.value) }, call.draft ?? "");
  let shown = call.text;
  try {
    shown = JSON.stringify(JSON.parse(call.text), null, 2);
  } catch { // shown as it is
  }
  return h("div", { class: "call" }, h("p", {}, "Calls ", h("code", {}, call.name)), code(shown, "json"),
    result == null && acts && h("div", { class: "row" }, field, button("Send result", () => acts.answerCall(call, field.value))));
}

function actions(turn, at, acts) {
  const { place, branches } = at;
  const here = branches.indexOf(place);
  const step = (text, label, other) => button(text, () => acts.showBranch(branches[other]),
    { "aria-label": label, class: "quiet", disabled: branches[other] == null });
  const canCopy = turn.text && navigator.clipboard;
  return h("div", { class: "row acts" },
    branches.length > 1 && [step("‹", "The branch before", here - 1), h("span", { class: "dim" }, `${here + 1} of ${branches.length}`),
      step("›", "The next branch", here + 1)],
    canCopy && button("Copy", (event) => {
      navigator.clipboard.writeText(turn.text);
      event.target.textContent = "Copied";
    }, { class: "quiet" }),
    turn.role === "user" && button("Edit", () => acts.edit(place), { class: "quiet" }),
    turn.role === "assistant" && button("Retry", () => acts.again(place), { class: "quiet" }),
    turn.role === "assistant" && at.isLast && turn.isCut && button("Go on", () => acts.goOn(place), { class: "quiet" }));
}
