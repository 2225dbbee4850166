// Building and updating elements. Data only ever becomes text or a number here, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Return a new element. `attributes` are set as they are; children are elements or texts. */
export function el(name, attributes = {}, ...children) {
  return build(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, name), attributes, children);
}

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Set a text if it is another one, so that what stays is not announced, nor selected text lost. */
export function setText(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function setAttribute(element, name, value) {
  const wanted = String(value);
  if (element.getAttribute(name) !== wanted) element.setAttribute(name, wanted);
}

/**
 * Make `parent` show `items`, one element each, in their order. An element stays as long as its item's key does,
 * with its focus, and whether it is open. `create(item)` returns an element, `update(element, item)` fills it.
 */
export function keyed(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const child of parent.children) known.set(child.dataset.key, child);
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = known.get(key);
    known.delete(key);
    if (!child) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}

/** Show the text for "nothing there", or hide it together with nothing else. */
export function showEmpty(id, isEmpty) {
  byId(id).hidden = !isEmpty;
}

/** Fill a row's cells with texts, or with elements that `update` makes once. */
export function fillCells(row, texts) {
  texts.forEach((text, place) => setText(row.children[place], text));
}

export function rowOf(count, numberColumns = [], headColumn = -1) {
  const row = el("tr");
  for (let place = 0; place < count; place++) {
    const cell = place === headColumn ? el("th", { scope: "row" }) : el("td");
    if (numberColumns.includes(place)) cell.classList.add("number");
    row.append(cell);
  }
  return row;
}
