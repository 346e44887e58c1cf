/** Paints the visible part of a matrix on a canvas: cells, labels, marginals and the cursor. */

import { INKS, SCALES, UNCHOSEN, onColour, onDifference, step } from "./colour";
import type { Theme } from "./colour";
import { ranged } from "./drawings";
import type { Range } from "./drawings";
import { clip, fitted } from "../numbers/format";
import type { Cells, Strip } from "../numbers/cells";
import { largest } from "../numbers/matrix";
import type { Matrix, Spread } from "../numbers/matrix";
import { NOWHERE } from "./pointed";
import type { Pointed } from "./pointed";
import { FONT } from "./scene";

const LABEL = 12; // the smallest cell with room for a label, in CSS pixels
const NUMBER = 34; // the smallest cell with room for a number
const PADDING = 3; // beside a number
const MOST_CELL = 44;
/** The most height of a map, and what else a screen shows beside it. */
const HIGH = { least: 420, beside: 440 };
const LARGE_HIGH = { least: 620, beside: 140 };
const STRIP = 26; // the width of the marginals
const MARGIN = 15; // beside cells without labels: the names of the axes

export interface Picture {
  of: Cells;
  queries: string[];
  keys: string[];
  theme: Theme;
  range: Range;
  /** Of the numbers that share the scale of colours. */
  spread: Spread;
  signed: boolean;
  /** Show the bars of rows and columns. */
  strips: boolean;
  large: boolean;
  /** The names of the rows and of the columns. */
  axes: [string, string];
  /** Cells with a ring around them: queries and keys. */
  ringed: [number, number][];
}

/** A zoom: a point p of the unzoomed picture lies at p·k + (x, y). */
export interface Zoom {
  k: number;
  x: number;
  y: number;
}

export interface Cell {
  query: number;
  key: number;
}

export class Painter {
  private picture: Picture | null = null;
  private readonly sheet = document.createElement("canvas");
  private places = new WeakMap<Matrix, (value: number, i: number) => number>(); // on the scale of colours
  /** Where the cells lie, in CSS pixels: the frame and the unzoomed size of a cell. */
  frame = { left: 0, top: 0, width: 0, height: 0, cell: 1 };
  zoom: Zoom = { k: 1, x: 0, y: 0 };
  pointed: Pointed = NOWHERE;

  constructor(readonly canvas: HTMLCanvasElement) {}

  /** Take a new picture and lay it out for a width and a height of the screen in CSS pixels. */
  show(picture: Picture, width: number, screen: number): void {
    this.picture = picture;
    this.places = new WeakMap();
    this.layout(picture, width, screen);
    this.paint();
  }

  private layout({ of, queries, keys, strips, large, axes }: Picture, width: number, screen: number): void {
    const pen = this.canvas.getContext("2d");
    if (!pen) return;
    pen.font = `11px ${FONT}`;
    const longest = (labels: string[]) => labels.slice(0, 400).reduce((most, each) => Math.max(most, pen.measureText(clip(each)).width), 0);
    const bars = strips ? STRIP + 6 : 0;
    const named = Math.max(...axes.map((each) => pen.measureText(each).width)) + 14; // and an arrow
    const [left, top] = [Math.ceil(Math.max(longest(queries), named)) + 10, Math.ceil(Math.max(longest(keys), 18)) + 10];
    const wide = Math.max(60, width - left - bars - 2);
    const { least, beside } = large ? LARGE_HIGH : HIGH;
    const tall = Math.max(least, screen - beside);
    let cell = Math.min(MOST_CELL, wide / of.columns, tall / of.rows);
    const labelled = cell >= LABEL || large;
    if (!labelled) cell = Math.min((width - MARGIN - bars - 2) / of.columns, tall / of.rows);
    if (cell >= 2) cell = Math.floor(cell);
    const high = cell * of.rows;
    this.frame = { left: labelled ? left : MARGIN, top: labelled ? top : MARGIN, width: cell * of.columns, height: high, cell };
    const ratio = globalThis.devicePixelRatio || 1;
    const size = [this.frame.left + this.frame.width + bars + 1, this.frame.top + high + bars + 1];
    this.canvas.width = Math.round(size[0] * ratio);
    this.canvas.height = Math.round(size[1] * ratio);
    this.canvas.style.width = `${size[0]}px`;
    this.canvas.style.height = `${size[1]}px`;
  }

  /** The cell at a point of the canvas, in CSS pixels; null outside the cells. */
  at(x: number, y: number): Cell | null {
    const { frame, zoom, picture } = this;
    if (!picture || x < frame.left || y < frame.top || x >= frame.left + frame.width || y >= frame.top + frame.height) return null;
    const side = frame.cell * zoom.k;
    const key = Math.floor((x - frame.left - zoom.x) / side);
    const query = Math.floor((y - frame.top - zoom.y) / side);
    return query >= 0 && key >= 0 && query < picture.of.rows && key < picture.of.columns ? { query, key } : null;
  }

  paint(): void {
    const { picture, frame } = this;
    const pen = this.canvas.getContext("2d");
    if (!picture || !pen || !picture.of.columns || !this.canvas.width) return;
    const ratio = this.canvas.width / parseFloat(this.canvas.style.width);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.save();
    pen.beginPath();
    pen.rect(frame.left, frame.top, frame.width, frame.height);
    pen.clip();
    this.cells(pen, picture);
    pen.restore();
    this.labels(pen, picture);
    if (picture.strips) this.strips(pen, picture);
  }

  /** The first and the last visible index, for a side of the frame. */
  private visible(offset: number, side: number, length: number, many: number): [number, number] {
    return [Math.max(0, Math.floor(-offset / side)), Math.min(many, Math.ceil((length - offset) / side))];
  }

  private cells(pen: CanvasRenderingContext2D, picture: Picture): void {
    const { frame, zoom } = this;
    const side = frame.cell * zoom.k;
    const level = Math.max(0, Math.min(picture.of.levels - 1, Math.floor(Math.log2(1 / side) + 1e-9)));
    const rows = this.visible(zoom.y, side * 2 ** level, frame.height, Math.ceil(picture.of.rows / 2 ** level));
    pen.imageSmoothingEnabled = false;
    for (const strip of picture.of.strips(level, ...rows)) this.strip(pen, picture, strip, side);
    this.rings(pen, picture, side);
    this.mark(pen, picture, side);
  }

  private rings(pen: CanvasRenderingContext2D, { ringed, theme }: Picture, side: number): void {
    const { frame, zoom } = this;
    pen.strokeStyle = INKS[theme].second;
    pen.lineWidth = 1.5;
    for (const [query, key] of ringed) {
      pen.beginPath();
      pen.roundRect(frame.left + zoom.x + key * side, frame.top + zoom.y + query * side, side - 1, side - 1, side / 4);
      pen.stroke();
    }
  }

  /** A frame around the cell, the row or the column that is pointed at. */
  private mark(pen: CanvasRenderingContext2D, { of, theme }: Picture, side: number): void {
    const { frame, zoom } = this;
    const { query, key } = this.pointed;
    if ((query === null && key === null) || (query ?? 0) >= of.rows || (key ?? 0) >= of.columns) return;
    pen.strokeStyle = INKS[theme].second;
    pen.lineWidth = 2;
    const [x, wide] = key === null ? [frame.left + 1.5, frame.width - 2] : [frame.left + zoom.x + key * side, Math.max(side, 3)];
    const [y, high] = query === null ? [frame.top + 1.5, frame.height - 2] : [frame.top + zoom.y + query * side, Math.max(side, 3)];
    pen.strokeRect(x - 0.5, y - 0.5, wide, high);
  }

  /** The visible part of a strip; the cells of level 0 are `side` wide. */
  private strip(pen: CanvasRenderingContext2D, picture: Picture, { level, top: start, of }: Strip, side: number): void {
    const { frame, zoom } = this;
    const size = side * 2 ** level;
    const [top, below] = this.visible(zoom.y + start * size, size, frame.height, of.rows);
    const [left, right] = this.visible(zoom.x, size, frame.width, of.columns);
    const [wide, high] = [right - left, below - top];
    if (wide <= 0 || high <= 0) return;
    const image = new ImageData(wide, high);
    const words = new Uint32Array(image.data.buffer);
    const place = this.place(of, picture);
    const { words: colours } = SCALES[picture.signed ? "differences" : "weights"][picture.theme];
    for (let i = 0; i < high; i += 1) {
      const from = (top + i) * of.columns + left;
      for (let j = 0; j < wide; j += 1) words[i * wide + j] = of.chosen?.[from + j] === 0 ? UNCHOSEN[picture.theme] : colours[step(place(of.data[from + j], top + i))];
    }
    this.sheet.width = wide;
    this.sheet.height = high;
    this.sheet.getContext("2d")?.putImageData(image, 0, 0);
    pen.drawImage(this.sheet, frame.left + zoom.x + left * size, frame.top + zoom.y + (start + top) * size, wide * size, high * size);
    if (level === 0 && side >= 6) this.details(pen, picture, { level, top: start, of }, side, [top, below, left, right]);
  }

  private place(of: Matrix, { range, spread, signed }: Picture): (value: number, i: number) => number {
    const known = this.places.get(of) ?? ranged(of, range, spread, signed);
    this.places.set(of, known);
    return known;
  }

  /** Gaps between cells, a stroke through exact zeros, a cross over keys that were not chosen, and numbers in large cells. */
  private details(pen: CanvasRenderingContext2D, picture: Picture, { top: start, of }: Strip, side: number, [top, below, left, right]: number[]): void {
    const { frame, zoom } = this;
    const { theme } = picture;
    const inks = INKS[theme];
    const x = (key: number) => frame.left + zoom.x + key * side;
    const y = (row: number) => frame.top + zoom.y + (start + row) * side;
    pen.fillStyle = inks.paper;
    for (let j = left; j <= right; j += 1) pen.fillRect(x(j) - 1, y(top), 1, y(below) - y(top));
    for (let i = top; i <= below; i += 1) pen.fillRect(x(left), y(i) - 1, x(right) - x(left), 1);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `11px ${FONT}`;
    for (let i = top; i < below; i += 1) {
      for (let j = left; j < right; j += 1) {
        const value = of.data[i * of.columns + j];
        const unchosen = of.chosen?.[i * of.columns + j] === 0;
        if (unchosen || (value === 0 && !picture.signed)) {
          pen.strokeStyle = unchosen ? inks.paper : inks.hatch;
          pen.beginPath();
          pen.moveTo(x(j), y(i) + side - 1);
          pen.lineTo(x(j) + side - 1, y(i));
          if (unchosen) pen.moveTo(x(j), y(i));
          if (unchosen) pen.lineTo(x(j) + side - 1, y(i) + side - 1);
          pen.stroke();
        } else if (side >= NUMBER) {
          pen.fillStyle = (picture.signed ? onDifference : onColour)(theme, this.place(of, picture)(value, i));
          pen.fillText(fitted(value, (text) => pen.measureText(text).width <= side - PADDING), x(j) + side / 2, y(i) + side / 2);
        }
      }
    }
  }

  private labels(pen: CanvasRenderingContext2D, { of, queries, keys, theme, axes }: Picture): void {
    const { frame, zoom } = this;
    const side = frame.cell * zoom.k;
    pen.fillStyle = INKS[theme].soft;
    pen.font = `11px ${FONT}`;
    pen.textBaseline = "middle";
    const labelled = side >= LABEL && frame.left > MARGIN;
    this.names(pen, axes, labelled);
    if (!labelled) return;
    pen.textAlign = "right";
    const [top, below] = this.visible(zoom.y, side, frame.height, of.rows);
    const middle = (i: number, from: number, offset: number) => from + offset + (i + 0.5) * side;
    for (let i = top; i < below; i += 1) {
      const y = middle(i, frame.top, zoom.y);
      if (y > frame.top && y < frame.top + frame.height) pen.fillText(clip(queries[i]), frame.left - 6, y);
    }
    const [left, right] = this.visible(zoom.x, side, frame.width, of.columns);
    pen.textAlign = "left";
    for (let j = left; j < right; j += 1) {
      const x = middle(j, frame.left, zoom.x);
      if (x <= frame.left || x >= frame.left + frame.width) continue;
      pen.save();
      pen.translate(x, frame.top - 6);
      pen.rotate(-Math.PI / 2);
      pen.fillText(clip(keys[j]), 0, 0);
      pen.restore();
    }
  }

  /** The names of the axes: in the corner of the labels, else along the sides. */
  private names(pen: CanvasRenderingContext2D, [rows, columns]: [string, string], labelled: boolean): void {
    const { left, top, width, height } = this.frame;
    if (labelled) {
      pen.textAlign = "right";
      pen.fillText(`${columns} →`, left - 6, top - 20);
      pen.fillText(`${rows} ↓`, left - 6, top - 7);
      return;
    }
    pen.textAlign = "center";
    if (pen.measureText(columns).width <= width) pen.fillText(`${columns} →`, left + width / 2, top - 7);
    if (pen.measureText(rows).width > height) return;
    pen.save();
    pen.translate(left - 7, top + height / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(`← ${rows}`, 0, 0);
    pen.restore();
  }

  private strips(pen: CanvasRenderingContext2D, { of, theme }: Picture): void {
    const { frame, zoom } = this;
    const { queries, keys, every } = of.bars;
    const side = frame.cell * zoom.k;
    const size = side * every;
    pen.fillStyle = INKS[theme].soft;
    const bars = (numbers: Float32Array, offset: number, length: number, put: (at: number, thick: number, size: number) => void) => {
      const most = largest(numbers) || 1;
      const [first, last] = this.visible(offset, size, length, numbers.length);
      const skip = Math.max(1, Math.floor(1 / size)); // the largest of the bars that share a pixel
      for (let i = first; i < last; i += skip) {
        const share = numbers.subarray(i, i + skip).reduce((a, b) => Math.max(a, b), 0) / most;
        const start = Math.max(0, offset + i * size);
        const end = Math.min(length, offset + (i + skip) * size);
        if (end > start) put(start, Math.max(1, end - start - (side >= 6 ? 1 : 0)), share * STRIP);
      }
    };
    bars(queries, zoom.y, Math.min(frame.height, of.rows * side), (at, thick, wide) => pen.fillRect(frame.left + frame.width + 5, frame.top + at, wide, thick));
    bars(keys, zoom.x, frame.width, (at, thick, high) => pen.fillRect(frame.left + at, frame.top + frame.height + 5, thick, high));
  }
}
