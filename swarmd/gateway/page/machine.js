// What this machine gives, and to how many; what its owner can tell it to do.

import { ask, hasToken } from "./api.js";
import { h, number, table } from "./dom.js";
import { plot } from "./plot.js";

const KEYS_EVERY_MS = 10_000; // what keys used is counted in a file

export function machine(news) {
  const element = h("section", { "aria-label": "This machine" });
  let said = "", keys = [], askedAt = -Infinity;
  function update(kind) {
    if (kind && kind !== "machine") return;
    const data = news.machine;
    if (!data) return element.replaceChildren(h("p", { class: "dim" }, "waiting for news"));
    if (data.error) return element.replaceChildren(h("p", { class: "bad" }, data.error));
    element.replaceChildren(...draw(data, act, said), ...(keys.length ? [drawKeys(keys)] : []));
    if (hasToken() && performance.now() - askedAt > KEYS_EVERY_MS) askKeys();
  }
  async function askKeys() {
    askedAt = performance.now();
    ({ keys } = await ask("/page/keys").then((answer) => answer.json()).catch(() => ({ keys: [] })));
    if (keys.length && element.isConnected) update();
  }
  async function act(verb) {
    try {
      await ask(`/page/${verb}`, { method: "POST", body: "{}" });
      said = verb === "drain" ? "It was told to stop serving." : "It was told to serve again.";
    } catch (error) {
      said = `✖ ${error.message}`;
    }
    update();
  }
  return { element, update };
}

function draw({ status, history }, act, said) {
  const rows = [["This peer", status.peer + (status.name ? ` (${status.name})` : "")], ["Swarm", `${status.swarm}, ${status.members} members known`],
    ["Up for", `${number(status.uptime_s / 60)} min, version ${status.version}, ${number(status.memory_mib)} MiB`]];
  for (const one of status.hosting) {
    const serving = one.serving;
    rows.push(["Serves", serving ? `${serving.name} blocks [${serving.blocks[0]},${serving.blocks[1]}): ${serving.why}` : `nothing now: ${one.why}`]);
    rows.push(["State", `${one.state}: ${one.why}`]);
    if (one.server) rows.push(["Sessions", `${one.server.sessions} open, ${one.server.tokens_served} tokens served (${one.server.tokens_reused} of them copied), ${one.server.free_cache_tokens} of ${one.server.total_cache_tokens} cache tokens free`]);
  }
  const button = (verb, text) => h("button", { type: "button", disabled: !hasToken(), onclick: () => act(verb) }, text);
  return [
    h("h2", {}, "What it gives"),
    h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("div", { class: "row" }, button("drain", "Stop serving"), button("resume", "Serve again")),
    h("p", { class: "dim", role: "status" }, said || (hasToken() ? "" : "To change something, open this page with: swarmd open")),
    h("h2", {}, "The last hour"),
    plot("Tokens/s served", minutes(rates(history)), { xLabel: "minutes" }),
    plot("Sessions open", minutes(history.map((row) => [row.at, row.sessions])), { xLabel: "minutes" }),
  ];
}

function drawKeys(keys) {
  const of = (used, limit) => used.toLocaleString("en") + (limit ? ` of ${limit.toLocaleString("en")}` : "");
  const tokens = (used) => used.prompt + used.generated;
  const heads = ["key", "models", "ends", "requests today", "tokens today", "tokens ever"];
  const rows = keys.map((key) => [key.name, key.models.join(", ") || "all",
    key.ends_at ? new Date(1000 * key.ends_at).toLocaleDateString() : "never",
    of(key.today.requests, key.limits.requests_day), of(tokens(key.today), key.limits.tokens_day), of(tokens(key.ever))]);
  return h("section", {}, h("h2", {}, "API keys"), table("API keys", heads, rows));
}

// Places in seconds as minutes before now.
function minutes(points) {
  const last = points.at(-1)?.[0] ?? 0;
  return points.map(([at, value]) => [(at - last) / 60, value]);
}

function rates(history) {
  return history.slice(1).map((row, i) => {
    const before = history[i];
    return [row.at, Math.max(0, row.tokens - before.tokens) / Math.max(1, row.at - before.at)];
  });
}
