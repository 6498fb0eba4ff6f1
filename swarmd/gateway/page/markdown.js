// Markdown as far as models write it, built of elements: paragraphs, headings, lists, quotes, code, tables. Nothing is
// ever parsed as HTML, so nothing has to be cleaned. Links go nowhere but to http and https.

import { h } from "./dom.js";

const MOST_CHARACTERS = 100_000; // with marks: beyond that a drawing takes longer than a glance

export function markdown(text) {
  if (text.length > MOST_CHARACTERS) return [h("p", { class: "plain" }, text)];
  const lines = text.split("\n"), blocks = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = line.match(/^\s*(```+|~~~+)/);
    const heading = line.match(/^(#{1,6})\s+(.*)$/);
    const item = line.match(/^\s*([-*+]|\d{1,9}[.)])\s+/);
    if (fence) {
      const code = [];
      for (i++; i < lines.length && !lines[i].trim().startsWith(fence[1]); i++) code.push(lines[i]);
      i++;
      blocks.push(h("pre", { tabindex: 0 }, h("code", {}, code.join("\n"))));
    } else if (heading) {
      blocks.push(h("h" + Math.min(6, heading[1].length + 2), {}, spans(heading[2])));
      i++;
    } else if (item) {
      const ordered = /\d/.test(item[1]), items = [];
      const start = ordered ? parseInt(item[1]) : null;
      for (; i < lines.length && /^\s*([-*+]|\d{1,9}[.)])\s+/.test(lines[i]); i++) {
        const words = [lines[i].replace(/^\s*([-*+]|\d{1,9}[.)])\s+/, "")];
        while (i + 1 < lines.length && /^\s{2,}\S/.test(lines[i + 1]) && !/^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[i + 1]))
          words.push(lines[++i].trim());
        items.push(h("li", {}, spans(words.join(" "))));
      }
      blocks.push(h(ordered ? "ol" : "ul", { start }, items));
    } else if (/^\s*\|/.test(line) && /^\s*\|[\s|:-]+$/.test(lines[i + 1] ?? "")) {
      const rows = [];
      for (; i < lines.length && /^\s*\|/.test(lines[i]); i++) rows.push(lines[i].trim().replace(/^\||\|$/g, "").split("|"));
      const cells = (name, row, more = {}) => h("tr", {}, row.map((cell) => h(name, more, spans(cell.trim()))));
      const [head, , ...body] = rows;
      blocks.push(h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", {},
        h("thead", {}, cells("th", head, { scope: "col" })), h("tbody", {}, body.map((row) => cells("td", row))))));
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      for (; i < lines.length && /^\s*>/.test(lines[i]); i++) quoted.push(lines[i].replace(/^\s*>\s?/, ""));
      blocks.push(h("blockquote", {}, spans(quoted.join("\n"))));
    } else if (!line.trim()) {
      i++;
    } else {
      const words = [line];
      for (i++; i < lines.length && lines[i].trim() && !/^\s*(```|~~~|#{1,6}\s|>|\||[-*+]\s|\d{1,9}[.)]\s)/.test(lines[i]); i++)
        words.push(lines[i]);
      blocks.push(h("p", {}, spans(words.join("\n"))));
    }
  }
  return blocks;
}

// Text with marks: code, bold, italics, links. One pass from left to right, whatever a model writes: what an opening mark
// needs is looked up once and kept, and nothing calls itself but for what stands within bold or italics, which has no
// stars.
function spans(text) {
  const parts = [], find = finder(text);
  let plain = 0, i = 0;
  while (i < text.length) {
    const found = MARKS.includes(text[i]) && find(i);
    if (!found) {
      i += text[i] === "`" ? run(text, i) : 1;
      continue;
    }
    breaks(text.slice(plain, i), parts);
    parts.push(found.element);
    i = plain = found.end;
  }
  breaks(text.slice(plain), parts);
  return parts;
}

const MARKS = "`*[";

// How many of the same character stand there.
function run(text, start) {
  let end = start;
  while (text[end] === text[start]) end++;
  return end - start;
}

// Of a text: what stands at a mark, and where it ends; null where the mark opens nothing.
function finder(text) {
  const code = new Map(); // by length: where runs of so many backticks begin, the first last
  for (let i = text.length - 1; i >= 0; i--) {
    if (text[i] !== "`") continue;
    const end = i;
    while (text[i - 1] === "`") i--;
    const length = end - i + 1;
    if (!code.has(length)) code.set(length, []);
    code.get(length).push(i);
  }
  let bracket = -1, link = null; // the next closing one, and the address behind it
  const inCode = (start) => {
    const length = run(text, start), places = code.get(length);
    while (places.length && places.at(-1) <= start) places.pop();
    const end = places.at(-1);
    return end == null ? null : { element: h("code", {}, text.slice(start + length, end)), end: end + length };
  };
  const inStars = (start) => {
    const length = text[start + 1] === "*" ? 2 : 1, from = start + length, end = text.indexOf("*", from);
    const closes = end > from && (length === 1 || text[end + 1] === "*");
    if (!closes || (length === 1 && /\s/.test(text[from]))) return null;
    return { element: h(length === 2 ? "strong" : "em", {}, spans(text.slice(from, end))), end: end + length };
  };
  const inBrackets = (start) => {
    if (bracket < start && bracket < text.length) {
      bracket = text.indexOf("]", start);
      if (bracket < 0) bracket = text.length;
      ADDRESS.lastIndex = bracket;
      link = ADDRESS.exec(text);
    }
    if (!link || bracket - start < 2) return null;
    const label = text.slice(start + 1, bracket), attributes = { href: link[1], rel: "noopener noreferrer", target: "_blank" };
    return label.includes("[") ? null : { element: h("a", attributes, label), end: bracket + link[0].length };
  };
  return (i) => (text[i] === "`" ? inCode(i) : text[i] === "*" ? inStars(i) : inBrackets(i));
}

const ADDRESS = /\]\((https?:\/\/[^\s)]+)\)/y;

function breaks(text, parts) {
  let isFirst = true;
  for (const line of text.split("\n")) {
    if (!isFirst) parts.push(h("br"));
    if (line) parts.push(line);
    isFirst = false;
  }
}
