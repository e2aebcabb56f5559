// How the cluster fares at a glance: charts, replicas, routers, the latest decisions.

import { spark } from "./chart.js";
import { h, keep, mark, panel, say, shown, table } from "./dom.js";
import { percent, rate, seconds, short, whole } from "./format.js";
import { gauge } from "./icons.js";
import { changing, chip, meter } from "./parts.js";
import { row as decision, columns } from "./view_decisions.js";

export const title = "Overview";
export const icon = gauge;

const CHARTS = [
  ["Requests per second", [["requests", "started"], ["failed", "failed"]], rate],
  ["Time to first token", [["ttft95", "p95"], ["ttft50", "p50"]], seconds],
  ["Time between tokens", [["itl95", "p95"], ["itl50", "p50"]], seconds],
  ["Prompt tokens found cached", [["hits", "hit rate"]], percent, 1],
];

function chart([label, lines, text, most]) {
  const drawn = lines.map(([name, word], place) => [name, h("span", { class: `k${place}` }, word), spark(300, 64, `k${place}`)]);
  const top = h("span", { class: "scale" });
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, label, h("span", { class: "keys" }, drawn.map(([, word]) => word))), h("div", { class: "plot" }, top, drawn.map(([, , line]) => line)));
  figure.show = (history) => {
    const scale = most ?? Math.max(...lines.flatMap(([name]) => history.of(name).map((value) => value ?? 0)));
    say(top, scale ? text(scale) : "");
    for (const [name, , line] of drawn) line.show(history.of(name), scale || 1);
  };
  return figure;
}

function tile(item) {
  const name = h("span", { class: "name" });
  const kv = meter("KV memory in use");
  const seats = meter("Sequences");
  const load = h("span", { class: "dim" });
  const badge = chip(item.replica);
  return shown(h("a", { class: "tile", href: "#/replicas" }, badge, name, h("span", { class: "dim" }, "KV"), kv, h("span", { class: "dim" }, "Seqs"), seats, load), (replica) => {
    say(name, replica.state);
    mark(name, "data-state", replica.state);
    kv.show(replica.kv_cache_usage, percent(replica.kv_cache_usage));
    seats.show(replica.running / replica.max_num_seqs, `${replica.running}/${replica.max_num_seqs}`);
    say(load, `${replica.waiting} waiting · hit rate ${percent(replica.hit_rate)}`);
  });
}

function router() {
  const cells = Array.from({ length: 7 }, (_, place) => h("td", { class: place > 2 ? "n" : null }));
  return shown(h("tr", {}, cells), (item) => {
    const { figures } = item;
    const texts = [short(item.name), item.model, item.is_own ? "this ingress" : item.silent_s > 2 ? `silent for ${seconds(item.silent_s)}` : "heard", whole(item.in_flight), rate(figures.requests_per_s), seconds(figures.ttft_p95_s), percent(figures.hit_rate)];
    cells.forEach((cell, place) => say(cell, texts[place]));
    mark(cells[0], "title", item.name);
  });
}

export function open(context) {
  const charts = CHARTS.map(chart);
  const tiles = h("div", { class: "tiles" });
  const news = changing();
  const [box, body] = table("Routers", [["Router"], ["Model"], ["Heard"], ["In flight", "n"], ["Requests/s", "n"], ["TTFT p95", "n"], ["Hit rate", "n"]]);
  const [latest, rows] = table("Latest decisions", columns);
  const element = h(
    "div",
    { class: "grid" },
    h("div", { class: "charts" }, charts),
    panel("Replicas", tiles, news),
    panel("Latest decisions", latest, h("a", { href: "#/decisions" }, "All")),
    panel("Routers", box, h("span", { class: "dim" }, "each ingress and handle has one for each model")),
  );
  return {
    element,
    update(state) {
      for (const one of charts) one.show(context.history);
      news.show(state.updates);
      keep(tiles, state.replicas, (replica) => replica.replica, tile);
      keep(body, state.routers, (item) => item.name + item.model, router);
      keep(rows, context.seen.latest().slice(0, 6), (item) => item.request_id, decision);
    },
  };
}
