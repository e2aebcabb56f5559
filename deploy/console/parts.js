// Pieces that several views show.

import { h, mark, say, shown } from "./dom.js";
import { hue, number, short } from "./format.js";

/** A replica by number, colour and the end of its id. */
export function chip(replica) {
  return h("span", { class: `chip ${hue(replica)}`, title: replica }, h("b", {}, String(number(replica))), short(replica));
}

/** Weights that change now, in a line; `show(updates)`. */
export function changing() {
  return shown(h("span", { class: "dim", role: "status" }), function (updates) {
    say(this, updates.map((one) => `New weights of ${one.model}: ${one.stage}`).join("; "));
  });
}

/** A share as a bar with its text; `show(share, text)`. */
export function meter(label) {
  const fill = h("i");
  const text = h("span");
  const bar = h("span", { class: "meter", role: "img" }, fill, text);
  bar.show = (share, words) => {
    fill.style.width = `${(70 * Math.min(1, Math.max(0, share || 0))).toFixed(1)}px`;
    mark(bar, "data-level", share > 0.9 ? "high" : share > 0.7 ? "mid" : null);
    mark(bar, "aria-label", `${label}: ${words}`);
    say(text, words);
  };
  return bar;
}
