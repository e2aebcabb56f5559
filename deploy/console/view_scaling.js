// What the autoscaler decided, and why.

import { empty, h, keep, panel, say, shown, table } from "./dom.js";
import { moment } from "./format.js";
import { steps as icon } from "./icons.js";

export { icon };
export const title = "Autoscaling";

function row() {
  const cells = Array.from({ length: 4 }, () => h("td"));
  const step = h("span", { class: "step" });
  cells[2].append(step);
  return shown(h("tr", {}, cells), (item) => {
    const word = item.after > item.before ? "up" : item.after < item.before ? "down" : "stays";
    say(cells[0], moment(item.at));
    say(cells[1], item.model);
    say(step, `${item.before} → ${item.after}`);
    step.dataset.step = word;
    say(cells[3], item.reason);
  });
}

function want() {
  const model = h("h3");
  const count = h("span", { class: "count" });
  const why = h("p", { class: "dim" });
  return shown(h("div", { class: "want" }, model, count, why), (item) => {
    say(model, item.model);
    say(count, `${item.ready} ready, ${item.target} wanted`);
    say(why, item.reasons.join("; "));
  });
}

export function open() {
  const [box, body] = table("Decisions of the autoscaler", [["Time"], ["Model"], ["Replicas"], ["Reason"]]);
  const now = h("p", { class: "big" });
  const wants = h("div", { class: "tiles" });
  const nothing = empty("None. The number of replicas is fixed, or nothing has called for a change: max_replicas lets it follow the work.");
  return {
    element: h("div", { class: "grid" }, panel("Now", h("div", {}, now, wants)), panel("Decisions", h("div", {}, nothing, box))),
    update(state) {
      const ready = state.replicas.filter((replica) => replica.state === "ready").length;
      say(now, `${ready} of ${state.replicas.length} replicas ready, ${state.totals.waiting} sequences waiting`);
      keep(wants, state.autoscalers, (item) => item.model, want);
      wants.hidden = !state.autoscalers.length;
      keep(body, state.scaling, (item) => `${item.at} ${item.model}`, row);
      nothing.hidden = state.scaling.length > 0;
      box.hidden = !state.scaling.length;
    },
  };
}
