// Markdown as elements: marked reads it, and what it found is built here. Nothing is ever parsed as HTML, so nothing has
// to be cleaned. Links go nowhere but to http and https.

import { button, h } from "./dom.js";
import hljs from "./vendor/highlight.js";
import { lexer } from "./vendor/marked.js";

const MOST_CHARACTERS = 100_000; // with marks: beyond that a drawing takes longer than a glance
const MOST_HIGHLIGHTED = 20_000; // of one block of code: it is highlighted anew with each drawing

export function markdown(text) {
  if (text.length <= MOST_CHARACTERS) {
    try {
      return lexer(text, { gfm: true, breaks: true }).map(block);
    } catch { // thousands of marks within each other: too deep for its recursion
    }
  }
  return [h("p", { class: "plain" }, text)];
}

function block(token) {
  switch (token.type) {
    case "space": case "def": return null;
    case "heading": return h(`h${Math.min(6, token.depth + 2)}`, {}, spans(token.tokens));
    case "paragraph": return h("p", {}, spans(token.tokens));
    case "text": return h("span", {}, token.tokens ? spans(token.tokens) : token.text);
    case "code": return code(token.text, token.lang);
    case "blockquote": return h("blockquote", {}, token.tokens.map(block));
    case "checkbox": return checkbox(token);
    case "hr": return h("hr");
    case "list": return h(token.ordered ? "ol" : "ul", { start: token.ordered && token.start }, token.items.map(item));
    case "table": return table(token);
    default: return h("p", {}, token.raw); // HTML, for one: it is text
  }
}

function item(token) {
  return h("li", {}, token.tokens.map(block));
}

const checkbox = (token) => h("input", { type: "checkbox", disabled: true, checked: token.checked, "aria-label": "done" });

function table(token) {
  const cells = (name, row, more = {}) =>
    h("tr", {}, row.map((cell, i) => h(name, { ...more, class: token.align[i] && `to-${token.align[i]}` }, spans(cell.tokens))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, cells("th", token.header, { scope: "col" })),
      h("tbody", {}, token.rows.map((row) => cells("td", row)))));
}

function spans(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong": return h("strong", {}, spans(token.tokens));
      case "em": return h("em", {}, spans(token.tokens));
      case "del": return h("del", {}, spans(token.tokens));
      case "codespan": return h("code", {}, token.text);
      case "br": return h("br");
      case "link": return link(token.href, spans(token.tokens));
      case "image": return link(token.href, token.text || token.href);
      case "checkbox": return checkbox(token);
      case "escape": return "()[]".includes(token.text) ? token.raw : token.text; // those of formulas stay
      case "text": return token.tokens ? h("span", {}, spans(token.tokens)) : plain(token.text);
      default: return token.raw;
    }
  });
}

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0", copy: "\u00a9" };
const plain = (text) => text.replace(/&(amp|lt|gt|quot|#39|nbsp|copy);/g, (_, name) => ENTITIES[name]);

function link(href, shown) {
  return /^https?:\/\//i.test(href) ? h("a", { href, rel: "noopener noreferrer", target: "_blank" }, shown) : h("span", {}, shown);
}

// A block of code: its language, a button that copies it, and colours where the language is known.
export function code(text, language = "") {
  const name = (language ?? "").split(/\s/)[0].toLowerCase();
  const copy = navigator.clipboard && button("Copy", async () => { // browsers lend it to encrypted pages and this machine's
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  }, { class: "quiet" });
  const isKnown = hljs.getLanguage(name) && text.length <= MOST_HIGHLIGHTED;
  const shown = isKnown ? coloured(hljs.highlight(text, { language: name, ignoreIllegals: true })._emitter.rootNode.children) : text;
  return h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", { class: "dim" }, name || "text"), copy),
    h("pre", { tabindex: 0 }, h("code", {}, shown)));
}

const coloured = (nodes) => nodes.map((node) => (typeof node === "string" ? node
  : h("span", { class: (node.scope ?? "").split(".").map((scope) => `hljs-${scope}`).join(" ") }, coloured(node.children))));
