// Redis, or what stands in for it, and how well the ingress follows what replicas tell.

import { h, mark, panel, say } from "./dom.js";
import { NONE, seconds, whole } from "./format.js";
import { pulse as icon } from "./icons.js";

export { icon };
export const title = "Redis and events";

const FACTS = [
  ["Index", (store) => `${whole(store.index_blocks)} blocks`, "Distinct blocks that the prefix index knows"],
  ["Event lag p50", (store) => lag(store.lag_p50_s), "From a replica to the index, since start; as good as the nodes' clocks agree"],
  ["Event lag p95", (store) => lag(store.lag_p95_s), "One batch in twenty took longer"],
  ["Gaps", (store) => whole(store.gaps), "Batches that did not follow what was known; snapshots mended these"],
  ["Unreadable", (store) => whole(store.skipped), "Batches that could not be read"],
  ["Contradictions", (store) => whole(store.conflicts), "Batches that said otherwise of equal tokens; that part is left out"],
  ["Resyncs", (store) => whole(store.resyncs), "Replicas asked anew as the index was wrong of them"],
  ["Silent", (store) => whole(store.silent), "Replicas that live and do not tell what they hold"],
];
const COUNTS = [
  ["Expected hits", (routing) => `${whole(routing.predicted_hit_tokens)} tokens`],
  ["Found", (routing) => `${whole(routing.actual_hit_tokens)} tokens`],
  ["Best possible", (routing) => `${whole(routing.best_hit_tokens)} tokens`],
  ["Warm-ups", (routing) => whole(routing.warm_ups)],
  ["Moved", (routing) => whole(Object.values(routing.migrations).reduce((sum, count) => sum + count, 0))],
  ["Computed twice", (routing) => `${whole(routing.recomputed_tokens)} tokens`],
  ["Refused", (routing) => whole(Object.values(routing.refused).reduce((sum, count) => sum + count, 0))],
];

const lag = (value) => (value === null ? NONE : `≤ ${seconds(value)}`);

function facts(list) {
  const cells = list.map(([name, text, hint]) => {
    const value = h("dd");
    return [h("div", { title: hint ?? null }, h("dt", {}, name), value), (from) => say(value, text(from))];
  });
  return [h("dl", { class: "cards" }, cells.map(([cell]) => cell)), (from) => cells.forEach(([, show]) => show(from))];
}

export function open() {
  const word = h("p", { class: "big" });
  const where = h("code");
  const [store, showStore] = facts(FACTS);
  const [routing, showRouting] = facts(COUNTS);
  return {
    element: h("div", { class: "grid" }, panel("Metadata store", h("div", { class: "pad" }, word), where), panel("What this ingress follows", store), panel("Since its start", routing)),
    update(state) {
      const { fault, store: address } = state.metadata_store;
      say(word, fault ? `Out of reach: routing on what is known. ${fault}` : "In touch");
      mark(word, "data-state", fault ? "bad" : "good");
      say(where, address);
      showStore(state.metadata_store);
      showRouting(state.routing);
    },
  };
}
