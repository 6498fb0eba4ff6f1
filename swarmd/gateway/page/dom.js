// Elements without a framework: h("p", {class: "dim"}, "text", child). Text is always text, never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
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

// The same for SVG.
export function s(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value != null && value !== false) element.setAttribute(key, value);
  for (const child of children.flat(Infinity)) if (child != null && child !== false) element.append(child);
  return element;
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
