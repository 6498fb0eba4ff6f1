// A model's blocks from left to right, the machines that have them as bars, and the answers that go through them now.
//
//     0        10        20        30
//     [ anna        ]    [ carl    ]        a bar: a machine, from its first block to its last
//          [ bob            ]
//     ──●───────────●────●──▶               an answer: through whom, moving while its tokens come
//
// A machine that has vanished stays for a while, struck out: what its answers do then is seen. So is one that an answer
// had to do without, long before the swarm forgets it.

import { h, s } from "./dom.js";

const WIDTH = 1000, LANE = 34, BAR = 26, TOP = 22;
const GONE_MS = 20_000;
const HOP = /\[(?<start>\d+),\s*(?<end>\d+)\) on (?<short>\w{8})/;

const seen = new Map(); // "peer model start" -> {peer, span, at}: bars as they were last
const flowing = new Map(); // a flow's key -> tokens at the last news

export function picture(model, data, flows) {
  const own = (flows ?? []).filter((flow) => flow.model === model.model && flow.chain.length);
  const lost = own.flatMap((flow) => flow.repairs).join(" ");
  const bars = place(recent(model, data)).map((bar) => ({ ...bar, isGone: bar.isGone || lost.includes(bar.peer.peer.slice(-8)) }));
  if (!bars.length) return h("span");
  const lanes = Math.max(1, ...bars.map((bar) => bar.lane + 1));
  const height = TOP + lanes * LANE + 8;
  const x = (block) => (block / model.n_blocks) * WIDTH;
  const ticks = [...Array(model.n_blocks + 1).keys()].filter((block) => block % step(model.n_blocks) === 0);
  const svg = s("svg", { class: "picture", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": inWords(model, bars, own) },
    ticks.map((block) => [
      s("line", { class: "grid", x1: x(block), x2: x(block), y1: TOP - 4, y2: height }),
      s("text", { class: "tick", x: Math.min(x(block) + 3, WIDTH - 20), y: 12 }, String(block))]),
    bars.map((bar) => drawBar(bar, x)),
    own.map((flow, i) => drawFlow(flow, i, bars, x)));
  const lines = own.map((flow) => h("li", {}, `An answer, ${flow.n_generated} tokens so far, through ${hops(flow, bars).map((hop) => hop.bar?.peer.label ?? hop.name).join(" → ")}`
    + (flow.repairs.length ? `; repaired ${flow.repairs.length}×: ${flow.repairs.at(-1)}` : "")));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Picture of ${model.name}` }, svg,
    own.length > 0 && h("ul", { class: "dim flows" }, lines));
}

// The spans of now, and those that went a moment ago.
function recent(model, data) {
  const at = Date.now(), found = [], here = new Set();
  for (const peer of data.peers) for (const span of peer.spans) {
    if (span.model !== model.model) continue;
    const key = `${peer.peer} ${span.model} ${span.start}`;
    here.add(key);
    seen.set(key, { peer, span, at });
    found.push({ peer, span, isGone: false });
  }
  for (const [key, { peer, span, at: last }] of seen) {
    if (at - last > GONE_MS) seen.delete(key);
    else if (!here.has(key) && span.model === model.model) found.push({ peer, span, isGone: true });
  }
  return found.sort((a, b) => a.span.start - b.span.start || a.span.end - b.span.end);
}

// Each bar into the first lane that is free.
function place(bars) {
  const ends = [];
  return bars.map((bar) => {
    let lane = ends.findIndex((end) => end <= bar.span.start);
    if (lane < 0) lane = ends.length;
    ends[lane] = bar.span.end;
    return { ...bar, lane };
  });
}

function drawBar({ peer, span, lane, isGone }, x) {
  const y = TOP + lane * LANE, left = x(span.start) + 1, width = Math.max(4, x(span.end) - x(span.start) - 2);
  const state = isGone ? "gone" : span.state;
  const label = `${isGone ? "✖ " : ""}${peer.label}${peer.is_here ? " (here)" : ""}`;
  return s("g", { class: `bar ${state}` },
    s("title", {}, `${peer.label}: ${state}, blocks [${span.start},${span.end})`),
    s("rect", { x: left, y, width, height: BAR, rx: 5 }),
    s("text", { x: left + 7, y: y + 16 }, label.slice(0, Math.max(0, Math.floor((width - 10) / 8.5)))));
}

// Its hops: from which block to which, and the bar that they are drawn in, if there is one.
function hops(flow, bars) {
  return flow.chain.map((name) => {
    const { start, end, short } = HOP.exec(name)?.groups ?? {};
    const bar = bars.find((one) => one.peer.peer.endsWith(short) && one.span.start <= +start && +end <= one.span.end);
    return { name, start: +start, end: +end, bar };
  });
}

function drawFlow(flow, index, bars, x) {
  const points = hops(flow, bars).filter((hop) => hop.bar)
    .map(({ bar, start, end }) => [(x(start) + x(end)) / 2, TOP + bar.lane * LANE + BAR - 4]);
  if (!points.length) return null;
  const key = `${flow.model} ${flow.n_prompt} ${index}`;
  const moves = flow.n_generated !== flowing.get(key);
  flowing.set(key, flow.n_generated);
  const line = `M0 ${points[0][1]}L${points.map((point) => point.join(" ")).join("L")}L${WIDTH} ${points.at(-1)[1]}`;
  return s("g", { class: `flow ${moves ? "moves" : ""}` }, s("path", { d: line }),
    points.map(([cx, cy]) => s("circle", { cx, cy, r: 5 })));
}

const step = (n) => [1, 2, 5, 10, 20, 50, 100].find((size) => n / size <= 16) ?? 200;

function inWords(model, bars, flows) {
  const gone = bars.filter((bar) => bar.isGone).map((bar) => bar.peer.label);
  return `${model.name}: ${bars.length - gone.length} spans of ${model.n_blocks} blocks, ${flows.length} answers go through them now`
    + (gone.length ? `; gone: ${gone.join(", ")}` : "");
}
