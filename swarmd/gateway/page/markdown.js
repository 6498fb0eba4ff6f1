// Markdown as far as models write it, built of elements: paragraphs, headings, lists, quotes, code, tables. Nothing is
// ever parsed as HTML, so nothing has to be cleaned. Links go nowhere but to http and https.

import { h } from "./dom.js";

export function markdown(text) {
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
      blocks.push(h("h" + Math.min(6, heading[1].length + 2), {}, ...spans(heading[2])));
      i++;
    } else if (item) {
      const ordered = /\d/.test(item[1]), items = [];
      const start = ordered ? parseInt(item[1]) : null;
      for (; i < lines.length && /^\s*([-*+]|\d{1,9}[.)])\s+/.test(lines[i]); i++) {
        const words = [lines[i].replace(/^\s*([-*+]|\d{1,9}[.)])\s+/, "")];
        while (i + 1 < lines.length && /^\s{2,}\S/.test(lines[i + 1]) && !/^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[i + 1]))
          words.push(lines[++i].trim());
        items.push(h("li", {}, ...spans(words.join(" "))));
      }
      blocks.push(h(ordered ? "ol" : "ul", { start }, ...items));
    } else if (/^\s*\|/.test(line) && /^\s*\|[\s|:-]+\|?\s*$/.test(lines[i + 1] ?? "")) {
      const rows = [];
      for (; i < lines.length && /^\s*\|/.test(lines[i]); i++) rows.push(lines[i].trim().replace(/^\||\|$/g, "").split("|"));
      const cells = (name, row, more = {}) => h("tr", {}, ...row.map((cell) => h(name, more, ...spans(cell.trim()))));
      const [head, , ...body] = rows;
      blocks.push(h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", {},
        h("thead", {}, cells("th", head, { scope: "col" })), h("tbody", {}, ...body.map((row) => cells("td", row))))));
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      for (; i < lines.length && /^\s*>/.test(lines[i]); i++) quoted.push(lines[i].replace(/^\s*>\s?/, ""));
      blocks.push(h("blockquote", {}, ...spans(quoted.join("\n"))));
    } else if (!line.trim()) {
      i++;
    } else {
      const words = [line];
      for (i++; i < lines.length && lines[i].trim() && !/^\s*(```|~~~|#{1,6}\s|>|\||[-*+]\s|\d{1,9}[.)]\s)/.test(lines[i]); i++)
        words.push(lines[i]);
      blocks.push(h("p", {}, ...spans(words.join("\n"))));
    }
  }
  return blocks;
}

const MARKS = /(`+)([^`]|[^`][^]*?[^`])\1(?!`)|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

function spans(text) {
  const found = text.match(MARKS);
  if (!found) return breaks(text);
  const [whole, , code, bold, italic, label, link] = found;
  const element = code != null ? h("code", {}, code)
    : bold != null ? h("strong", {}, ...spans(bold))
    : italic != null ? h("em", {}, ...spans(italic))
    : h("a", { href: link, rel: "noopener noreferrer", target: "_blank" }, label);
  return [...breaks(text.slice(0, found.index)), element, ...spans(text.slice(found.index + whole.length))];
}

function breaks(text) {
  return text.split("\n").flatMap((line, i) => (i ? [h("br"), line] : [line])).filter((part) => part !== "");
}
