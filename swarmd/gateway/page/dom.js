// Elements without a framework: h("p", {class: "dim"}, "text", child). Text is always text, never markup.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child != null && child !== false) element.append(child); // any number of them
  return element;
}

// A curve of numbers over time, with its range in words beside it: a picture alone says nothing to a screen reader.
// Its axis begins at 0, or, with ``fits``, at the least value: a loss that falls from 10 to 9.85 must be seen to fall.
export function curve(title, points, unit, fits = false) {
  const values = points.map(([, value]) => value);
  const least = fits ? Math.min(...values) : Math.min(...values, 0);
  const most = fits ? Math.max(...values) : Math.max(...values, 1e-9);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "curve");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const last = values.at(-1) ?? 0;
  const range = fits ? `from ${number(least, 4)} to ${number(most, 4)}` : `at most ${number(most)}`;
  const said = values.length ? `${title}: now ${number(last, 4)}${unit}, ${range}${unit}` : `${title}: nothing yet`;
  svg.setAttribute("aria-label", said);
  if (points.length > 1) {
    const [from, to] = [points[0][0], points.at(-1)[0]];
    const place = ([at, value]) =>
      `${(100 * (at - from)) / (to - from || 1)} ${96 - (92 * (value - least)) / (most - least || 1)}`;
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", "M" + points.map(place).join("L"));
    svg.append(path);
  }
  return h("figure", {}, svg, h("figcaption", { class: "dim" }, said));
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
