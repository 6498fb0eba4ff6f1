// Which model is asked: what the swarm has, what each lacks, how fast it is, and why one does not answer now.

import { h, number } from "./dom.js";

// What a model lacks; only what will not change by waiting makes it one that cannot be chosen.
function lack(m) {
  if (m.chats === false) return "cannot chat: it has no chat template";
  return m.missing.length ? "incomplete" : "";
}

export function firstThatChats(models) {
  const whole = models.filter((m) => !m.missing.length && m.chats !== false);
  const some = whole.length ? whole : models.filter((m) => m.chats);
  return (some.findLast((m) => m.chats) ?? some.findLast((m) => m.name !== "demo") ?? some[0])?.name ?? "";
}

// Have a select show the models and the one that is chosen; drawn anew only when they changed.
export function listModels(place, models, chosen) {
  const options = models.map((m) => [m.name, m.name + (lack(m) && ` (${lack(m)})`), m.chats === false]);
  if (!chosen) options.unshift(["", "no model that can chat", true]);
  else if (!models.some((m) => m.name === chosen)) options.push([chosen, `${chosen} (not in the catalog any more)`, true]);
  const text = JSON.stringify(options);
  if (place.dataset.shown !== text) {
    place.dataset.shown = text;
    place.replaceChildren(...options.map(([value, label, disabled]) => h("option", { value, disabled }, label)));
  }
  place.value = chosen;
}

// Why the chosen model does not answer now, and what helps; "" where it does.
export function trouble(models, chosen) {
  const now = models.find((m) => m.name === chosen);
  if (!models.length) return "The swarm has no models yet. To add one: swarmd models add FOLDER";
  if (!chosen) {
    const mute = models.filter((m) => m.chats === false).map((m) => m.name);
    const run = mute.length ? ` ${mute.join(", ")} only continues texts: swarmd run ${mute[0]} "The function returns".` : "";
    return `No model here can chat.${run} To have one that does: swarmd models add, with a model made for chat.`;
  }
  if (!now) return `${chosen} is not in the swarm's catalog any more: choose another model.`;
  if (now.chats === false) return `${chosen} has no chat template, so it cannot chat: choose another model.`;
  if (!now.missing.length) return "";
  const blocks = now.missing.map(([a, b]) => `[${a},${b})`).join(", ");
  return `Nobody serves blocks ${blocks} of ${chosen} now: wait, choose another model, or run swarmd up --serve ${chosen} on any machine.`;
}

// How large it is, who serves it, how fast that is at most: each block by the fastest machine that has it.
export function describe(swarm, chosen) {
  const now = swarm.models.find((m) => m.name === chosen);
  if (!now) return "";
  const spans = swarm.peers.flatMap((peer) => peer.spans.filter((s) => s.model === now.model && s.state === "online"));
  const peers = swarm.peers.filter((peer) => peer.spans.some((s) => s.model === now.model && s.state === "online")).length;
  const parts = [`${now.n_blocks} blocks`, peers === 1 ? "1 machine serves it" : `${peers} machines serve it`];
  if (now.max_tokens) parts.push(`${now.max_tokens.toLocaleString("en")} tokens of context`);
  const least = fastest(spans, now.n_blocks);
  if (least) parts.push(`up to ${number(least, 2)} tokens/s`);
  return parts.join(" · ");
}

// A span's rate is that of all its blocks together: each of them takes its share of 1/rate.
function fastest(spans, n) {
  let seconds = 0;
  for (let block = 0; block < n; block++) {
    const shares = spans.filter((s) => s.start <= block && block < s.end && s.tokens_per_s > 0)
      .map((s) => 1 / s.tokens_per_s / (s.end - s.start));
    if (!shares.length) return 0;
    seconds += Math.min(...shares);
  }
  return 1 / seconds;
}
