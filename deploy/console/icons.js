// Line drawings for the navigation.

import { s } from "./dom.js";

const draw = (...paths) => () =>
  s("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, paths.map((d) => s("path", { d })));

export const gauge = draw("M2 12a6 6 0 1 1 12 0", "M8 12l3-4");
export const stack = draw("M2 3h12v4H2z", "M2 9h12v4H2z", "M5 5h.01M5 11h.01");
export const tree = draw("M2 8h3M5 8c3 0 2-5 5-5h4M5 8c3 0 2 5 5 5h4M5 8h9");
export const fork = draw("M8 14V9M8 9C8 6 3 7 3 2M8 9c0-3 5-2 5-7", "M1.5 3.5L3 2l1.5 1.5M11.5 3.5L13 2l1.5 1.5");
export const steps = draw("M2 13h3V9h4V6h3V2h2", "M2 2v12h12");
export const pulse = draw("M1 8h3l2-5 3 10 2-5h4");
export const bubble = draw("M2 3h12v8H7l-3 3v-3H2z");
