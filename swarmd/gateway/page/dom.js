// Elements without a framework: h("p", {class: "dim"}, "text", child). Text is always text, never markup.

export const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

// The same for SVG.
export const s = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) if (child != null && child !== false) element.append(child); // any number
  return element;
}

export function button(text, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

// A table that scrolls by itself where there is little room. ``rows``: what stands in their cells, the first one a head.
export function table(label, heads, rows) {
  const body = rows.map(([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, body)));
}

// What an act on the browser's own storage gives; null where a browser keeps nothing at all.
export function stored(act) {
  try {
    return act();
  } catch {
    return null;
  }
}

export function number(value, digits = 3) {
  if (value == null) return "unknown";
  return Number(value.toPrecision(digits)).toLocaleString("en");
}

export function bytes(n) {
  if (n == null) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) (n /= 1024), i++;
  return `${n.toFixed(i ? 1 : 0)} ${units[i]}`;
}
