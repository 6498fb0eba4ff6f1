// The gateway, as the page asks it. The token comes in the fragment of the address, which no server ever sees; it is
// kept for this tab only.

import { stored } from "./dom.js";

const KEY = "swarmd-token";
const given = new URLSearchParams(location.hash.replace(/^#\/?/, "")).get("token");
if (given) {
  stored(() => sessionStorage.setItem(KEY, given));
  history.replaceState(null, "", location.pathname + "#/chat");
}

const token = () => stored(() => sessionStorage.getItem(KEY));
export const hasToken = () => token() != null;

// Have the page be asked for with this key from now on, in this tab.
export function useKey(key) {
  stored(() => sessionStorage.setItem(KEY, key));
  location.reload();
}

export class NeedsKey extends Error {
  constructor() {
    super("a key is needed: enter one below, or open this page with: swarmd open");
  }
}

export async function ask(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (hasToken()) headers.authorization = `Bearer ${token()}`;
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    if (answer.status === 401) throw new NeedsKey();
    throw new Error(body?.error?.message ?? `the gateway answered ${answer.status}`);
  }
  return answer;
}

// Server-sent events of any request: {name, data} as they come.
export async function* events(path, options = {}) {
  const answer = await ask(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      const lines = text.slice(0, end).split("\n");
      const data = lines.filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      const name = lines.find((l) => l.startsWith("event: "))?.slice(7) ?? "message";
      if (data) yield { name, data };
    }
  }
}
