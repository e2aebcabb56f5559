// Why requests went where they went: the latest choices, each with what every candidate would have cost.

import { empty, h, keep, mark, panel, say, shown, table } from "./dom.js";
import { moment, NONE, seconds, short, whole } from "./format.js";
import { fork } from "./icons.js";
import { chip } from "./parts.js";

export const title = "Decisions";
export const icon = fork;
export const columns = [["Time"], ["Request"], ["Replica"], ["Reason"], ["Prompt", "n"], ["Expected", "n"], ["Found", "n"], ["Cached"], ["Chosen in", "n"]];

const MOST = 300;

/** All that the page has seen: where several ingresses answer in turn, each tells of its own. */
export function memory() {
  const known = new Map();
  return {
    take(state) {
      for (const item of state.decisions) known.set(item.request_id, item);
      for (const id of [...known.keys()].sort((one, other) => known.get(other).at - known.get(one).at).slice(MOST)) known.delete(id);
    },
    latest: () => [...known.values()].sort((one, other) => other.at - one.at),
  };
}

function bar() {
  const expected = h("i", { class: "expected" });
  const found = h("i", { class: "found" });
  const track = h("span", { class: "hit", "aria-hidden": "true" }, expected, found);
  track.show = (item) => {
    const share = (tokens) => `${((100 * (tokens ?? 0)) / Math.max(1, item.prompt_tokens)).toFixed(1)}%`;
    expected.style.width = share(item.predicted_tokens);
    found.style.width = share(item.actual_tokens);
  };
  return track;
}

/** A decision in one line. */
export function row() {
  const cells = columns.map(([, kind]) => h("td", { class: kind ?? null }));
  const reason = h("span", { class: "reason" });
  const hit = bar();
  cells[3].append(reason);
  cells[7].append(hit);
  let replica = null;
  return shown(h("tr", {}, cells), (item) => {
    say(cells[0], moment(item.at));
    say(cells[1], short(item.request_id));
    mark(cells[1], "title", item.request_id);
    if (replica !== item.replica) cells[2].replaceChildren((replica = item.replica) ? chip(replica) : NONE);
    say(reason, item.reason);
    mark(reason, "data-reason", item.reason);
    say(cells[4], whole(item.prompt_tokens));
    say(cells[5], whole(item.predicted_tokens));
    say(cells[6], item.actual_tokens === null ? NONE : whole(item.actual_tokens));
    hit.show(item);
    say(cells[8], seconds(item.decided_in_s));
  });
}

function candidates(item) {
  const dearest = Math.max(...item.candidates.map((one) => one.cost), 1e-9);
  const lines = item.candidates.map((one) => {
    const length = h("i");
    length.style.width = `${((100 * one.cost) / dearest).toFixed(1)}%`;
    const is = one.replica === item.replica;
    return h("tr", { "aria-selected": is ? "true" : null, class: is ? "chosen" : null }, h("td", {}, chip(one.replica)), h("td", { class: "n" }, seconds(one.cost)), h("td", {}, h("span", { class: "cost", "aria-hidden": "true" }, length)), h("td", { class: "n" }, whole(one.cached_tokens)), h("td", {}, one.reason), h("td", {}, is ? "chosen" : ""));
  });
  const heads = ["Candidate", "Cost", "", "Cached tokens", "Reason", ""].map((text, place) => h(text ? "th" : "td", { scope: text ? "col" : null, class: place === 1 || place === 3 ? "n" : null }, text));
  const more = item.num_candidates - item.candidates.length;
  return h("div", { class: "why" }, h("table", { "aria-label": "Candidates" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, lines)), more > 0 ? h("p", { class: "dim" }, `and ${more} dearer ones`) : null, item.refusals.map((text) => h("p", { class: "problem" }, `Refused: ${text}`)));
}

function entry() {
  const line = row();
  const button = h("button", { type: "button", class: "fold", "aria-expanded": "false" }, "");
  const cell = line.children[1];
  let shownItem = null;
  let below = null;
  const group = h("tbody", { class: "entry" }, line);
  const unfold = () => {
    below = h("tr", { class: "below" }, h("td", { colspan: columns.length }, candidates(shownItem)));
    group.append(below);
  };
  button.addEventListener("click", () => {
    if (below) below = void below.remove();
    else unfold();
    mark(button, "aria-expanded", String(Boolean(below)));
  });
  return shown(group, (item) => {
    const isNews = shownItem && JSON.stringify(item) !== JSON.stringify(shownItem);
    shownItem = item;
    line.show(item);
    if (button.parentNode !== cell) cell.replaceChildren(button);
    say(button, short(item.request_id));
    mark(button, "aria-label", `Request ${item.request_id}: why it went there`);
    if (below && isNews) {
      below.remove();
      unfold();
    }
  });
}

export function open(context) {
  const [box, body] = table("Decisions", columns);
  const entries = body.parentNode;
  body.remove(); // each decision has a body of its own, with what is unfolded below it
  const search = h("input", { type: "search", placeholder: "Request id, replica or reason", "aria-label": "Search decisions", spellcheck: "false" });
  const pause = h("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Pause");
  const nothing = empty("");
  let isPaused = false;
  const show = () => {
    const wanted = search.value.trim().toLowerCase();
    const items = context.seen.latest().filter((item) => `${item.request_id} ${item.replica} ${item.reason}`.toLowerCase().includes(wanted));
    keep(entries, items.slice(0, 100), (item) => item.request_id, entry);
    say(nothing, wanted ? "No decision matches." : "No request has been routed yet: send one, in the playground for example.");
    nothing.hidden = items.length > 0;
    box.hidden = !items.length;
  };
  search.addEventListener("input", show);
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    mark(pause, "aria-pressed", String(isPaused));
    say(pause, isPaused ? "Go on" : "Pause");
    if (!isPaused) show();
  });
  return {
    element: panel("Latest decisions", h("div", {}, nothing, box), h("span", { class: "with" }, search, pause)),
    update: () => isPaused || show(),
  };
}
