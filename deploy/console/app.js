// The page around the views: navigation, figures, theme, the key, and the state that is asked for time and again.

import * as api from "./api.js";
import { History, spark } from "./chart.js";
import { h, mark, say } from "./dom.js";
import { percent, rate, seconds, whole } from "./format.js";
import * as decisions from "./view_decisions.js";
import * as overview from "./view_overview.js";
import * as playground from "./view_playground.js";
import * as prefixes from "./view_prefixes.js";
import * as replicas from "./view_replicas.js";
import * as scaling from "./view_scaling.js";
import * as store from "./view_store.js";

const VIEWS = { overview, replicas, prefixes, decisions, scaling, events: store, playground };
const EVERY = 1000;
const LONGEST = 15000;
const TIMEOUT = 10000;
const FIGURES = [
  ["requests", "Requests/s", (totals) => totals.requests_per_s, rate],
  ["ttft50", "TTFT p50", (totals) => totals.ttft_p50_s, seconds],
  ["ttft95", "TTFT p95", (totals) => totals.ttft_p95_s, seconds],
  ["itl50", "ITL p50", (totals) => totals.itl_p50_s, seconds],
  ["itl95", "ITL p95", (totals) => totals.itl_p95_s, seconds],
  ["hits", "Hit rate", (totals) => totals.hit_rate, percent],
  ["failed", "Errors/s", (totals) => totals.failed_per_s, rate],
  ["running", "Running", (totals) => totals.running, whole],
  ["waiting", "Waiting", (totals) => totals.waiting, whole],
];
const TITLES = {
  requests: "Sequences that got a first token, each second",
  ttft50: "Time to first token: half of all are faster",
  ttft95: "Time to first token: one in twenty is slower",
  itl50: "Time between tokens: half of all are faster",
  itl95: "Time between tokens: one in twenty is slower",
  hits: "Share of prompt tokens found in a cache",
  failed: "Sequences refused or failed, each second",
  running: "Sequences that replicas compute now",
  waiting: "Sequences that wait in replicas and in this ingress",
};

const find = (id) => document.getElementById(id);
const main = find("main");
const history = new History(180);
const context = { state: null, history, seen: decisions.memory() };
let view = null;
let delay = EVERY;
let timer = 0;

function show() {
  const name = VIEWS[location.hash.slice(2)] ? location.hash.slice(2) : "overview";
  for (const link of find("views").querySelectorAll("a")) mark(link, "aria-current", link.hash === `#/${name}` ? "page" : null);
  document.title = `${VIEWS[name].title} · Warmroot`;
  view?.close?.();
  view = VIEWS[name].open(context);
  main.replaceChildren(h("h1", {}, VIEWS[name].title), view.element);
  main.scrollTop = 0;
  if (context.state) view.update(context.state);
}

function navigation() {
  const links = Object.entries(VIEWS).map(([name, { title, icon }], place) =>
    h("li", {}, h("a", { href: `#/${name}`, "aria-keyshortcuts": place + 1 }, icon(), h("span", {}, title), h("kbd", { "aria-hidden": "true" }, String(place + 1)))),
  );
  find("views").append(...links);
  addEventListener("hashchange", () => {
    show();
    main.focus();
  });
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey;
    const name = Object.keys(VIEWS)[Number(event.key) - 1];
    if (name && !typing) location.hash = `#/${name}`;
  });
}

const cells = FIGURES.map(([name, label, value, text]) => {
  const shown = h("dd", {}, "–");
  const line = spark(60, 14);
  find("figures").append(h("div", { title: TITLES[name], "data-figure": name }, h("dt", {}, label), shown, line));
  return (totals) => {
    history.push(name, value(totals));
    say(shown, value(totals) === null ? "–" : text(value(totals)));
    line.show(history.of(name).slice(-60));
    mark(shown, "class", name === "failed" && value(totals) > 0 ? "bad" : null);
  };
});

function take(state) {
  context.state = state;
  context.seen.take(state);
  for (const cell of cells) cell(state.totals);
  say(find("who"), `${state.version} · answered by ${state.ingress.host}:${state.ingress.pid}`);
  view.update(state);
}

function connected(word, text) {
  mark(find("dot"), "data-state", word);
  mark(document.body, "data-stale", word === "lost" || null);
  say(find("connection"), text);
}

async function look() {
  clearTimeout(timer);
  try {
    if (!api.key.get() && !context.state && !(await api.isOpen())) return ask();
    take(await api.state(TIMEOUT));
    delay = EVERY;
    connected(context.state.ready ? "live" : "waiting", context.state.ready ? "Live" : "Live: no replica is ready");
    find("forget").hidden = !api.key.get();
    if (find("ask").open) find("ask").close();
  } catch (error) {
    if (error.status === 401 || error.status === 403) return ask(error);
    delay = Math.min(LONGEST, 2 * delay);
    connected("lost", `Connection lost; trying again in ${Math.round(delay / 1000)} s`);
    if (!(error instanceof TypeError || error instanceof DOMException || error.status)) console.error(error);
  }
  // A page that nobody sees asks seldom.
  clearTimeout(timer); // of another look that began meanwhile: or both would go on for ever
  timer = setTimeout(look, document.hidden ? LONGEST : delay);
}

function ask(error = null) {
  connected("closed", "Closed");
  say(find("ask-problem"), error?.message ?? "");
  api.key.forget();
  if (!find("ask").open) find("ask").showModal();
}

function theme() {
  const words = ["system", "light", "dark"];
  const button = find("theme");
  const set = (word) => {
    mark(document.documentElement, "data-theme", word === "system" ? null : word);
    localStorage.setItem("warmroot-theme", word);
    say(button, { system: "◐ System", light: "☀ Light", dark: "☾ Dark" }[word]);
    mark(button, "aria-label", `Colours: ${word}`);
  };
  let word = words.includes(localStorage.getItem("warmroot-theme")) ? localStorage.getItem("warmroot-theme") : "system";
  set(word);
  button.addEventListener("click", () => set((word = words[(words.indexOf(word) + 1) % words.length])));
}

find("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key.set(find("key").value.trim());
  find("key").value = "";
  look();
});
// Without a key there is nothing to go back to.
find("ask").addEventListener("cancel", (event) => event.preventDefault());
find("forget").addEventListener("click", () => {
  api.key.forget();
  location.reload();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
addEventListener("online", look);
theme();
navigation();
show();
look();
