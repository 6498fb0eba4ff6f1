// Runs that this machine knows of: how far they are, who takes part, how the loss goes.

import { bytes, h, number, table } from "./dom.js";
import { plot } from "./plot.js";

export function training(news) {
  const element = h("section", { "aria-label": "Training" });
  function update(kind) {
    if (kind && kind !== "training") return;
    const runs = news.training?.runs ?? [];
    if (news.training?.error) return element.replaceChildren(h("p", { class: "bad" }, news.training.error));
    if (!runs.length) return element.replaceChildren(h("p", { class: "dim" }, "No training runs are known here; swarmd train start begins one."));
    const label = (id) => news.swarm?.peers.find((peer) => peer.peer === id)?.label ?? id.slice(-8);
    element.replaceChildren(...[...grouped(runs).values()].map((rows) => draw(rows, label)));
  }
  return { element, update };
}

// A run in stages has a row for each stage that is here: those that it holds before those that it signs for.
function grouped(runs) {
  const byRun = new Map();
  for (const run of [...runs].sort((a, b) => (a.role === "anchor") - (b.role === "anchor"))) {
    byRun.set(run.run, [...(byRun.get(run.run) ?? []), run]);
  }
  return byRun;
}

function draw([run, ...more], label) {
  const first = Math.max(0, run.update - run.losses.length); // the last ones are known
  const losses = run.losses.map((loss, i) => [first + i + 1, loss]);
  return h("section", {}, h("h2", {}, run.name),
    run.failure && h("p", { class: "bad" }, `It does not go on here: ${run.failure}`),
    losses.length > 0 && plot("Loss", losses, { fits: true, xLabel: "updates" }),
    h("ul", {}, ...sentences(run, label).map((text) => h("li", {}, text))),
    run.stages?.length > 0 && stages(run, [run, ...more], label),
    run.peers.length > 0 && others(run.peers, label),
    h("p", { class: "dim" }, `Run ${run.run}`));
}

// What swarmd train status says, in sentences; what is not known yet is left out.
function sentences(run, label) {
  const found = [
    `This machine ${ROLES[run.role] ?? `is ${run.role}`}${run.device ? ` on ${run.device}` : ""}. State: ${run.state}${run.why ? `; ${run.why}` : ""}.`,
    `${run.update}${run.updates == null ? "" : ` of ${run.updates}`} updates are done, from ${count(run.samples, "sample")}.`,
    `The next update has ${number(run.gathered)} of ${count(run.target, "sample")}${run.left_s == null ? "" : `; the rest takes about ${time(run.left_s)}`}.`,
    `This machine computes ${number(run.samples_per_s)} samples/s: ${count(run.samples_counted, "sample")} counted, ${number(run.samples_wasted, 6)} did not.`,
  ];
  if (run.measured_samples_per_s) found.push(`All together compute ${number(run.measured_samples_per_s)} samples/s.`);
  if (run.parameters) found.push(`${run.stage == null ? "The model" : `Stage ${run.stage}`} has ${number(run.parameters, 6)} parameters; who joins now fetches ${bytes(run.state_bytes)}.`);
  if (run.last_round) found.push(round(run.last_round));
  if (run.rounds_failed) found.push(`Of the rounds led here, ${run.rounds_failed} failed and ${run.rounds_led} did not.`);
  if (run.catch_ups) found.push(`This machine was behind and caught up ${run.catch_ups === 1 ? "once" : `${run.catch_ups} times`}, the last time in ${time(run.last_catch_up_s)}.`);
  if (run.death_costs_at_most_s) found.push(`When a member vanishes, the others wait for it ${time(run.death_costs_at_most_s)} at most.`);
  const { audits } = run;
  if (audits.checked) found.push(`${count(audits.checked, "contribution")} of others ${audits.checked === 1 ? "was" : "were"} computed again here: ${audits.wrong ? `${audits.wrong} wrong` : "none wrong"}.`);
  if (audits.trouble) found.push(audits.trouble);
  if (run.shunned.length) found.push(`Done without, for faulty numbers: ${run.shunned.map(label).join(", ")}.`);
  return found;
}

const ROLES = { train: "trains", reduce: "averages, and trains nothing", anchor: "is an anchor: it keeps the ledger and signs" };

function round(last) {
  const left = last.left_out.length ? `; left out: ${last.left_out.join(", ")}` : "";
  return `The last round that was led here had ${count(last.n_members, "member")}: gathered in ${time(last.gather_s)}, averaged in ${time(last.average_s)}, committed in ${time(last.commit_s)}${left}.`;
}

// The pipeline: what each stage holds and who holds it, how far it is, and how busy it is where that is known here.
function stages(run, rows, label) {
  const heads = ["stage", "holds", "update", "samples", "busy here", "holders"];
  const lines = run.stages.map((stage) => {
    const here = rows.find((row) => row.stage === stage.stage && row.role === "train");
    const busy = here?.busy == null ? "" : `${number(100 * here.busy)} %`;
    const holders = stage.holders.map(label).join(", ") || "nobody: the run waits";
    return [String(stage.stage), holds(stage), String(stage.update), `${stage.samples} of ${run.target}`, busy, holders];
  });
  return table("Stages", heads, lines);
}

function holds({ first_block: first, end_block: end }) {
  if (first == null) return "embedding and head";
  return end == null ? `blocks from ${first} on` : `blocks ${first} to ${end - 1}`;
}

function others(peers, label) {
  const heads = ["peer", "role", "update", "samples/s", "doing"];
  const rows = peers.map((peer) => [label(peer.peer), peer.role, String(peer.update), number(peer.samples_per_s), peer.status]);
  return table("Other members", heads, rows);
}

const count = (n, what) => `${number(n, 6)} ${what}${n === 1 ? "" : "s"}`;
const time = (s) => (s == null ? "an unknown time" : s < 120 ? `${number(s)} s` : `${number(s / 60)} min`);
