// Every replica: what it is, what it does, and the processes of its gang.

import { h, keep, mark, panel, say, shown, table } from "./dom.js";
import { bytes, percent, short, whole } from "./format.js";
import { stack } from "./icons.js";
import { changing, chip, meter } from "./parts.js";

export const title = "Replicas";
export const icon = stack;

const COLUMNS = [["Replica"], ["State"], ["Model"], ["Node"], ["Running", "n"], ["Waiting", "n"], ["To compute", "n"], ["KV in use"], ["Cached", "n"], ["Hit rate", "n"], ["KV format"], ["Weights"], ["Computes"]];

function gang(replica) {
  const stages = Map.groupBy ? Map.groupBy(replica.ranks, (rank) => rank.stage) : new Map([[0, replica.ranks]]);
  return `tp ${Math.max(...[...stages.values()].map((ranks) => ranks.length))} × pp ${stages.size}`;
}

function row(item) {
  const cells = COLUMNS.map(([, kind]) => h("td", { class: kind ?? null }));
  const kv = meter("KV memory in use");
  const state = h("span", { class: "state" });
  cells[0].append(chip(item.replica));
  cells[1].append(state);
  cells[7].append(kv);
  return shown(h("tr", {}, cells), (replica) => {
    say(state, replica.state);
    mark(state, "data-state", replica.state);
    say(cells[2], replica.model);
    say(cells[3], replica.ranks.length ? `${replica.ranks.length} ranks, ${gang(replica)}` : short(replica.node) || "–");
    mark(cells[3], "title", replica.node);
    say(cells[4], `${replica.running} / ${replica.max_num_seqs}`);
    say(cells[5], whole(replica.waiting));
    say(cells[6], whole(replica.waiting_tokens));
    kv.show(replica.kv_cache_usage, `${percent(replica.kv_cache_usage)} of ${whole(replica.kv_total_blocks)}`);
    say(cells[8], `${whole(replica.cached_blocks)} blocks`);
    say(cells[9], percent(replica.hit_rate));
    say(cells[10], replica.kv_format || "–");
    say(cells[11], [replica.weights_format, replica.weights_version].filter(Boolean).join(" · ") || "–");
    say(cells[12], [replica.kernels, replica.num_threads && `${replica.num_threads} threads`].filter(Boolean).join(" · ") || "–");
  });
}

function rank() {
  const cells = Array.from({ length: 7 }, (_, place) => h("td", { class: place > 3 ? "n" : null }));
  return shown(h("tr", {}, cells), ([replica, item]) => {
    if (!cells[0].firstChild) cells[0].append(chip(replica.replica));
    [item.rank, item.stage, item.host, item.pid, bytes(item.memory_bytes), whole(item.last_step)].forEach((text, place) => say(cells[place + 1], text));
  });
}

export function open() {
  const [box, body] = table("Replicas", COLUMNS);
  const [gangs, ranks] = table("Ranks", [["Replica"], ["Rank"], ["Stage"], ["Node"], ["Process", "n"], ["Memory", "n"], ["Last step", "n"]]);
  const counts = h("span", { class: "dim" });
  const news = changing();
  const crew = panel("Ranks of gangs", gangs);
  return {
    element: h("div", { class: "grid" }, panel("All replicas", box, h("span", { class: "with" }, news, counts)), crew),
    update(state) {
      const ready = state.replicas.filter((replica) => replica.state === "ready").length;
      say(counts, `${ready} of ${state.replicas.length} ready`);
      news.show(state.updates);
      keep(body, state.replicas, (replica) => replica.replica, row);
      const all = state.replicas.flatMap((replica) => replica.ranks.map((item) => [replica, item]));
      keep(ranks, all, ([replica, item]) => `${replica.replica} ${item.rank}`, rank);
      crew.hidden = !all.length;
    },
  };
}
