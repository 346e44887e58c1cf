// Elements made from data. Text only ever becomes text nodes: nothing here, or anywhere on the page, parses HTML.

const SVG = document.getElementById("svg").namespaceURI;

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element. Attributes named `on…` are listeners; null and false attributes and children are left out. */
export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** A table. Columns are `{head, cell(row), number?, header?}`; numbers stand right, a header cell names its row. */
export function table(caption, columns, rows) {
  const kind = (column) => (column.number ? "number" : null);
  return el(
    "table",
    {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, columns.map((c) => el("th", { scope: "col", class: kind(c), title: c.title }, c.head)))),
    el(
      "tbody",
      {},
      rows.map((row) =>
        el(
          "tr",
          {},
          columns.map((c) => el(c.header ? "th" : "td", { scope: c.header ? "row" : null, class: kind(c) }, c.cell(row))),
        ),
      ),
    ),
  );
}

/** A box that scrolls sideways where it must, reachable by keyboard. */
export const scroll = (label, ...children) =>
  el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);

/** Names and values side by side. */
export const facts = (pairs) => pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));

/** Tell a screen reader, in a few words, what has come. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}

/** The colours and fonts of the stylesheet, for what is drawn by hand. */
export function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const dark = matchMedia("(prefers-color-scheme: dark)");
