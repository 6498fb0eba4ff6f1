// Who serves which blocks: a picture of what happens now, and a map with a row for each peer and a column for each block,
// states by shape, colour and in words.

import { h, number, table } from "./dom.js";
import { picture } from "./picture.js";

const SHAPES = { online: "●", joining: "◐", draining: "◑" };
const MOST_ROWS = 100; // drawn at once: a table of a thousand is found by the filter
let filter = "", wanted = MOST_ROWS;

export function swarm(news) {
  const search = h("input", { type: "search", placeholder: "Filter peers", "aria-label": "Filter peers", value: filter,
    oninput: () => ((filter = search.value.toLowerCase()), (wanted = MOST_ROWS), update()) });
  const place = h("div");
  const element = h("section", { "aria-label": "Swarm" }, h("div", { class: "row" }, search), place);
  function update(kind) {
    if (kind && kind !== "swarm" && kind !== "flows") return;
    const data = news.swarm;
    if (kind === "flows" && data) return redrawPictures(place, data, news.flows);
    place.replaceChildren(...(data ? draw(data, news.flows, update) : [h("p", { class: "dim" }, "waiting for news")]));
  }
  return { element, update };
}

function draw(data, flows, update) {
  if (!data.models.length) return [h("p", {}, "The swarm has no models yet. To add one: ", h("code", {}, "swarmd models add FOLDER")), peers(data, update)];
  return [...data.models.map((model) => map(model, data, flows, update)), peers(data, update)];
}

function redrawPictures(place, data, flows) {
  for (const model of data.models)
    place.querySelector(`[data-picture="${model.model}"]`)?.replaceChildren(picture(model, data, flows));
}

const fits = (peer) => !filter || JSON.stringify(peer).toLowerCase().includes(filter);

function map(model, data, flows, update) {
  const spans = data.peers.filter(fits).flatMap((peer) => peer.spans.filter((s) => s.model === model.model).map((s) => [peer, s]));
  const counts = Array(model.n_blocks).fill(0);
  for (const peer of data.peers) for (const s of peer.spans)
    if (s.model === model.model && s.state === "online") for (let b = s.start; b < s.end; b++) counts[b]++;
  const rows = spans.slice(0, wanted).map(([peer, span]) => h("tr", {},
    h("th", { scope: "row" }, peer.label + (peer.is_here ? " (here)" : "")),
    h("td", {}, `${span.state} [${span.start},${span.end})`),
    ...counts.map((_, b) => {
      const is = b >= span.start && b < span.end;
      return h("td", { class: `block ${is ? span.state : ""}` }, is ? (SHAPES[span.state] ?? "?") : "");
    })));
  const lacks = model.missing.map(([a, b]) => `[${a},${b})`).join(", ");
  const said = lacks ? `Nobody serves ${lacks}: swarmd up --serve ${model.name} on any machine would help.`
    : `Whole: every block is on ${Math.min(...counts)} or more.`;
  return h("section", {},
    h("h2", {}, model.name),
    h("p", { class: lacks ? "bad" : "dim" }, said),
    h("div", { "data-picture": model.model }, picture(model, data, flows)),
    spans.length > 0 && h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Block map of ${model.name}` }, h("table", { class: "map" },
      h("caption", {}, "● serves, ◐ is about to, ◑ is leaving; below: how many serve each block"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "peer"), h("th", { scope: "col" }, "blocks"),
        ...counts.map((_, b) => h("th", { scope: "col", class: "block" },
          b % 5 ? h("span", { class: "unseen" }, String(b)) : String(b))))),
      h("tbody", {}, ...rows),
      h("tfoot", {}, h("tr", {}, h("th", { scope: "row" }, "serving"), h("td", {}, ""),
        ...counts.map((n) => h("td", { class: `block ${n ? "" : "none"}` }, n ? String(Math.min(n, 99)) : "✖")))))),
    more(spans.length, update));
}

function peers(data, update) {
  const found = data.peers.filter(fits);
  const rows = found.slice(0, wanted).map((peer) => [
    peer.label + (peer.is_here ? " (here)" : ""), peer.device, `${number(peer.memory_gib)} GiB`,
    peer.up_mbit == null ? "unknown" : `${number(peer.up_mbit)} / ${number(peer.down_mbit)}`,
    peer.spans.map((s) => number(s.tokens_per_s)).join(", ") || "–", String(peer.version), ago(peer.seen_at)]);
  const heads = ["peer", "device", "memory", "Mbit/s up / down", "tokens/s", "version", "last heard of"];
  return h("section", {}, h("h2", {}, `${found.length} of ${data.n_peers} peers`),
    table("Peers", heads, rows),
    more(found.length, update));
}

function more(n, update) {
  return n > wanted && h("p", {}, h("button", { type: "button", onclick: () => ((wanted *= 10), update()) },
    `Show more (${wanted} of ${n})`));
}

function ago(at) {
  const seconds = Math.max(0, Date.now() / 1000 - at);
  return seconds < 120 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}
