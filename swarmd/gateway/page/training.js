// Runs that this machine knows of: how far they are, who takes part, how the loss goes.

import { curve, h, number } from "./dom.js";

export function training(news) {
  const element = h("section", { "aria-label": "Training" });
  function update(kind) {
    if (kind && kind !== "training") return;
    const runs = news.training?.runs ?? [];
    if (news.training?.error) return element.replaceChildren(h("p", { class: "bad" }, news.training.error));
    if (!runs.length) return element.replaceChildren(h("p", { class: "dim" }, "No training runs are known here; swarmd train start begins one."));
    element.replaceChildren(...runs.map(draw));
  }
  return { element, update };
}

function draw(run) {
  const losses = (run.losses ?? []).map((loss, i) => [i, loss]);
  const rows = Object.entries(run).filter(([, value]) => typeof value === "string" || typeof value === "number");
  return h("section", {}, h("h2", {}, run.name),
    losses.length ? curve("Loss", losses, "") : null,
    h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, typeof value === "number" ? number(value, 5) : value)])));
}
