// The gateway, as the page asks it. The token comes in the fragment of the address, which no server ever sees; it is
// kept for this tab only.

const KEY = "swarmd-token";
const given = new URLSearchParams(location.hash.replace(/^#\/?/, "")).get("token");
if (given) {
  sessionStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname + "#/chat");
}

export const hasToken = () => sessionStorage.getItem(KEY) != null;

export async function ask(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (hasToken()) headers.authorization = `Bearer ${sessionStorage.getItem(KEY)}`;
  const answer = await fetch(path, { ...options, headers });
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    const lacks = answer.status === 401 ? " Open this page with: swarmd open" : "";
    throw new Error((body?.error?.message ?? `the gateway answered ${answer.status}`) + lacks);
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
