// Which view is shown, and the one stream of news that all of them read.

import { events, NeedsKey, useKey } from "./api.js";
import { chat } from "./chat.js";
import { stored } from "./dom.js";
import { machine } from "./machine.js";
import { swarm } from "./swarm.js";
import { training } from "./training.js";

const VIEWS = { chat, swarm, machine, training };
const TITLES = { chat: "Chat", swarm: "Swarm", machine: "This machine", training: "Training" };
const key = document.getElementById("key");
const news = { swarm: null, flows: null, machine: null, training: null };
let shown = null, name = "";

function show() {
  const wanted = location.hash.replace(/^#\//, "") || "chat";
  if (wanted === name && shown) return;
  name = VIEWS[wanted] ? wanted : "chat";
  shown = VIEWS[name](news);
  const view = document.getElementById("view");
  view.replaceChildren(shown.element);
  document.title = `${TITLES[name]} - swarmd`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown.update?.();
}

function health(text, kind) {
  const place = document.getElementById("health");
  if (place.textContent !== text) place.textContent = text;
  place.className = kind;
}

function told(kind, data) {
  news[kind] = data;
  if (kind === "swarm") {
    const peers = `${data.n_peers} peer${data.n_peers === 1 ? "" : "s"}`;
    const whole = data.models.filter((model) => !model.missing.length);
    health(
      whole.length ? `● ${peers}, whole: ${whole.map((m) => m.name).join(", ")}`
        : `✖ ${peers}, no model is whole`,
      whole.length ? "good" : "bad",
    );
  }
  shown?.update?.(kind);
}

async function listen() {
  for (let pause = 1000; ; pause = Math.min(30000, 2 * pause)) {
    try {
      for await (const { name, data } of events("/page/news")) {
        told(name, JSON.parse(data));
        pause = 1000;
      }
      health("✖ the gateway has gone; trying again", "bad");
    } catch (error) {
      health(`✖ ${error.message}`, "bad");
      if (error instanceof NeedsKey) key.hidden = false;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  stored(() => localStorage.setItem("swarmd-theme", document.documentElement.dataset.theme));
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would be that of a view
  document.getElementById("view").focus();
});
key.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(key.querySelector("input").value.trim());
});
const theme = stored(() => localStorage.getItem("swarmd-theme"));
if (theme) document.documentElement.dataset.theme = theme;
addEventListener("hashchange", show);
show();
listen();
