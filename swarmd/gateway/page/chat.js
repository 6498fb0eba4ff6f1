// A conversation. It lives in this tab only; the gateway keeps the session of the last turns for some minutes.

import { ask, events } from "./api.js";
import { h, number } from "./dom.js";
import { markdown } from "./markdown.js";

const turns = []; // {role, text, thoughts, told, repairs, element}
let model = "", system = "", running = null, view = null;
let isByHand = false; // a model that somebody chose, or asked, is never exchanged for another

export function chat(news) {
  view ??= build();
  view.update = (kind) => kind !== "machine" && listModels(news.swarm);
  return view;
}

function build() {
  const log = h("div", { role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  const text = h("textarea", { id: "question", placeholder: "Ask something", "aria-label": "Your question", onkeydown });
  const models = h("select", { "aria-label": "Model", onchange: () => choose(models.value) });
  const send = h("button", { type: "submit", disabled: true }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const retry = h("button", { type: "button", onclick: again }, "Retry");
  const reset = h("button", { type: "button", onclick: clear }, "New");
  const told = h("input", { "aria-label": "How to answer (system prompt)", placeholder: "How to answer (optional)",
    onchange: () => (system = told.value) });
  const note = h("p", { class: "dim", role: "status" });
  const form = h("form", { class: "ask", onsubmit }, text, note, h("div", { class: "row" }, send, stop, retry, reset, models, told));
  const element = h("section", { "aria-label": "Chat" }, log, form);

  function onkeydown(event) {
    const touches = matchMedia("(pointer: coarse)").matches;
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touches) {
      event.preventDefault();
      form.requestSubmit();
    }
  }
  function onsubmit(event) {
    event.preventDefault();
    if (!text.value.trim() || running || send.disabled) return;
    isByHand = true;
    add("user", text.value.trim());
    text.value = "";
    answer();
  }
  return { element, log, text, models, stop, send, note, retry, known: [], cannot: true };
}

// What a model lacks, for the picker; only what will not change by waiting makes it one that cannot be chosen.
function lack(m) {
  if (m.chats === false) return "cannot chat: it has no chat template";
  return m.missing.length ? "incomplete" : "";
}

function listModels(swarm) {
  if (!swarm) return;
  view.known = swarm.models;
  const now = swarm.models.find((m) => m.name === model);
  if (!model || (now?.chats === false && !isByHand)) model = firstThatChats(swarm.models);
  const options = swarm.models.map((m) => [m.name, m.name + (lack(m) && ` (${lack(m)})`), m.chats === false]);
  if (!model) options.unshift(["", "no model that can chat", true]);
  else if (!swarm.models.some((m) => m.name === model)) options.push([model, `${model} (not in the catalog any more)`, true]);
  const place = view.models, text = JSON.stringify(options);
  if (place.dataset.shown !== text) {
    place.dataset.shown = text;
    place.replaceChildren(...options.map(([value, label, disabled]) => h("option", { value, disabled }, label)));
  }
  place.value = model;
  note();
}

function firstThatChats(models) {
  const whole = models.filter((m) => !m.missing.length && m.chats !== false);
  const some = whole.length ? whole : models.filter((m) => m.chats);
  return (some.findLast((m) => m.chats) ?? some.findLast((m) => m.name !== "demo") ?? some[0])?.name ?? "";
}

function choose(name) {
  model = name;
  isByHand = true;
  note();
}

// Why the chosen model does not answer now, and what helps.
function trouble() {
  const now = view.known.find((m) => m.name === model);
  if (!model) {
    const mute = view.known.filter((m) => m.chats === false).map((m) => m.name);
    const run = mute.length ? ` ${mute.join(", ")} only continues texts: swarmd run ${mute[0]} "The function returns".` : "";
    return `No model here can chat.${run} To have one that does: swarmd models add, with a model made for chat.`;
  }
  if (!now) return `${model} is not in the swarm's catalog any more: choose another model.`;
  if (now.chats === false) return `${model} has no chat template, so it cannot chat: choose another model.`;
  if (!now.missing.length) return "";
  const blocks = now.missing.map(([a, b]) => `[${a},${b})`).join(", ");
  return `Nobody serves blocks ${blocks} of ${model} now: wait, choose another model, or run swarmd up --serve ${model} on any machine.`;
}

function note() {
  const now = view.known.find((m) => m.name === model);
  view.cannot = !now || now.chats === false;
  const text = trouble();
  if (view.note.textContent !== text) view.note.textContent = text; // said anew, it would be read aloud anew
  busy(running != null);
}

function add(role, text) {
  const said = h("div", { class: "said" }), told = h("p", { class: "dim" });
  const turn = { role, text, thoughts: "", repairs: [], said, told };
  const edit = role === "user" && h("button", { type: "button", onclick: () => change(turn) }, "Edit");
  turn.element = h("article", { class: `turn ${role}` },
    h("p", { class: "who" }, role === "user" ? "You" : model), said, told, edit);
  turns.push(turn);
  view.log.append(turn.element);
  draw(turn);
  return turn;
}

function draw(turn) {
  const end = innerHeight + scrollY > document.body.scrollHeight - 80;
  const thoughts = turn.thoughts ? [h("details", {}, h("summary", {}, "Thoughts"), h("div", { class: "thoughts" }, turn.thoughts))] : [];
  const fresh = document.createDocumentFragment();
  for (const part of thoughts.concat(turn.role === "user" ? turn.text : markdown(turn.text))) fresh.append(part);
  turn.said.replaceChildren(fresh);
  if (end) scrollTo(0, document.body.scrollHeight);
}

function cut(from) {
  for (const turn of turns.splice(from)) turn.element.remove();
}
function clear() {
  running?.abort();
  cut(0);
  view.text.focus();
}
function again() {
  if (running || view.cannot) return;
  const last = turns.findLastIndex((turn) => turn.role === "user");
  cut(last + 1);
  if (last >= 0) answer();
}
function change(turn) {
  running?.abort();
  cut(turns.indexOf(turn));
  view.text.value = turn.text;
  view.text.focus();
}

async function answer() {
  const messages = turns.map(({ role, text }) => ({ role, content: text }));
  if (system) messages.unshift({ role: "system", content: system });
  const body = JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true } });
  const turn = add("assistant", "");
  running = new AbortController();
  busy(true);
  turn.said.classList.add("waiting");
  const begun = performance.now();
  let first = 0, drawing = 0, usage = null, about = null;
  let took = 0; // the last drawing: a long answer is drawn anew less often, and the page stays free
  const drawNow = () => {
    const started = performance.now();
    draw(turn);
    took = performance.now() - started;
    drawing = 0;
  };
  const later = () => (drawing ||= setTimeout(() => requestAnimationFrame(drawNow), 5 * took));
  try {
    for await (const { data } of events("/v1/chat/completions", { method: "POST", body, signal: running.signal })) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta;
      if (delta?.content || delta?.reasoning_content) {
        first ||= performance.now();
        turn.text += delta.content ?? "";
        turn.thoughts += delta.reasoning_content ?? "";
        later();
      }
      usage = chunk.usage ?? usage;
      if (chunk.swarmd?.chain) about = chunk.swarmd;
      else if (chunk.swarmd?.repairs.length) tell(turn, `repaired, going on: ${chunk.swarmd.repairs.at(-1)}`);
    }
  } catch (error) {
    if (error.name === "AbortError") turn.text += turn.text ? " (stopped)" : "(stopped)";
    else tell(turn, `✖ ${error.message}`, "bad");
  }
  turn.said.classList.remove("waiting");
  draw(turn);
  if (usage && about) {
    const n = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details.cached_tokens;
    tell(turn, [
      `${n} tokens, ${number((n - 1) / seconds)} tokens/s, the first after ${number((first - begun) / 1000)} s`,
      cached ? `${cached} of ${usage.prompt_tokens} prompt tokens were there` : "",
      `through ${about.chain.join(" → ")}`,
      about.doubts.length ? `from token ${about.doubts[0].token + 1} on the text may be wrong: ${about.doubts[0].reason}` : "",
      about.repairs.length ? `repaired ${about.repairs.length}×, within ${number(about.longest_stall_s)} s: ${about.repairs.at(-1)}` : "",
    ].filter(Boolean).join(" · "));
  }
  running = null;
  busy(false);
}

function tell(turn, text, kind = "") {
  turn.told.textContent = text;
  turn.told.className = `dim ${kind}`;
}

function busy(is) {
  view.log.setAttribute("aria-busy", is);
  view.stop.disabled = !is;
  view.send.disabled = is || view.cannot;
  view.retry.disabled = is || view.cannot;
}
