// A conversation as a tree of turns: what is edited or asked again grows a branch, and nothing is lost.
//
//     turns    0 user ── 1 assistant ── 2 user
//                   └── 3 assistant (again)          leaf: 3, so 0 and 3 are shown
//
// A turn: {parent, next, role, text, thoughts, calls, files, told, kind}. Plain data, as the browser keeps it.

const MOST_TURNS = 5_000; // of an imported one
const isNumber = Number.isFinite, isString = (value) => typeof value === "string";
export const areTools = (value) => Array.isArray(value) && value.every((tool) => isString(tool?.function?.name));
const OPTIONS = { temperature: isNumber, top_p: isNumber, max_tokens: isNumber, seed: isNumber, effort: isString, system: isString, tools: areTools };

export function begin() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", changed: Date.now(), model: "", options: {}, turns: [], leaf: -1 };
}

export function add(conversation, role, fields = {}) {
  conversation.turns.push({ parent: conversation.leaf, role, text: "", thoughts: "", calls: [], files: [], told: "", kind: "", ...fields });
  conversation.leaf = conversation.turns.length - 1;
  follow(conversation, conversation.leaf);
  conversation.changed = Date.now();
  if (!conversation.title && role === "user") conversation.title = (fields.text || fields.files?.[0]?.name || "").slice(0, 60);
  return conversation.leaf;
}

// The places of the turns that are shown, in their order.
export function path({ turns, leaf }) {
  const places = [];
  for (let place = leaf; place >= 0; place = turns[place].parent) places.unshift(place);
  return places;
}

// Turns that follow the same one, as another of the same: its branches.
export function branches({ turns }, place) {
  const { parent, role } = turns[place];
  return turns.flatMap((turn, other) => (turn.parent === parent && turn.role === role ? [other] : []));
}

// Have a turn be the one that follows its parent, when that is shown again.
function follow({ turns }, place) {
  const parent = turns[turns[place].parent];
  if (parent) parent.next = place;
}

// Show another branch, as far as it went when it was last seen.
export function show(conversation, place) {
  follow(conversation, place);
  let leaf = place;
  while (conversation.turns[leaf].next != null) leaf = conversation.turns[leaf].next;
  conversation.leaf = leaf;
}

export const shown = (conversation) => path(conversation).map((place) => conversation.turns[place]);

// What came of the calls that are shown: call id -> text.
export function results(conversation) {
  return new Map(shown(conversation).filter((turn) => turn.role === "tool").map((turn) => [turn.call, turn.text]));
}

// Files as they are sent and exported, each in a fence that nothing in it can end.
function fenced(turn) {
  return turn.files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}\n${fence}\n\n`;
  }).join("");
}

// As the API takes them. Files stand before what is said of them; an answer that failed was none.
export function messages(conversation) {
  const turns = shown(conversation).filter((turn) => turn.role !== "assistant" || turn.text || turn.calls.length);
  const said = turns.map((turn) => {
    if (turn.role === "tool") return { role: "tool", tool_call_id: turn.call, content: turn.text };
    const files = fenced(turn);
    const calls = turn.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: turn.role, content: files + turn.text, ...(calls.length ? { tool_calls: calls } : {}) };
  });
  const { system } = conversation.options;
  return system ? [{ role: "system", content: system }, ...said] : said;
}

export function asMarkdown(conversation) {
  const names = { user: "You", assistant: conversation.model || "Model", tool: "Result" };
  const said = shown(conversation)
    .map((turn) => `## ${names[turn.role]}\n\n${fenced(turn)}${turn.text}${turn.calls.map((call) => `\n\n\`${call.name}(${call.text})\``).join("")}\n`);
  return `# ${conversation.title}\n\n${said.join("\n")}`;
}

// Read one that was exported. What is wrong with it is thrown, and what it says beside what is known is left out.
export function parse(text) {
  const given = JSON.parse(text);
  const turns = Array.isArray(given?.turns) ? given.turns : [];
  const isTurn = (turn, place) => ["user", "assistant", "tool"].includes(turn?.role) && isString(turn.text)
    && Number.isInteger(turn.parent) && turn.parent >= -1 && turn.parent < place;
  if (turns.length > MOST_TURNS) throw new Error(`it has ${turns.length} turns, at most ${MOST_TURNS} are shown`);
  if (!turns.length || !turns.every(isTurn)) throw new Error("a list of turns was expected, each with its role, text and parent");
  const listed = (items, ...names) => (Array.isArray(items) ? items : []).filter((item) => names.every((name) => isString(item?.[name])))
    .map((item) => Object.fromEntries(names.map((name) => [name, item[name]])));
  const plain = (value) => (isString(value) ? value : "");
  const options = Object.fromEntries(Object.entries(given.options ?? {}).filter(([name, value]) => Object.hasOwn(OPTIONS, name) && OPTIONS[name](value)));
  const read = { ...begin(), title: plain(given.title).slice(0, 200), model: plain(given.model), options };
  for (const { parent, role, ...turn } of turns) {
    read.leaf = parent;
    add(read, role, { text: turn.text, thoughts: plain(turn.thoughts), told: plain(turn.told), kind: plain(turn.kind), model: plain(turn.model),
      name: plain(turn.name), call: plain(turn.call), isCut: turn.isCut === true,
      calls: listed(turn.calls, "id", "name", "text"), files: listed(turn.files, "name", "text") });
  }
  if (Number.isInteger(given.leaf) && turns[given.leaf]) show(read, given.leaf);
  return read;
}

export function matches(conversation, words) {
  const wanted = words.toLowerCase();
  return conversation.title.toLowerCase().includes(wanted)
    || conversation.turns.some((turn) => turn.text.toLowerCase().includes(wanted));
}
