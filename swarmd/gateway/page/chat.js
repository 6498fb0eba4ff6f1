// The chat: conversations that this browser keeps, one of them shown, and answers that grow: one of each at a time.

import { events } from "./api.js";
import { add, areTools, asMarkdown, begin, branches, matches, messages, parse, path, results, show, shown } from "./conversation.js";
import { button, h, number } from "./dom.js";
import { describe, firstThatChats, listModels, trouble } from "./picker.js";
import { isKept, load, loadAll, onOtherTab, remove, save, sayGrowing } from "./store.js";
import { drawTurn, fill, tell } from "./turn.js";

const MOST_FILE = 200_000; // characters of an attached text: about 50,000 tokens
const LOOK_MS = 1000; // at an answer that grows
const ELSEWHERE_MS = 3 * LOOK_MS; // since another tab said that one grows there: it may have been closed
const MOST_GROWING = 3; // a browser has six connections to a gateway, for all its tabs, and one of each is for the news
const SILENT_AFTER_MS = 4000; // without a token: it is said that somebody is waited for
const OPTIONS = ["temperature", "top_p", "max_tokens", "seed"];
const EFFORTS = [["", "as the model does"], ["none", "off"], ["low", "a little"], ["medium", "some"], ["high", "much"]];

let all = []; // conversations, the last one changed first
let now = begin();
const growing = new Map(); // the id of a conversation -> {controller, conversation}, while its answer grows
const elsewhere = new Map(); // the id of a conversation -> when another tab last said that its answer grows there
let isByHand = false; // a model that somebody chose, or asked, is never exchanged for another
let editing = null; // the leaf to go back to
let model = "", view = null, swarm = null;
const drawn = new WeakMap(); // a turn -> what is drawn of it, and of what it was made

export function chat(news) {
  if (!view) {
    view = build();
    redraw();
    showSettings();
    loadAll().then((found) => {
      all = found;
      listConversations();
    });
    onOtherTab(heard);
    addEventListener("pagehide", left);
  }
  view.update = (kind) => {
    if (kind === "machine" || kind === "flows" || !news.swarm) return;
    swarm = news.swarm;
    pick();
  };
  return view;
}

// --- the parts of it -----------------------------------------------------------------------------------------------

function build() {
  const log = h("div", { role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  const text = h("textarea", { id: "question", placeholder: "Ask something", "aria-label": "Your question", onkeydown });
  const models = h("select", { "aria-label": "Model", onchange: () => choose(models.value) });
  const about = h("span", { class: "dim" });
  const send = h("button", { type: "submit", disabled: true }, "Send");
  const stop = button("Stop", () => stopAnswer(), { disabled: true });
  const cancel = button("Cancel", stopEditing, { hidden: true });
  const chosen = h("input", { type: "file", hidden: true, "aria-label": "A text file", onchange: () => attach(chosen) });
  const file = button("Attach", () => chosen.click(), { title: "A text file to ask about" });
  const files = h("div", { class: "row" });
  const note = h("p", { class: "dim", role: "status" });
  const settings = h("details", { class: "settings" }, h("summary", {}, "Settings"));
  const form = h("form", { onsubmit }, files, text, note,
    h("div", { class: "row" }, send, stop, cancel, file, chosen, models, about));
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: listConversations });
  const list = h("ul", { class: "conversations" });
  const exported = h("input", { type: "file", hidden: true, accept: ".json", "aria-label": "An exported conversation", onchange: () => take(exported) });
  const taken = h("p", { role: "alert", class: "bad", hidden: true });
  const aside = h("details", { class: "side", open: innerWidth > 800 }, h("summary", {}, "Conversations"),
    h("div", { class: "row" }, button("New", fresh), button("Import", () => exported.click(), { title: "One that was exported, as JSON" }), exported, search), taken, list);
  const element = h("section", { class: "chat", "aria-label": "Chat" }, aside, h("div", { class: "talk" }, log, h("div", { class: "ask" }, form, settings)));
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.target.matches("[aria-label=Title]")) return;
    if (grows()) stopAnswer();
    else if (editing != null) stopEditing();
  });

  function onkeydown(event) {
    const touches = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touches) {
      event.preventDefault();
      form.requestSubmit();
    }
  }
  function onsubmit(event) {
    event.preventDefault();
    if ((!text.value.trim() && !view.attached.length) || grows() || send.disabled) return;
    isByHand = true;
    add(now, "user", { text: text.value.trim(), files: view.attached });
    text.value = "";
    editing = null;
    showFiles([]);
    answer();
  }
  return { element, log, taken, text, models, about, stop, send, cancel, note, files, settings, search, list, attached: [], cannot: true };
}

function listConversations() {
  if (view.list.contains(document.activeElement) && document.activeElement.matches("input")) return; // a title is written
  const found = all.filter((one) => !view.search.value || matches(one, view.search.value));
  const empty = h("li", { class: "dim" }, all.length ? "None has these words." : isKept ? "What you ask is kept here, in this browser only." : "This browser keeps nothing: export what you want to keep.");
  view.list.replaceChildren(...(found.length ? found.map(drawEntry) : [empty]));
}

function drawEntry(one) {
  const title = button(one.title || "Untitled", () => open(one), { class: "title", title: one.title, "aria-current": one.id === now.id ? "true" : null });
  const rename = button("Rename", () => {
    const field = h("input", { value: one.title, "aria-label": "Title", onkeydown: (event) => {
      if (event.key === "Escape") field.value = one.title;
      if (event.key === "Enter" || event.key === "Escape") field.blur();
    }, onblur: () => {
      one.title = field.value.trim() || one.title;
      put(one);
      listConversations();
    } });
    title.replaceWith(field);
    field.focus();
  }, { class: "quiet" });
  const erase = button("Delete", () => {
    if (!confirm(`Delete "${one.title || "Untitled"}"? It is kept nowhere else.`)) return;
    forget(one.id);
    remove(one.id);
  }, { class: "quiet" });
  const mark = growing.has(one.id) && h("span", { class: "dim" }, "…", h("span", { class: "unseen" }, "being answered"));
  return h("li", {}, title, mark, h("details", { class: "more" }, h("summary", { "aria-label": `More of ${one.title || "Untitled"}` }, "⋯"),
    rename, button("Export", () => download(one), { class: "quiet" }), erase));
}

function download(one) {
  const name = (one.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40);
  for (const [kind, text] of [["md", asMarkdown(one)], ["json", JSON.stringify(one, null, 1)]]) {
    const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: `${name}.${kind}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

// Take back what was exported, here or by another browser: as a conversation of its own.
async function take(input) {
  const [file] = input.files;
  input.value = "";
  let read = null, why = "";
  try {
    read = parse(await file.text());
  } catch (error) {
    why = `${file.name} is no exported conversation: ${error.message}`;
  }
  view.taken.textContent = why;
  view.taken.hidden = !why;
  if (!read) return;
  keep(read);
  open(read);
}

function forget(id) {
  stopAnswer(id);
  all.filter((one) => one.id === id).forEach((one) => (one.isGone = true));
  all = all.filter((one) => one.id !== id);
  if (id === now.id) fresh();
  listConversations();
}

// Another tab has kept or removed one.
async function heard({ id, isGone, isGrowing }) {
  if (isGone) return forget(id);
  elsewhere.set(id, isGrowing ? Date.now() : 0);
  if (isGrowing) setTimeout(note, ELSEWHERE_MS + 1);
  if (id === now.id && editing != null) return;
  const one = await load(id);
  if (!one) return;
  if (growing.has(id)) { // of what is kept of it meanwhile only a title can be new
    growing.get(id).conversation.title = one.title;
    return listConversations();
  }
  all = [one, ...all.filter((other) => other.id !== id)].sort((a, b) => b.changed - a.changed);
  if (id === now.id) {
    now = one;
    redraw();
  }
  listConversations();
}

function showSettings() {
  const field = (name, label, attributes) => h("label", {}, label, h("input", { value: now.options[name] ?? "", ...attributes,
    onchange: (event) => set(name, event.target.value === "" ? undefined : Number(event.target.value)) }));
  const efforts = h("select", { onchange: () => set("effort", efforts.value || undefined) },
    EFFORTS.map(([value, label]) => h("option", { value, selected: value === (now.options.effort ?? "") }, label)));
  const system = h("textarea", { placeholder: "How to answer (system prompt)", onchange: () => set("system", system.value || undefined) }, now.options.system ?? "");
  const tools = h("textarea", { placeholder: '[{"type": "function", "function": {"name": "now", "parameters": {}}}]', spellcheck: "false",
    onchange: () => setTools(tools) }, now.options.tools ? JSON.stringify(now.options.tools) : "");
  const [summary] = view.settings.children;
  view.settings.replaceChildren(summary,
    h("label", {}, "System prompt", system),
    h("div", { class: "row" },
      field("temperature", "Temperature", { type: "number", min: 0, max: 2, step: "any", placeholder: "the model's" }),
      field("top_p", "Top p", { type: "number", min: 0, max: 1, step: "any", placeholder: "the model's" }),
      field("max_tokens", "At most, tokens", { type: "number", min: 1, step: 1, placeholder: "as many as fit" }),
      field("seed", "Seed", { type: "number", min: 0, step: 1, placeholder: "by chance" }),
      h("label", {}, "Thinking", efforts)),
    h("label", {}, "Tools (JSON, as OpenAI has them): you say what came of each call", tools));
}

function set(name, value) {
  now.options[name] = value;
  keep();
}

function setTools(place) {
  try {
    const tools = place.value.trim() ? JSON.parse(place.value) : undefined;
    if (tools && !areTools(tools)) throw new Error('a list was expected, each {"type": "function", "function": {"name": ...}}');
    place.setCustomValidity("");
    set("tools", tools);
  } catch (error) {
    place.setCustomValidity(`These tools cannot be read: ${error.message}`);
    place.reportValidity();
  }
}

// --- which conversation, and which model ---------------------------------------------------------------------------

// Have the browser keep one as it is: not one that was deleted, and an edit that was only begun is none.
function put(one) {
  if (!one.isGone) save(one === now && editing != null ? { ...one, leaf: editing } : one, grows(one.id));
}

// The page is left, and what grows is kept as far as it is; that its requests then fail is no news of theirs.
function left() {
  const conversations = [...growing.values()].map(({ conversation }) => conversation);
  growing.clear();
  conversations.forEach(put);
}

function keep(one = now) {
  if (!one.turns.length || one.isGone) return;
  if (!all.includes(one)) all.unshift(one);
  put(one);
  listConversations();
}

function open(one) {
  leave();
  now = one;
  if (one.model) choose(one.model);
  redraw();
  toEnd();
  showSettings();
  listConversations();
  if (innerWidth <= 800) view.element.querySelector(".side").open = false;
  view.text.focus();
}

function fresh() {
  leave();
  const { options } = now;
  now = { ...begin(), options: { ...options } };
  redraw();
  showSettings();
  listConversations();
  view.text.focus();
}

// What was begun in the conversation that is left: an edit is none, and files stay behind.
function leave() {
  if (editing != null) now.leaf = editing;
  editing = null;
  showFiles([]);
}

function pick() {
  const known = swarm.models, found = known.find((m) => m.name === model);
  if (!model || (found?.chats === false && !isByHand)) model = firstThatChats(known);
  listModels(view.models, known, model);
  note();
}

function choose(name) {
  model = name;
  isByHand = true;
  if (swarm) pick();
}

function note() {
  const found = swarm?.models.find((m) => m.name === model);
  view.cannot = !found || found.chats === false;
  const text = editing != null ? "You edit what you asked: it begins a new branch." : whyBusy() || (swarm ? trouble(swarm.models, model) : "");
  if (view.note.textContent !== text) view.note.textContent = text; // said anew, it would be read aloud anew
  view.about.textContent = swarm ? describe(swarm, model) : "";
  busy();
}

function busy() {
  const is = grows(), why = whyBusy();
  view.log.setAttribute("aria-busy", is);
  view.stop.disabled = !is;
  view.send.disabled = is || Boolean(why) || view.cannot;
  view.cancel.hidden = editing == null;
}

// --- turns ---------------------------------------------------------------------------------------------------------

const acts = {
  edit(place) {
    stopAnswer();
    const turn = now.turns[place];
    editing ??= now.leaf;
    now.leaf = turn.parent;
    view.text.value = turn.text;
    showFiles(turn.files);
    redraw();
    view.text.focus();
  },
  again(place) {
    if (grows() || whyBusy() || view.cannot) return;
    now.leaf = now.turns[place].parent;
    answer();
    view.text.focus();
  },
  goOn(place) {
    if (!grows() && !whyBusy() && !view.cannot) answer(place);
  },
  answerCall(call, text) {
    if (grows() || whyBusy()) return;
    if (results(now).has(call.id)) return;
    add(now, "tool", { text, call: call.id, name: call.name });
    delete call.draft;
    const last = shown(now).findLast((turn) => turn.role === "assistant");
    const answered = results(now);
    keep();
    if (last.calls.every((other) => answered.has(other.id))) answer();
    else redraw();
  },
  showBranch(place) {
    if (grows() || isElsewhere()) return;
    show(now, place);
    keep();
    redraw();
    view.text.focus();
  },
};

function stopEditing() {
  leave();
  view.text.value = "";
  redraw();
  view.text.focus();
}

const HELLO = h("p", { class: "dim hello" }, "Ask something below. Enter sends, Shift+Enter begins a new line.");

// Draw what has changed, and nothing else: who hears the page is told no turn twice.
function redraw() {
  const wasAtEnd = isAtEnd(), answered = results(now);
  const lastAsked = shown(now).findLastIndex((turn) => turn.role !== "tool");
  const elements = path(now).map((place, i) => {
    const turn = now.turns[place], others = branches(now, place), isLast = i >= lastAsked;
    const made = JSON.stringify([place, others.length, isLast, turn.text.length, turn.thoughts.length, turn.told, turn.isCut, turn.calls.map((call) => answered.get(call.id))]);
    if (drawn.get(turn)?.made !== made)
      drawn.set(turn, { made, ...drawTurn(turn, { place, branches: others, isLast, model, results: answered }, acts) });
    return drawn.get(turn).element;
  });
  if (!elements.length) elements.push(HELLO);
  elements.forEach((element, i) => view.log.children[i] !== element && view.log.insertBefore(element, view.log.children[i] ?? null));
  while (view.log.children.length > elements.length) view.log.lastChild.remove();
  note();
  if (wasAtEnd) toEnd();
}

const isAtEnd = () => innerHeight + scrollY > document.body.scrollHeight - 80;
const toEnd = () => scrollTo(0, document.body.scrollHeight);

function showFiles(files) {
  view.attached = files;
  view.files.replaceChildren(...files.map((file) => h("span", { class: "chip" }, `${file.name} `,
    button("✕", () => showFiles(files.filter((other) => other !== file)), { class: "quiet", "aria-label": `Without ${file.name}` }))));
}

async function attach(input) {
  const file = input.files[0];
  input.value = "";
  if (!file) return;
  const text = await decode(file);
  const isText = !text.includes("\0") && !text.startsWith("%PDF");
  const why = !isText ? "is no text" : text.length > MOST_FILE ? `has ${text.length} characters, at most ${MOST_FILE} fit` : "";
  if (why) view.files.append(h("span", { class: "bad", role: "alert" }, `${file.name} ${why}.`));
  else showFiles([...view.attached, { name: file.name, text }]);
}

// A text as most are written, or as those of older programs.
async function decode(file) {
  const raw = await file.arrayBuffer();
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(raw);
  } catch {
    return new TextDecoder("windows-1252").decode(raw);
  }
}

// --- answers -----------------------------------------------------------------------------------------------------

const grows = (id = now.id) => growing.has(id);
const isElsewhere = (id = now.id) => Date.now() - (elsewhere.get(id) ?? 0) < ELSEWHERE_MS;
const stopAnswer = (id = now.id) => growing.get(id)?.controller.abort();

// Why nothing can be asked in this conversation now, beside that its own answer grows here; "" if it can.
function whyBusy() {
  if (isElsewhere()) return "This conversation is being answered in another tab.";
  const others = [...growing.values()].filter(({ conversation }) => conversation !== now);
  return others.length < MOST_GROWING ? "" : `${others.length} other answers are still being written: wait for one, or stop it.`;
}

function bodyOf(conversation, goesOn) {
  const { options } = conversation;
  const said = { model, messages: messages(conversation), stream: true, stream_options: { include_usage: true } };
  for (const name of OPTIONS) if (options[name] != null) said[name] = options[name];
  if (options.effort) said.reasoning_effort = options.effort;
  if (options.tools?.length) said.tools = options.tools;
  if (goesOn) Object.assign(said, { continue_final_message: true, add_generation_prompt: false });
  return JSON.stringify(said);
}

// Ask for an answer to what is shown, or for more of the one that is at ``place``.
async function answer(place = null) {
  const conversation = now, goesOn = place != null;
  conversation.model = model;
  const body = bodyOf(conversation, goesOn);
  const turn = conversation.turns[goesOn ? place : add(conversation, "assistant", { model })];
  Object.assign(turn, { told: "It was left before its end.", kind: "", isCut: true }); // as long as it grows: a tab may be closed
  const controller = new AbortController();
  growing.set(conversation.id, { controller, conversation });
  keep(conversation);
  redraw();
  toEnd();
  const here = () => (now === conversation ? drawn.get(turn) : null);
  const say = (told) => here() && tell(here().told, { told, kind: "" });
  say("");
  here().said.classList.add("waiting");
  const begun = performance.now();
  let first = 0, drawing = 0, usage = null, about = null, finish = "", last = begun, saved = 0;
  let took = 0; // the last drawing: a long answer is drawn anew less often, and the page stays free
  const drawNow = () => {
    if (growing.get(conversation.id)?.controller !== controller) return; // it has ended meanwhile, and is drawn with all that can be done
    const started = performance.now(), wasAtEnd = isAtEnd();
    if (here()) fill(here().said, turn);
    if (here() && wasAtEnd) toEnd();
    took = performance.now() - started;
    drawing = 0;
  };
  const later = () => (drawing ||= setTimeout(() => requestAnimationFrame(drawNow), 5 * took));
  const look = setInterval(() => { // who closes the tab loses no more than this
    const length = turn.text.length + turn.thoughts.length;
    if (length !== saved) put(conversation);
    else sayGrowing(conversation.id);
    saved = length;
    const waited = performance.now() - last;
    if (waited > SILENT_AFTER_MS) say(`Nothing for ${Math.round(waited / 1000)} s: it waits for a turn, reads a long question, or a server has gone and another is looked for.`);
  }, LOOK_MS);
  try {
    for await (const { data } of events("/v1/chat/completions", { method: "POST", body, signal: controller.signal })) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0], delta = choice?.delta;
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
        if (performance.now() - last > SILENT_AFTER_MS) say("");
        last = performance.now();
        first ||= last;
        turn.text += delta.content ?? "";
        turn.thoughts += delta.reasoning_content ?? "";
        for (const call of delta.tool_calls ?? []) turn.calls.push({ id: call.id, name: call.function.name, text: call.function.arguments });
        later();
      }
      finish = choice?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
      if (chunk.swarmd?.chain) about = chunk.swarmd;
      else if (chunk.swarmd?.repairs.length) say(`repaired, going on: ${chunk.swarmd.repairs.at(-1)}`);
    }
    turn.isCut = finish === "length" || !finish;
    turn.told = usage && about ? summary(usage, about, begun, first) : finish ? "" : "✖ the answer broke off";
    turn.kind = finish ? "" : "bad";
  } catch (error) {
    const isStopped = error.name === "AbortError";
    turn.isCut = Boolean(turn.text);
    turn.told = isStopped ? "stopped" : `✖ ${error.message}`;
    turn.kind = isStopped ? "" : "bad";
  }
  clearTimeout(drawing);
  clearInterval(look);
  if (!growing.delete(conversation.id)) return; // the page was left
  conversation.changed = Date.now();
  keep(conversation);
  redraw();
}

function summary(usage, about, begun, first) {
  const n = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
  const speed = n > 1 && first ? `, ${number((n - 1) / seconds)} tokens/s, the first after ${number((first - begun) / 1000)} s` : "";
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return [
    `${n} token${n === 1 ? "" : "s"}${speed}`,
    cached ? `${cached} of ${usage.prompt_tokens} prompt tokens were there` : "",
    `through ${about.chain.join(" → ")}`,
    about.doubts.length ? `from token ${about.doubts[0].token + 1} on the text may be wrong: ${about.doubts[0].reason}` : "",
    about.repairs.length ? `repaired ${about.repairs.length}×, within ${number(about.longest_stall_s)} s: ${about.repairs.at(-1)}` : "",
  ].filter(Boolean).join(" · ");
}
