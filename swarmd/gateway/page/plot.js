// A curve of numbers (uPlot), with its range in words below it: a picture alone says nothing to a screen reader.

import { h, number } from "./dom.js";

const HEIGHT = 180; // pixels

// ``points``: [place, value] in order. Its axis begins at 0, or, with ``fits``, at the least value: a loss that falls
// from 10 to 9.85 must be seen to fall. ``xLabel`` says what the places are.
export function plot(title, points, { unit = "", fits = false, xLabel = "" } = {}) {
  const values = points.map(([, value]) => value);
  const least = fits ? Math.min(...values) : Math.min(...values, 0);
  const most = fits ? Math.max(...values) : Math.max(...values, 1e-9);
  const range = fits ? `from ${number(least, 4)} to ${number(most, 4)}` : `at most ${number(most)}`;
  const said = values.length ? `${title}: now ${number(values.at(-1), 4)}${unit}, ${range}${unit}` : `${title}: nothing yet`;
  const place = h("div", { class: "plot", role: "img", "aria-label": said });
  if (points.length > 1) requestAnimationFrame(() => draw(place, points, least, most, xLabel, title));
  return h("figure", {}, place, h("figcaption", { class: "dim" }, said));
}

function draw(place, points, least, most, xLabel, title) {
  if (!place.isConnected) return;
  const probe = h("span", { class: "plot-line" });
  place.append(probe);
  const line = getComputedStyle(probe).color, text = getComputedStyle(place).color;
  probe.remove();
  const axis = { stroke: text, grid: { stroke: text, width: 0.2 }, ticks: { show: false }, font: "12px system-ui" };
  const room = (most - least) * 0.05 || 0.5;
  new window.uPlot({
    width: place.clientWidth || 300, height: HEIGHT, cursor: { y: false }, legend: { show: true, live: true },
    scales: { x: { time: false }, y: { range: [least - (least ? room : 0), most + room] } },
    axes: [{ ...axis, label: xLabel, labelSize: xLabel ? 20 : 0, labelFont: "12px system-ui", size: 28 }, { ...axis, size: 60 }],
    series: [{ label: xLabel || "at" }, { label: title, stroke: line, width: 2 }],
  }, [points.map(([at]) => at), points.map(([, value]) => value)], place);
}
