// The radix tree of hot prefixes, drawn: each bar is a run of cached tokens, striped by the replicas that hold it.

import { empty, h, panel, s, say } from "./dom.js";
import { hue, number, whole } from "./format.js";
import { tree as icon } from "./icons.js";
import { chip } from "./parts.js";

export { icon };
export const title = "Prefix tree";

const ROW = 30;
const BAR = 16;
const GAP = 64;
const LEFT = 10;
const TEXT = 7;

/** Bars grow with the logarithm of their tokens: a system prompt is not a thousand times a turn's width. */
const width = (tokens) => Math.round(20 + 14 * Math.log2(1 + tokens / 8));

/** Trees of parents and children out of a list with parents first. */
function grow(nodes) {
  const known = new Map();
  const roots = [];
  for (const node of nodes) {
    const made = { ...node, below: [] };
    known.set(node.id, made);
    const above = known.get(node.parent);
    made.level = above ? above.level + 1 : 1;
    (above ? above.below : roots).push(made);
  }
  return roots;
}

/** Gives every node its place; leaves get a row each, others stand in the middle of what continues them. */
function lay(node, x, row) {
  node.x = x;
  node.width = width(node.num_tokens);
  if (!node.below.length) {
    node.y = row * ROW + ROW / 2;
    return row + 1;
  }
  let next = row;
  for (const child of node.below) next = lay(child, x + node.width + GAP, next);
  node.y = (node.below[0].y + node.below.at(-1).y) / 2;
  return next;
}

const all = (roots) => roots.flatMap((node) => [node, ...all(node.below)]);

function label(node) {
  // Special tokens, which most prompts begin with, tell nothing from another.
  const text = (node.text ?? "").replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ").trim() || `${whole(node.num_tokens)} tokens`;
  return text.length > 46 ? `${text.slice(0, 45)}…` : text;
}

function spoken(node) {
  const holders = node.replicas.length ? node.replicas.map((replica) => `replica ${number(replica)}`).join(", ") : "nobody";
  return `${label(node)}: ${whole(node.num_tokens)} tokens after ${whole(node.depth)}, held by ${holders}`;
}

function stripes(node) {
  const height = BAR / Math.max(1, node.replicas.length);
  const thick = node.replicas.length > 1 ? Math.max(0.8, height - 1) : height;
  return node.replicas.map((replica, place) => s("rect", { class: `fill ${hue(replica)}`, x: node.x, y: node.y - BAR / 2 + place * height, width: node.width, height: thick, rx: Math.min(4, thick / 2.5) }));
}

function link(node, child) {
  const from = node.x + node.width;
  const middle = from + GAP / 2;
  return s("path", { class: "link", d: `M${from} ${node.y}C${middle} ${node.y} ${middle} ${child.y} ${child.x} ${child.y}` });
}

function draw(node, isChosen, choose) {
  const badges = node.replicas.slice(0, 8).map((replica) => number(replica)).join(" ");
  const more = node.num_children - node.below.length;
  const isLeaf = !node.below.length;
  const note = [isLeaf && label(node), node.text !== null && `${whole(node.num_tokens)} t`, badges && `[${badges}]`, more > 0 && `+${more}`].filter(Boolean).join("  ");
  const text = isLeaf
    ? s("text", { x: node.x + node.width + TEXT, y: node.y + 4 }, note)
    : s("text", { class: "above", x: node.x, y: node.y - BAR / 2 - 4 }, `${label(node).slice(0, Math.max(4, Math.floor((node.width + GAP) / 6.2)))}`);
  return s(
    "g",
    {
      role: "treeitem",
      "aria-level": node.level,
      "aria-label": spoken(node),
      "aria-selected": String(isChosen),
      tabindex: isChosen ? "0" : "-1",
      class: [node.age === 0 ? "fresh" : "", node.heat > 0 ? "hot" : "", isChosen ? "chosen" : ""].join(" "),
      "data-id": node.id,
      onclick: () => choose(node.id, true),
    },
    s("rect", { class: "ring", x: node.x - 3, y: node.y - BAR / 2 - 3, width: node.width + 6, height: BAR + 6, rx: 6 }),
    node.replicas.length ? null : s("rect", { class: "ground", x: node.x, y: node.y - BAR / 2, width: node.width, height: BAR, rx: 4 }),
    stripes(node),
    text,
  );
}

/** One namespace's trees as a picture. */
function picture(roots, chosen, choose) {
  let rows = 0;
  for (const root of roots) rows = lay(root, LEFT, rows);
  const nodes = all(roots);
  const right = Math.max(...nodes.map((node) => node.x + node.width + (node.below.length ? 0 : 7 * (label(node).length + 16))));
  const height = rows * ROW + 12;
  return s(
    "svg",
    { class: "tree", width: right + LEFT, height, viewBox: `0 -12 ${right + LEFT} ${height}`, role: "tree", "aria-label": "Prefixes" },
    s("g", { "aria-hidden": "true" }, nodes.flatMap((node) => node.below.map((child) => link(node, child)))),
    nodes.map((node) => draw(node, node.id === chosen, choose)),
  );
}

function heading(first) {
  const whose = first.is_private ? (first.tenants.length ? `tenant ${first.tenants.join(", ")}` : "private") : "shared";
  return h("h3", {}, h("span", { class: `whose ${first.is_private ? "private" : ""}` }, whose), first.model, h("span", { class: "dim" }, first.namespace));
}

function details(node, previews) {
  const why = { none: "previews are off", shared: "only prompts of keys that share are shown", all: "" }[previews];
  const facts = [
    ["Begins", node.text === null ? h("span", { class: "dim" }, why || "not known") : h("q", { class: "preview" }, node.text)],
    ["Tokens", `${whole(node.num_tokens)}, after ${whole(node.depth)}`],
    ["Held by", node.replicas.length ? node.replicas.map(chip) : "nobody: only what continues it is held"],
    ["Continued by", `${whole(node.num_children)} nodes${node.num_children > node.below.length ? `, ${node.below.length} shown` : ""}`],
    ["Saves", node.heat ? `${whole(node.heat)} prompt tokens per second` : "nothing lately that is known"],
    ["Stored", node.age === 0 ? "last of all" : `before ${whole(node.age)} others`],
    ["Id", node.id],
  ];
  return h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function open() {
  const canvas = h("div", { class: "canvas" });
  const side = h("div", { class: "details" }, empty("Choose a bar to see whose it is."));
  const legend = h("span", { class: "legend" });
  const counts = h("span", { class: "dim" });
  let chosen = null;
  let last = "";
  let state = null;

  function choose(id, focus) {
    chosen = id;
    last = "";
    show();
    if (focus) canvas.querySelector(`[data-id="${CSS.escape(id)}"]`)?.focus();
  }

  function show() {
    const now = JSON.stringify([state.prefixes, chosen]);
    if (now === last) return;
    last = now;
    const focused = canvas.contains(document.activeElement) && document.activeElement.dataset.id;
    const roots = grow(state.prefixes);
    const nodes = all(roots);
    if (!nodes.some((node) => node.id === chosen)) chosen = nodes[0]?.id ?? null;
    const spaces = new Map();
    for (const root of roots) spaces.set(root.namespace, [...(spaces.get(root.namespace) ?? []), root]);
    canvas.replaceChildren(...[...spaces.values()].flatMap((group) => [heading(group[0]), h("div", { class: "scroll" }, picture(group, chosen, choose))]));
    if (!nodes.length) canvas.replaceChildren(empty("Nothing is cached yet."));
    const node = nodes.find((one) => one.id === chosen);
    side.replaceChildren(node ? details(node, state.previews) : empty("Nothing is cached yet."));
    if (focused) canvas.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  function move(event) {
    const items = [...canvas.querySelectorAll("[role=treeitem]")];
    const place = items.findIndex((item) => item.dataset.id === chosen);
    const node = state.prefixes.find((one) => one.id === chosen);
    const child = state.prefixes.find((one) => one.parent === chosen);
    const to = { ArrowDown: items[place + 1]?.dataset.id, ArrowUp: items[place - 1]?.dataset.id, ArrowRight: child?.id, ArrowLeft: node?.parent, Home: items[0]?.dataset.id, End: items.at(-1)?.dataset.id };
    if (!(event.key in to)) return;
    event.preventDefault();
    if (to[event.key]) choose(to[event.key], true);
  }
  canvas.addEventListener("keydown", move);

  return {
    element: h("div", { class: "split" }, panel("Prefixes that are hot or were used last", canvas, h("span", { class: "with" }, legend, counts)), panel("Chosen prefix", side)),
    update(news) {
      state = news;
      const { metadata_store: store, prefixes, replicas } = state;
      say(counts, `${prefixes.length} nodes of an index of ${whole(store.index_blocks)} blocks`);
      const names = replicas.map((replica) => replica.replica);
      if (legend.childElementCount !== names.length) legend.replaceChildren(...names.map(chip));
      show();
    },
  };
}
