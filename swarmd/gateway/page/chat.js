// The chat: conversations that this browser keeps, one of them shown, and an answer that grows.

import { events } from "./api.js";
import { add, asMarkdown, begin, branches, matches, messages, path, show } from "./conversation.js";
import { button, h, number } from "./dom.js";
import { describe, firstThatChats, listModels, trouble } from "./picker.js";
import { loadAll, remove, save } from "./store.js";
import { drawTurn, fill, tell } from "./turn.js";

const MOST_FILE = 200_000; // characters of an attached text: about 50,000 tokens
const OPTIONS = ["temperature", "top_p", "max_tokens", "seed"];
const EFFORTS = [["", "as the model does"], ["none", "off"], ["low", "a little"], ["medium", "some"], ["high", "much"]];

let all = []; // conversations, the last one changed first
let now = begin();
let running = null; // {controller, conversation, place}
let isByHand = false; // a model that somebody chose, or asked, is never exchanged for another
let editing = null; // the leaf to go back to
let model = "", view = null, swarm = null, drawn = new Map();

export function chat(news) {
  if (!view) {
    view = build();
    redraw();
    loadAll().then((found) => {
      all = found;
      listConversations();
    });
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
  const stop = button("Stop", () => running?.controller.abort(), { disabled: true });
  const cancel = button("Cancel", stopEditing, { hidden: true });
  const chosen = h("input", { type: "file", hidden: true, "aria-label": "A text file", onchange: () => attach(chosen) });
  const file = button("Attach", () => chosen.click(), { title: "A text file to ask about" });
  const files = h("div", { class: "row" });
  const note = h("p", { class: "dim", role: "status" });
  const settings = h("details", { class: "settings" }, h("summary", {}, "Settings"));
  const form = h("form", { class: "ask", onsubmit }, files, text, note,
    h("div", { class: "row" }, send, stop, cancel, file, chosen, models, about), settings);
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: listConversations });
  const list = h("ul", { class: "conversations" });
  const aside = h("details", { class: "side", open: innerWidth > 800 }, h("summary", {}, "Conversations"),
    h("div", { class: "row" }, button("New", fresh), search), list);
  const element = h("section", { class: "chat", "aria-label": "Chat" }, aside, h("div", { class: "talk" }, log, form));

  function onkeydown(event) {
    const touches = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touches) {
      event.preventDefault();
      form.requestSubmit();
    }
  }
  function onsubmit(event) {
    event.preventDefault();
    if ((!text.value.trim() && !view.attached.length) || running || send.disabled) return;
    isByHand = true;
    add(now, "user", { text: text.value.trim(), files: view.attached });
    text.value = "";
    editing = null;
    showFiles([]);
    answer();
  }
  return { element, log, text, models, about, stop, send, cancel, note, files, settings, search, list, attached: [], cannot: true };
}

function listConversations() {
  const found = all.filter((one) => !view.search.value || matches(one, view.search.value));
  const empty = h("li", { class: "dim" }, all.length ? "None has these words." : "What you ask is kept here, in this browser only.");
  view.list.replaceChildren(...(found.length ? found.map(drawEntry) : [empty]));
}

function drawEntry(one) {
  const title = button(one.title || "Untitled", () => open(one), { class: "title", "aria-current": one.id === now.id ? "true" : null });
  const rename = button("Rename", () => {
    const field = h("input", { value: one.title, "aria-label": "Title", onkeydown: (event) => event.key === "Enter" && field.blur(), onblur: () => {
      one.title = field.value.trim() || one.title;
      save(one);
      listConversations();
    } });
    title.replaceWith(field);
    field.focus();
  }, { class: "quiet" });
  const erase = button("Delete", () => {
    if (!confirm(`Delete "${one.title || "Untitled"}"? It is kept nowhere else.`)) return;
    all = all.filter((other) => other !== one);
    remove(one.id);
    if (one.id === now.id) fresh();
    listConversations();
  }, { class: "quiet" });
  return h("li", {}, title, h("details", { class: "more" }, h("summary", { "aria-label": `More of ${one.title || "Untitled"}` }, "⋯"),
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
      field("temperature", "Temperature", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "the model's" }),
      field("top_p", "Top p", { type: "number", min: 0, max: 1, step: 0.05, placeholder: "the model's" }),
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
    if (tools && !Array.isArray(tools)) throw new Error("a list was expected");
    place.setCustomValidity("");
    set("tools", tools);
  } catch (error) {
    place.setCustomValidity(`These tools cannot be read: ${error.message}`);
    place.reportValidity();
  }
}

// --- which conversation, and which model ---------------------------------------------------------------------------

function keep(one = now) {
  if (!one.turns.length) return;
  if (!all.includes(one)) all.unshift(one);
  save(one);
  listConversations();
}

function open(one) {
  now = one;
  editing = null;
  if (one.model) choose(one.model);
  view.text.value = "";
  redraw();
  listConversations();
}

function fresh() {
  const { options } = now;
  now = { ...begin(), options: { ...options } };
  editing = null;
  redraw();
  listConversations();
  view.text.focus();
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
  const text = editing == null ? (swarm ? trouble(swarm.models, model) : "") : "You edit what you asked: it begins a new branch.";
  if (view.note.textContent !== text) view.note.textContent = text; // said anew, it would be read aloud anew
  view.about.textContent = swarm ? describe(swarm, model) : "";
  busy();
}

function busy() {
  const is = running != null;
  view.log.setAttribute("aria-busy", is);
  view.stop.disabled = !is;
  view.send.disabled = is || view.cannot;
  view.cancel.hidden = editing == null;
}

// --- turns ---------------------------------------------------------------------------------------------------------

const acts = {
  edit(place) {
    running?.controller.abort();
    const turn = now.turns[place];
    editing ??= now.leaf;
    now.leaf = turn.parent;
    view.text.value = turn.text;
    showFiles(turn.files);
    redraw();
    view.text.focus();
  },
  again(place) {
    if (running || view.cannot) return;
    now.leaf = now.turns[place].parent;
    answer();
  },
  goOn(place) {
    if (!running && !view.cannot) answer(place);
  },
  answerCall(call, text) {
    if (running) return;
    add(now, "tool", { text, call: call.id });
    const asked = path(now).map((place) => now.turns[place]);
    const last = asked.findLast((turn) => turn.role === "assistant");
    const answered = new Set(asked.filter((turn) => turn.role === "tool").map((turn) => turn.call));
    keep();
    if (last.calls.every((other) => answered.has(other.id))) answer();
    else redraw();
  },
  showBranch(place) {
    if (running) return;
    show(now, place);
    keep();
    redraw();
  },
};

function stopEditing() {
  now.leaf = editing;
  editing = null;
  view.text.value = "";
  showFiles([]);
  redraw();
}

function redraw() {
  const places = path(now);
  drawn = new Map(places.map((place) => {
    const isLast = place === now.leaf || now.turns[place].calls.length > 0;
    return [place, drawTurn(now.turns[place], { place, branches: branches(now, place), isLast, model }, acts)];
  }));
  const hello = h("p", { class: "dim hello" }, "Ask something below. Enter sends, Shift+Enter begins a new line.");
  view.log.replaceChildren(...(places.length ? [...drawn.values()].map((turn) => turn.element) : [hello]));
  showSettings();
  note();
  scrollTo(0, document.body.scrollHeight);
}

function showFiles(files) {
  view.attached = files;
  view.files.replaceChildren(...files.map((file) => h("span", { class: "chip" }, `${file.name} `,
    button("✕", () => showFiles(files.filter((other) => other !== file)), { class: "quiet", "aria-label": `Without ${file.name}` }))));
}

async function attach(input) {
  const file = input.files[0];
  input.value = "";
  if (!file) return;
  const text = await file.text();
  const why = text.includes("\0") ? "is no text" : text.length > MOST_FILE ? `has ${text.length} characters, at most ${MOST_FILE} fit` : "";
  if (why) view.note.textContent = `${file.name} ${why}.`;
  else showFiles([...view.attached, { name: file.name, text }]);
}

// --- an answer -----------------------------------------------------------------------------------------------------

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
  const at = goesOn ? place : add(conversation, "assistant", { model });
  const turn = conversation.turns[at];
  Object.assign(turn, { told: "", kind: "", isCut: false });
  keep(conversation);
  running = { controller: new AbortController(), conversation, place: at };
  redraw();
  const here = () => (now === conversation ? drawn.get(at) : null);
  here()?.said.classList.add("waiting");
  const begun = performance.now();
  let first = 0, drawing = 0, usage = null, about = null;
  let took = 0; // the last drawing: a long answer is drawn anew less often, and the page stays free
  const drawNow = () => {
    const started = performance.now();
    const end = innerHeight + scrollY > document.body.scrollHeight - 80;
    if (here()) fill(here().said, turn);
    if (here() && end) scrollTo(0, document.body.scrollHeight);
    took = performance.now() - started;
    drawing = 0;
  };
  const later = () => (drawing ||= setTimeout(() => requestAnimationFrame(drawNow), 5 * took));
  try {
    for await (const { data } of events("/v1/chat/completions", { method: "POST", body, signal: running.controller.signal })) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0], delta = choice?.delta;
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
        first ||= performance.now();
        turn.text += delta.content ?? "";
        turn.thoughts += delta.reasoning_content ?? "";
        for (const call of delta.tool_calls ?? []) turn.calls.push({ id: call.id, name: call.function.name, text: call.function.arguments });
        later();
      }
      if (choice?.finish_reason === "length") turn.isCut = true;
      usage = chunk.usage ?? usage;
      if (chunk.swarmd?.chain) about = chunk.swarmd;
      else if (chunk.swarmd?.repairs.length && here())
        tell(here().told, { told: `repaired, going on: ${chunk.swarmd.repairs.at(-1)}`, kind: "" });
    }
    if (usage && about) turn.told = summary(usage, about, begun, first);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    turn.isCut = Boolean(turn.text);
    turn.told = isStopped ? "stopped" : `✖ ${error.message}`;
    turn.kind = isStopped ? "" : "bad";
  }
  clearTimeout(drawing);
  running = null;
  conversation.changed = Date.now();
  keep(conversation);
  if (now === conversation) redraw();
  else busy();
}

function summary(usage, about, begun, first) {
  const n = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
  const cached = usage.prompt_tokens_details.cached_tokens;
  return [
    `${n} tokens, ${number((n - 1) / seconds)} tokens/s, the first after ${number((first - begun) / 1000)} s`,
    cached ? `${cached} of ${usage.prompt_tokens} prompt tokens were there` : "",
    `through ${about.chain.join(" → ")}`,
    about.doubts.length ? `from token ${about.doubts[0].token + 1} on the text may be wrong: ${about.doubts[0].reason}` : "",
    about.repairs.length ? `repaired ${about.repairs.length}×, within ${number(about.longest_stall_s)} s: ${about.repairs.at(-1)}` : "",
  ].filter(Boolean).join(" · ");
}
