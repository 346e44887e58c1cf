// Elements made from data. Text becomes text nodes only; no code of the page parses HTML.

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

/** Make an HTML element. Attributes named `on…` are listeners; null and false attributes and children are omitted. */
export const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** Make an SVG element. */
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Make a table. Columns are `{head, cell(row), number?, header?}`; numbers align right, a header cell names its row. */
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

/** Make a box that scrolls sideways if necessary and takes keyboard focus. */
export const scroll = (label, ...children) =>
  el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, ...children);

/** Make a list of names and values. */
export const facts = (pairs) => pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));

/** Announce a short text to screen readers. */
export function announce(text) {
  document.getElementById("announce").textContent = text;
}

/** Return the stylesheet's colours and fonts, for canvas drawings. */
export function theme(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const dark = matchMedia("(prefers-color-scheme: dark)");
