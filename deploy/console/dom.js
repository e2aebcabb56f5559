// Makes and keeps elements. Text is only ever set as text: what a prompt holds cannot become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes (`on…` are listeners, null and false are left out) and children (nodes or texts). */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets a text where it differs, so that selections and screen readers are left alone. */
export function say(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

/** Sets or removes an attribute where it differs. */
export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Keeps one child of `parent` for each item, in their order. `make(item)` gives an element with a method `show(item)`;
 * children of known keys stay the same elements, so focus and what is unfolded stay, too.
 */
export function keep(parent, items, key, make) {
  const known = parent.kept ?? (parent.kept = new Map());
  const wanted = new Set(items.map(key));
  for (const [name, child] of known) {
    if (!wanted.has(name)) {
      child.remove();
      known.delete(name);
    }
  }
  let place = parent.firstElementChild;
  while (place && !place.show) place = place.nextElementSibling; // a table's head
  for (const item of items) {
    let child = known.get(key(item));
    if (!child) known.set(key(item), (child = make(item)));
    child.show(item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
}

/** An element with `show`, for `keep`. */
export function shown(element, show) {
  element.show = show;
  return element;
}

/** What stands where there is nothing to show. */
export function empty(text) {
  return h("p", { class: "empty" }, text);
}

/** A panel with a heading; `aside` stands at the heading's end. */
export function panel(title, body, aside = null, attributes = {}) {
  return h("section", { class: "panel", "aria-label": title, ...attributes }, h("div", { class: "head" }, h("h2", {}, title), aside), body);
}

/** A table in a box that scrolls; columns are [heading, class]. Returns [box, body]. */
export function table(label, columns) {
  const body = h("tbody");
  const heads = columns.map(([text, kind]) => h("th", { scope: "col", class: kind ?? null }, text));
  const box = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
  return [box, body];
}
