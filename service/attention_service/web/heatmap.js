// A heat map on a canvas, with labels if they fit, and a cursor for pointer and arrow keys.

import { colour, onColour } from "./colour.js";
import { theme } from "./dom.js";

const LABEL = 12; // the smallest cell with room for a label, in pixels
const NUMBER = 34; // the smallest cell with room for a number, in pixels
const LONGEST = 12; // the maximal length of a label, in characters

const clip = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

/** Make a canvas for weights `[query][key]`, and `draw(tops)`; `tops` are the weights at the end of each query's colour scale. */
export function heatMap(rows, name, title, tell, silence) {
  const canvas = document.createElement("canvas");
  const base = document.createElement("canvas"); // the picture without the cursor
  const size = { queries: rows.length, keys: rows[0]?.length ?? 0 };
  let place = { left: 0, top: 0, cell: 1 };
  let at = null;
  let most = [];

  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute(
    "aria-label",
    `Heat map of ${title}: ${size.queries} queries by ${size.keys} keys. Arrow keys move from cell to cell; the table below has the numbers.`,
  );

  function draw(tops = most) {
    most = tops;
    const width = canvas.parentElement?.clientWidth;
    if (!width || !size.keys) return;
    const pen = base.getContext("2d");
    const font = `11px ${theme("sans")}`;
    pen.font = font;
    place = layout(pen, width, size, name, canvas.closest("figure.large, .heads.few") !== null);
    const ratio = devicePixelRatio || 1;
    const inner = { width: place.left + place.cell * size.keys + 1, height: place.top + place.cell * size.queries + 1 };
    for (const sheet of [base, canvas]) {
      sheet.width = Math.round(inner.width * ratio);
      sheet.height = Math.round(inner.height * ratio);
    }
    canvas.style.width = `${inner.width}px`;
    canvas.style.height = `${inner.height}px`;
    pen.scale(ratio, ratio);
    pen.font = font;
    for (let query = 0; query < size.queries; query += 1) {
      for (let key = 0; key < size.keys; key += 1) cell(pen, query, key);
    }
    axes(pen);
    show();
  }

  function show() {
    if (!base.width || !base.height) return;
    const pen = canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.drawImage(base, 0, 0);
    pen.scale(devicePixelRatio || 1, devicePixelRatio || 1);
    if (at) outline(pen);
  }

  function cell(pen, query, key) {
    const weight = Number(rows[query][key]);
    const x = place.left + key * place.cell;
    const y = place.top + query * place.cell;
    const share = weight / most[query];
    const gap = place.cell >= 6 ? 1 : 0;
    const side = place.cell - gap;
    if (weight === 0) {
      if (side >= 4) hatch(pen, x, y, side);
      return;
    }
    pen.fillStyle = colour(share);
    pen.fillRect(x, y, side, side);
    if (place.cell >= NUMBER) {
      pen.fillStyle = onColour(share);
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(weight.toFixed(2).replace(/^0/, ""), x + side / 2, y + side / 2);
    }
  }

  function hatch(pen, x, y, side) {
    pen.strokeStyle = theme("hatch");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x, y + side);
    pen.lineTo(x + side, y);
    pen.stroke();
  }

  function axes(pen) {
    if (place.cell < LABEL) return;
    pen.fillStyle = theme("soft");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (let i = 0; i < size.queries; i += 1) pen.fillText(clip(name("queries", i)), place.left - 6, place.top + (i + 0.5) * place.cell);
    for (let j = 0; j < size.keys; j += 1) {
      pen.save();
      pen.translate(place.left + (j + 0.5) * place.cell, place.top - 6);
      if (place.upright) {
        pen.textAlign = "center";
        pen.textBaseline = "alphabetic";
      } else {
        pen.rotate(-Math.PI / 2);
        pen.textAlign = "left";
      }
      pen.fillText(clip(name("keys", j)), 0, 0);
      pen.restore();
    }
  }

  function outline(pen) {
    pen.strokeStyle = theme("accent");
    pen.lineWidth = 2;
    pen.strokeRect(place.left + at.key * place.cell - 0.5, place.top + at.query * place.cell - 0.5, place.cell, place.cell);
  }

  function move(query, key) {
    const next = query >= 0 && key >= 0 && query < size.queries && key < size.keys ? { query, key } : null;
    if (next?.query === at?.query && next?.key === at?.key) return;
    at = next;
    show();
    if (at) tell(at.query, at.key);
    else silence();
  }

  const point = (event) => {
    const x = event.offsetX - place.left;
    const y = event.offsetY - place.top;
    move(Math.floor(y / place.cell), Math.floor(x / place.cell));
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => move(-1, -1));
  canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && !at && move(0, 0));
  canvas.addEventListener("blur", () => move(-1, -1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = at ?? { query: 0, key: 0 };
    move(
      Math.min(size.queries - 1, Math.max(0, from.query + step[0])),
      Math.min(size.keys - 1, Math.max(0, from.key + step[1])),
    );
  });
  return { canvas, draw };
}

function layout(pen, width, size, name, large) {
  const longest = (axis, many) => Array.from({ length: many }, (_, i) => pen.measureText(clip(name(axis, i))).width).reduce((a, b) => Math.max(a, b), 0);
  const left = Math.ceil(longest("queries", size.queries)) + 10;
  const across = longest("keys", size.keys);
  const fitted = Math.floor((width - left - 2) / size.keys);
  const cell = Math.min(large ? 64 : 48, fitted);
  if (cell < LABEL) return { left: 0, top: 0, cell: Math.max(1, Math.min(LABEL - 1, (width - 2) / size.keys)), upright: false };
  const upright = across <= cell - 2;
  return { left, top: upright ? 20 : Math.ceil(across) + 10, cell, upright };
}
