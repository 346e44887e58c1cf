// One figure per head: a heat map, a readout below it, and a table of the same numbers.

import { colour } from "./colour.js";
import { dark, el, scroll, table } from "./dom.js";
import { real } from "./format.js";
import { heatMap } from "./heatmap.js";

const drawn = new Map(); // of each grid of heat maps, the function that draws it
dark.addEventListener("change", () => {
  for (const [grid, draw] of drawn) grid.isConnected ? draw() : drawn.delete(grid);
});

const RANGES = { shared: "the same for all heads", own: "each head its own", row: "each query its own", unit: "0 to 1" };

/** Draw heat maps of weights `[head][query][key]`, with a choice of colour range. Labels are `{queries, keys}`; `titles` name the heads. */
export function headFigures(heads, labels, titles = heads.length === 1 ? [""] : heads.map((_, head) => `head ${head}`)) {
  const name = (list, i) => list[i] ?? String(i);
  const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 0);
  const byRow = heads.map((rows) => rows.map(most));
  const shared = most(byRow.map(most));
  const tops = {
    shared: (rows) => rows.map(() => shared || 1),
    own: (rows) => rows.map(() => most(rows) || 1),
    row: (rows) => rows.map((top) => top || 1),
    unit: (rows) => rows.map(() => 1),
  };
  const figures = heads.map((rows, head) => figure(rows, titles[head], heads.length, (axis, i) => name(labels[axis], i)));
  const legend = el("span", { class: "scale" });
  const select = el("select", {}, Object.entries(RANGES).map(([value, text]) => el("option", { value }, text)));
  const draw = () => {
    figures.forEach(({ map }, head) => map.draw(tops[select.value](byRow[head])));
    legend.replaceChildren(...scaleLegend({ shared: real(shared), unit: "1", own: "largest of the head", row: "largest of the query" }[select.value]));
  };
  select.addEventListener("change", draw);
  const grid = el("div", { class: `heads ${heads.length > 2 ? "many" : "few"}` }, figures.map(({ node }) => node));
  let width = 0;
  const observer = new ResizeObserver(([{ contentRect: box }]) => {
    if (box.width === width) return;
    width = box.width;
    draw();
  });
  observer.observe(grid);
  for (const old of drawn.keys()) if (!old.isConnected) drawn.delete(old);
  drawn.set(grid, draw);
  return el(
    "div",
    {},
    el("h3", {}, heads.length === 1 ? "Weights" : `Weights of ${heads.length} heads`),
    el("div", { class: "range" }, legend, el("label", {}, "Colour range ", select)),
    grid,
  );
}

function scaleLegend(end) {
  const ramp = el("span", { class: "ramp", "aria-hidden": true });
  ramp.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(colour).join(", ")})`;
  const hatch = el("span", { class: "swatch hatched", "aria-hidden": true });
  return ["0", ramp, end, hatch, "exactly 0"];
}

function figure(rows, title, many, name) {
  const readout = el("output", { class: "readout" }, "\u00a0");
  const tell = (query, key) => {
    const text = `${name("queries", query)} → ${name("keys", key)}`;
    readout.replaceChildren(el("span", {}, text), el("b", {}, real(rows[query][key], 4)));
  };
  const map = heatMap(rows, name, title || "weights", tell, () => readout.replaceChildren("\u00a0"));
  const enlarge = el("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Enlarge");
  const details = el("details", {}, el("summary", {}, "As a table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(asTable(rows, title, name));
  });
  const caption = title && el("figcaption", {}, el("span", {}, title), enlarge);
  const node = el("figure", {}, caption, map.canvas, readout, details);
  enlarge.addEventListener("click", () => {
    const large = node.classList.toggle("large");
    enlarge.setAttribute("aria-pressed", String(large));
    enlarge.textContent = large ? "Reduce" : "Enlarge";
    map.draw();
  });
  return { node, map };
}

function asTable(rows, title, name) {
  const columns = [
    { head: "query", header: true, cell: ([i]) => name("queries", i) },
    ...(rows[0] ?? []).map((_, key) => ({ head: name("keys", key), number: true, cell: ([, row]) => real(row[key]) })),
  ];
  const caption = `Weights${title ? ` of ${title}` : ""}: rows are queries, columns are keys`;
  return scroll(caption, table(caption, columns, rows.map((row, i) => [i, row])));
}
