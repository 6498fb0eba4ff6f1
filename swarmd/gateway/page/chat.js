// A conversation. It lives in this tab only; the gateway keeps the session of the last turns for some minutes.

import { ask, events } from "./api.js";
import { h, number } from "./dom.js";
import { markdown } from "./markdown.js";

const turns = []; // {role, text, thoughts, told, repairs, element}
let model = "", system = "", running = null, view = null;

export function chat(news) {
  view ??= build();
  view.update = (kind) => kind !== "machine" && listModels(news.swarm);
  return view;
}

function build() {
  const log = h("div", { role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  const text = h("textarea", { id: "question", placeholder: "Ask something", "aria-label": "Your question", onkeydown });
  const models = h("select", { "aria-label": "Model", onchange: () => (model = models.value) });
  const send = h("button", { type: "submit" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const retry = h("button", { type: "button", onclick: again }, "Retry");
  const reset = h("button", { type: "button", onclick: clear }, "New");
  const told = h("input", { "aria-label": "How to answer (system prompt)", placeholder: "How to answer (optional)",
    onchange: () => (system = told.value) });
  const form = h("form", { class: "ask", onsubmit }, text, h("div", { class: "row" }, send, stop, retry, reset, models, told));
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
    if (!text.value.trim() || running) return;
    add("user", text.value.trim());
    text.value = "";
    answer();
  }
  return { element, log, text, models, stop, send };
}

function listModels(swarm) {
  if (!swarm) return;
  const names = swarm.models.map((m) => m.name + (m.missing.length ? " (incomplete)" : ""));
  const place = view.models;
  if ([...place.options].map((o) => o.text).join() === names.join()) return;
  place.replaceChildren(...swarm.models.map((m, i) => h("option", { value: m.name }, names[i])));
  const whole = swarm.models.filter((m) => !m.missing.length).map((m) => m.name);
  model = whole.includes(model) ? model : (whole.findLast((name) => name !== "demo") ?? whole[0] ?? model);
  place.value = model;
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
  turn.said.replaceChildren(...thoughts, ...(turn.role === "user" ? [turn.text] : markdown(turn.text)));
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
  if (running) return;
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
  const later = () => (drawing ||= requestAnimationFrame(() => ((drawing = 0), draw(turn))));
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
  view.send.disabled = is;
}
