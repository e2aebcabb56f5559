// Small line charts of what the page has seen so far.

import { mark, s } from "./dom.js";

/** A line without axes. `show(values)` takes numbers and nulls, the latest last; the scale begins at zero. */
export function spark(width, height, kind = "line") {
  const area = s("path", { class: "area" });
  const line = s("path", { class: "stroke" });
  const svg = s("svg", { class: `spark ${kind}`, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  svg.show = (values, most = Math.max(...values.map((value) => value ?? 0))) => {
    const d = path(values, width, height, most || 1);
    mark(line, "d", d);
    mark(area, "d", d && `${d}L${width} ${height}L${start(d)} ${height}Z`);
  };
  return svg;
}

const start = (d) => d.slice(1, d.indexOf(" "));

function path(values, width, height, most) {
  const step = width / Math.max(1, values.length - 1);
  let d = "";
  values.forEach((value, place) => {
    if (value === null || value === undefined) return;
    const y = height - 1 - (value / most) * (height - 2);
    d += `${d ? "L" : "M"}${(place * step).toFixed(1)} ${y.toFixed(1)}`;
  });
  return d;
}

/** Values over time, bounded: `push(name, value)` each time the state comes. */
export class History {
  #values = new Map();
  #most;

  constructor(most) {
    this.#most = most;
  }

  push(name, value) {
    const values = this.#values.get(name) ?? Array(this.#most).fill(null);
    values.push(value ?? null);
    values.shift();
    this.#values.set(name, values);
  }

  /** From the first value on, and at least the latest `least`. */
  of(name, least = 60) {
    const values = this.#values.get(name) ?? [];
    const first = values.findIndex((value) => value !== null);
    return values.slice(Math.min(values.length - least, first < 0 ? values.length : first));
  }
}
