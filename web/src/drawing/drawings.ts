/** Scenes: the heat map of a head, token lines, and charts over a logarithmic or linear axis. */

import { scaleLinear, scaleLog } from "d3-scale";
import { INKS, SCALES, onColour, onDifference, step } from "./colour";
import type { Theme } from "./colour";
import { clip, fitted, precise, whole } from "../numbers/format";
import { largest, largestPlaces, pooled, row, spreadOf } from "../numbers/matrix";
import type { Matrix, Spread } from "../numbers/matrix";
import type { Scene, Shape } from "./scene";

export type Range = "own" | "row" | "unit" | "log" | "shared";
export const RANGES: Record<Range, string> = {
  shared: "the same for all heads",
  own: "each head its own",
  row: "each query its own",
  unit: "0 to 1",
  log: "logarithmic",
};

const ABOVE = 1.01; // times the end of the scale: a largest magnitude that is told to lie above it
const MOST_LINEAR = 64; // tokens: an even share of more keys is too pale beside the largest weight

/** The range of colours of heads with so many tokens that nobody chose. */
export const usualRange = (tokens: number): Range => (tokens > MOST_LINEAR ? "log" : "own");

const NEAR = 4; // times the least: weights that lie this near to each other are drawn from the least on
const EVEN = 0.02; // of the largest: weights that differ by less have the colour in the middle
const FAINT = 0.1; // of the scale: the colour of the least weight, where that is not 0, differs from the one of 0
const DECADES = 4; // of a logarithmic scale, at most

/** The numbers at which a scale of colours begins and ends: from 0, or from the least number where all are near the largest. */
export function scaleEnds({ low, high }: Spread, range: Range = "own"): [number, number] {
  const from = range === "log" ? Math.max(low, high / 10 ** DECADES) : high < NEAR * low ? low : 0;
  return high - from >= EVEN * high ? [from, high || 1] : [high * (1 - EVEN), high * (1 + EVEN)];
}

/** Where a value of a row of a matrix lies on the scale of colours, from 0 to 1. `spread`: of all that share the scale. */
export function ranged(of: Matrix, range: Range, spread: Spread, signed: boolean): (value: number, i: number) => number {
  if (signed) return (value) => 0.5 + value / (spread.high || 1) / 2;
  if (range === "row") {
    const rows = Array.from({ length: of.rows }, (_, i) => largest(row(of, i)) || 1);
    return (value, i) => value / rows[i];
  }
  if (range === "unit") return (value) => value;
  const [from, to] = scaleEnds(spread, range);
  const share = range === "log" ? (value: number) => Math.log(value / from) / Math.log(to / from) : (value: number) => (value - from) / (to - from);
  return from > 0 ? (value) => (value > 0 ? FAINT + (1 - FAINT) * Math.max(0, share(value)) : 0) : share;
}

/** Where the colours of a scale begin whose low end is written so. */
export const rampStart = (low: string, signed: boolean) => (signed || /^0(,|$)/.test(low) ? 0 : FAINT);

/** The scale of numbers that are drawn over an image or a sound: the place of each, 0 to 1 or −1 to 1, and its ends in words. */
export function overlaid(values: ArrayLike<number>, signed: boolean): { place: (value: number) => number; ends: [string, string] } {
  const sizes = Array.from(values, Math.abs);
  const spread = { low: signed || !sizes.length ? 0 : Math.min(...sizes), high: largest(values) };
  const [from, to] = scaleEnds(spread);
  return { place: (value) => (value - from) / (to - from), ends: signed ? endsOf(spread, "own", true) : [from ? precise(spread.low, 3) : "0", precise(spread.high, 3)] };
}

/** The two ends of a scale of colours in words. `spread`: of the numbers, where it is known; `most`: the largest magnitude. */
export function endsOf(spread: Spread | undefined, range: Range, signed: boolean, most = spread?.high ?? 0): [string, string] {
  if (signed && spread?.high === 0) return ["0", "0"];
  if (signed) return spread ? [`−${precise(spread.high, 3)}`, `+${precise(spread.high, 3)}`] : ["−largest of the head", "+largest of the head"];
  if (range === "row") return ["0", "largest of the row"];
  if (range === "unit") return ["0", "1"];
  if (!spread) return [range === "log" ? "least of the head" : "0, or the least of an even head", "largest of the head"];
  const [from, to] = scaleEnds(spread, range);
  return [from ? `≤ ${precise(from, 3)}` : "0", `${most > ABOVE * to ? "≥ " : ""}${precise(to, 3)}`];
}

const WIDE = 0.64; // of a digit beside its height, in the widest of the fonts of drawings

/** About how wide a number is that is written in a size; its point has half of a digit's width. */
export const wideness = (text: string, size: number) => size * (WIDE * text.length - (text.includes(".") ? WIDE / 2 : 0));

/** The names of the rows and the columns of weights. */
export const QUERIES_AND_KEYS: [string, string] = ["queries", "keys"];
const LEAST_HATCHED = 6; // the side of a cell whose exact zero is hatched
const MOST_SIDE = 128; // cells a side of a picture made of rectangles

export interface HeatOptions {
  theme: Theme;
  title: string;
  queries: string[];
  keys: string[];
  range?: Range;
  signed?: boolean;
  /** The side of the squares of which each cell is the largest. */
  pool?: number;
  /** The names of the rows and of the columns. */
  axes?: [string, string];
}

/** The heat map of one head. Beyond 128 cells a side, cells are pooled, and the title says so. */
export function heatScene(of: Matrix, options: HeatOptions): Scene {
  const { theme, title, queries, keys, signed = of.signed ?? false, axes = QUERIES_AND_KEYS } = options;
  const { range = axes === QUERIES_AND_KEYS ? usualRange(Math.max(of.rows, of.columns)) : "own" } = options;
  let shown = of;
  let { pool = 1 } = options;
  for (; Math.max(shown.rows, shown.columns) > MOST_SIDE; pool *= 2) shown = pooled(shown);
  const inks = INKS[theme];
  const cell = Math.max(5, Math.min(28, Math.floor(640 / Math.max(shown.rows, shown.columns))));
  const labelled = pool === 1 && cell >= 11;
  const size = Math.min(12, cell - 2);
  const named = 6.2 * (Math.max(...axes.map((each) => each.length)) + 2); // the corner has room for the names of the axes
  const left = labelled ? 12 + Math.max(named, 0.62 * size * Math.max(...queries.map((each) => clip(each).length))) : 26;
  const top = 30 + (labelled ? Math.max(20, 0.62 * size * Math.max(...keys.map((each) => clip(each).length))) + 8 : 14);
  const most = largest(shown.data);
  const spread = axes === QUERIES_AND_KEYS && !signed ? spreadOf(of) : { low: 0, high: most };
  const at = ranged(shown, range, spread, signed);
  const { css } = SCALES[signed ? "differences" : "weights"][theme];
  const full = pool > 1 ? `${title} (largest of ${pool} × ${pool} cells)` : title;
  const shapes: Shape[] = [{ kind: "text", x: 12, y: 18, text: full, size: 13, bold: true, fill: inks.ink }];
  for (let i = 0; i < shown.rows; i += 1) {
    for (let j = 0; j < shown.columns; j += 1) {
      const value = shown.data[i * shown.columns + j];
      const place = at(value, i);
      const box = { x: left + j * cell, y: top + i * cell };
      const unchosen = shown.chosen?.[i * shown.columns + j] === 0;
      const tip = labelled ? `${queries[i]} → ${keys[j]}: ${unchosen ? "not chosen" : precise(value)}` : "";
      const side = cell - (cell > 6 ? 1 : 0);
      shapes.push({ kind: "rect", ...box, w: side, h: side, fill: unchosen ? inks.faint : css[step(place)], ...(tip ? { tip } : {}) });
      if (unchosen && cell >= LEAST_HATCHED) shapes.push({ kind: "path", d: `M${box.x},${box.y + side}L${box.x + side},${box.y}M${box.x},${box.y}L${box.x + side},${box.y + side}`, stroke: inks.paper });
      else if (value === 0 && !signed && pool === 1 && cell >= LEAST_HATCHED) shapes.push({ kind: "path", d: `M${box.x},${box.y + side}L${box.x + side},${box.y}`, stroke: inks.hatch });
      if (cell >= 26 && !unchosen) shapes.push({ kind: "text", x: box.x + cell / 2, y: box.y + cell / 2 + 3, text: fitted(value, (text) => wideness(text, 9) <= cell - 2), size: 9, anchor: "middle", fill: (signed ? onDifference : onColour)(theme, place) });
    }
  }
  const hatched = shapes.some(({ kind, stroke }) => kind === "path" && stroke === inks.hatch);
  const soft = { size: 10, fill: inks.soft } as const;
  if (labelled) {
    shapes.push({ kind: "text", x: left - 6, y: top - 18, text: `${axes[1]} →`, anchor: "end", ...soft }, { kind: "text", x: left - 6, y: top - 5, text: `${axes[0]} ↓`, anchor: "end", ...soft });
    queries.forEach((each, i) => shapes.push({ kind: "text", x: left - 6, y: top + (i + 0.5) * cell + size / 3, text: clip(each), size, anchor: "end", fill: inks.soft }));
    keys.forEach((each, j) => shapes.push({ kind: "text", x: left + (j + 0.5) * cell + size / 3, y: top - 6, text: clip(each), size, turn: -90, fill: inks.soft }));
  } else {
    shapes.push({ kind: "text", x: left, y: top - 4, text: `${axes[1]} →`, ...soft }, { kind: "text", x: left - 5, y: top + 6.2 * (axes[0].length + 2), text: `← ${axes[0]}`, turn: -90, ...soft });
  }
  const below = top + shown.rows * cell + 22;
  const key = legendShapes(12, below, endsOf(spread, range, signed, most), `rows ${axes[0]}, columns ${axes[1]}`, theme, signed, hatched);
  const width = Math.max(left + shown.columns * cell + 12, 24 + 7.2 * full.length, (hatched ? 500 : 430) + (shown.chosen ? 110 : 0));
  if (shown.chosen) key.push({ kind: "rect", x: width - 96, y: below - 8, w: 9, h: 9, fill: inks.faint }, { kind: "text", x: width - 82, y: below, text: "not chosen", fill: inks.soft });
  return { width: Math.ceil(width), height: Math.ceil(top + shown.rows * cell + 34), title: full, shapes: [...shapes, ...key] };
}

/** The scale of colours with its ends, and the names of the axes beside it. */
export function legendShapes(x: number, y: number, [low, high]: [string, string], axes: string, theme: Theme, signed = false, hatched = false): Shape[] {
  const { css } = SCALES[signed ? "differences" : "weights"][theme];
  const inks = INKS[theme];
  const [from, steps, wide] = [x + 8 + 6 * low.length, 40, 2.5];
  const first = rampStart(low, signed);
  const ramp = Array.from({ length: steps }, (_, i): Shape => ({ kind: "rect", x: from + i * wide, y: y - 8, w: wide + 0.3, h: 9, fill: css[step(first + ((1 - first) * i) / (steps - 1))] }));
  const end = from + steps * wide;
  return [
    { kind: "text", x, y, text: low, fill: inks.soft },
    ...ramp,
    { kind: "text", x: end + 6, y, text: high, fill: inks.soft },
    { kind: "text", x: end + 18 + 6 * high.length, y, text: axes, fill: inks.soft },
    ...(hatched ? hatchedKey(end + 40 + 6 * high.length + 5.4 * axes.length, y, inks.hatch, inks.soft) : []),
  ];
}

/** What a hatched cell means. */
const hatchedKey = (x: number, y: number, stroke: string, fill: string): Shape[] => [
  { kind: "rect", x, y: y - 8, w: 9, h: 9, stroke, fill: "none" },
  { kind: "path", d: `M${x},${y + 1}L${x + 9},${y - 8}`, stroke },
  { kind: "text", x: x + 14, y, text: "exactly 0", fill },
];

/** The weights of a head to be drawn as lines; in the accent colour by default. */
export interface Lines {
  of: Matrix;
  ink?: string;
  dash?: number[];
  name?: string;
}

interface LineOptions extends HeatOptions {
  /** The least weight that is a line. */
  least: number;
  /** The query or the key whose lines are drawn alone; of both the query's, and that of the pair stands out. */
  only?: number | null;
  onlyKey?: number | null;
}

const MOST_LINES = 3000;

/**
 * Token lines of heads over the same tokens: queries on the left, keys on the right. Each line has a name, `at,query,key`
 * with the index of its head. `left`: how many weaker lines are not drawn, where there are too many.
 */
export function lineScene(heads: Lines[], options: LineOptions): Scene & { top: number; high: number; drawn: number; left: number } {
  const { theme, title, queries, keys, least, only = null, onlyKey = null } = options;
  const inks = INKS[theme];
  const high = 20;
  const [left, right, top] = [130, 370, title ? 44 : 14];
  const shapes: Shape[] = title ? [{ kind: "text", x: 12, y: 18, text: title, size: 13, bold: true, fill: inks.ink }] : [];
  const faint = (i: number) => (only !== null && only !== i ? { opacity: 0.45 } : {});
  const faintKey = (j: number) => (onlyKey !== null && onlyKey !== j ? { opacity: 0.45 } : {});
  queries.forEach((each, i) => shapes.push({ kind: "text", x: left - 8, y: top + i * high + 4, text: clip(each, 16), size: 13, anchor: "end", fill: inks.ink, ...faint(i) }));
  keys.forEach((each, j) => shapes.push({ kind: "text", x: right + 8, y: top + j * high + 4, text: clip(each, 16), size: 13, fill: inks.ink, ...faintKey(j) }));
  const pairs: { weight: number; at: number; i: number; j: number }[] = [];
  heads.forEach(({ of }, at) => {
    const scale = of.signed ? 1 / (largest(of.data) || 1) : 1; // weights of either sign are drawn beside the largest
    for (let i = 0; i < of.rows; i += 1) {
      if (only !== null && only !== i) continue;
      for (let j = 0; j < of.columns; j += 1) {
        const weight = of.data[i * of.columns + j] * scale;
        if (Math.abs(weight) >= least && weight !== 0 && (onlyKey === null || only !== null || onlyKey === j)) pairs.push({ weight, at, i, j });
      }
    }
  });
  const drawn = pairs.length > MOST_LINES ? pairs.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, MOST_LINES) : pairs;
  const beside = Math.min(2.5, (high - 6) / heads.length); // between lines of heads from one token to the same other
  for (const { weight, at, i, j } of drawn) {
    const { ink = heads[at].of.signed && weight > 0 ? inks.second : inks.accent, dash = [], name } = heads[at];
    const shift = (at - (heads.length - 1) / 2) * beside;
    const [from, to] = [top + i * high + shift, top + j * high + shift];
    const marked = only === null || onlyKey === null || onlyKey === j;
    const tip = `${name ? `${name}: ` : ""}${queries[i]} → ${keys[j]}: ${precise(heads[at].of.data[i * heads[at].of.columns + j])}`;
    shapes.push({ kind: "path", name: [at, i, j].join(), d: `M${left},${from}C${left + 90},${from} ${right - 90},${to} ${right},${to}`, stroke: ink, width: 0.75 + 3 * Math.min(1, Math.abs(weight)), opacity: (marked ? 1 : 0.3) * Math.min(1, 0.08 + Math.abs(weight)), ...(dash.length ? { dash } : {}), tip });
  }
  const rows = Math.max(queries.length, keys.length);
  return { width: 500, height: top + high * rows + 4, title, shapes, top: top - high / 2, high, drawn: drawn.length, left: pairs.length - drawn.length };
}

export interface Line {
  label: string;
  points: [number, number][];
  /** A band around the line: from low to high at each x. */
  band?: [number, number, number][];
  dashed?: boolean;
}

export interface ChartOptions {
  theme: Theme;
  title: string;
  across: string;
  unit: (value: number) => string;
  marks?: { x: number; label: string }[];
  binary?: boolean;
}

export const lineInk = (theme: Theme, i: number) => [INKS[theme].accent, INKS[theme].second, INKS[theme].third, INKS[theme].soft][i % 4];

const HALF_LINE = 32; // letters

/** A chart with two logarithmic axes. */
export function chartScene(lines: Line[], { theme, title, across, unit, marks = [], binary = false }: ChartOptions): Scene {
  const beside = lines.every(({ label }) => label.length <= HALF_LINE) ? 2 : 1; // names of lines beside each other
  const [width, height, left, right, top, bottom] = [460, 300, 70, 18, 44 + 16 * Math.ceil(lines.length / beside), 40];
  const inks = INKS[theme];
  const real = lines.map((line) => ({ ...line, points: line.points.filter(([, y]) => y > 0) }));
  const all = real.flatMap(({ points, band = [] }) => [...points, ...band.flatMap(([x, low, high]): [number, number][] => [[x, low], [x, high]])]).filter(([, y]) => y > 0);
  const shapes: Shape[] = [{ kind: "text", x: 4, y: 16, text: title, size: 13, bold: true, fill: inks.ink }];
  if (!all.length) return { width, height: 60, title, shapes: [...shapes, { kind: "text", x: 4, y: 40, text: "no data", fill: inks.soft }] };
  const xs = all.map(([x]) => x);
  const ys = all.map(([, y]) => y);
  const x = scaleLog([Math.min(...xs), Math.max(...xs)], [left + 6, width - right]);
  const y = scaleLog([Math.min(...ys) / 1.3, Math.max(...ys) * 1.3], [height - bottom, top]).base(binary ? 2 : 10);
  const few = (ticks: number[]) => ticks.filter((_, i) => i % Math.ceil(ticks.length / 6) === 0);
  const powers = (domain: number[], base: number) => {
    const ends = domain.map((each) => Math.log(each) / Math.log(base));
    const first = Math.ceil(ends[0] - 1e-9);
    return Array.from({ length: Math.max(0, Math.floor(ends[1] + 1e-9) - first + 1) }, (_, i) => base ** (first + i));
  };
  const ticks = powers(y.domain(), binary ? 16 : 10);
  for (const value of few(ticks.length > 1 ? ticks : y.ticks(4))) {
    shapes.push({ kind: "path", d: `M${left},${y(value)}H${width - right}`, stroke: inks.hair });
    shapes.push({ kind: "text", x: left - 6, y: y(value) + 4, text: unit(value), anchor: "end", fill: inks.soft });
  }
  shapes.push({ kind: "path", d: `M${left},${height - bottom}H${width - right}`, stroke: inks.faint });
  for (const value of few([...new Set(real[0].points.map((point) => point[0]))])) {
    shapes.push({ kind: "path", d: `M${x(value)},${height - bottom}v4`, stroke: inks.faint });
    shapes.push({ kind: "text", x: x(value), y: height - bottom + 16, text: value.toLocaleString("en-US"), anchor: "middle", fill: inks.soft });
  }
  shapes.push({ kind: "text", x: (left + width) / 2, y: height - 6, text: across, anchor: "middle", fill: inks.soft });
  real.forEach(({ label, points, band, dashed }, i) => {
    const ink = lineInk(theme, i);
    const joined = (list: [number, number][]) => list.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("L");
    if (band?.length) {
      const up = band.map(([a, , b]): [number, number] => [a, b]);
      const down = band.map(([a, b]): [number, number] => [a, b]).reverse();
      shapes.push({ kind: "path", d: `M${joined([...up, ...down])}Z`, fill: ink, opacity: 0.13 });
    }
    shapes.push({ kind: "path", d: `M${joined(points)}`, stroke: ink, width: 2, ...(dashed ? { dash: [6, 4] } : {}) });
    for (const [a, b] of points) shapes.push({ kind: "circle", x: x(a), y: y(b), r: 3, fill: ink, tip: `${label}, ${a.toLocaleString("en-US")}: ${unit(b)}` });
    const [column, down] = [i % beside, Math.floor(i / beside)];
    shapes.push({ kind: "path", d: `M${4 + column * 230},${34 + down * 16}h18`, stroke: ink, width: 2, ...(dashed ? { dash: [6, 4] } : {}) });
    shapes.push({ kind: "text", x: 28 + column * 230, y: 38 + down * 16, text: clip(label, beside === 2 ? HALF_LINE : 68), fill: inks.soft });
  });
  for (const { x: place, label } of marks) {
    if (place < Math.min(...xs) || place > Math.max(...xs)) continue;
    shapes.push({ kind: "path", d: `M${x(place)},${top}V${height - bottom}`, stroke: inks.soft, dash: [2, 3] });
    const late = x(place) > (left + width) / 2;
    shapes.push({ kind: "text", x: x(place) + (late ? -4 : 4), y: top + 10, text: label, anchor: late ? "end" : "start", fill: inks.soft });
  }
  return { width, height, title, shapes };
}

export interface BarOptions {
  theme: Theme;
  title: string;
  labels: string[];
  values: number[];
  signed?: boolean;
  /** A number in words. */
  written?: (value: number) => string;
  /** The bar that is pointed at. */
  marked?: number | null;
  /** The number whose bar would fill the row; by default the largest. */
  whole?: number;
}

const MOST_BARS = 64;

/**
 * Horizontal bars, one for each label, with its number; of more than 64 the largest. `places`: the labels that are shown; the
 * first begins at `top`, and each is `high`.
 */
export function barScene({ theme, title, labels, values, signed = false, written = precise, marked = null, whole: full }: BarOptions): Scene & { top: number; high: number; places: number[] } {
  const inks = INKS[theme];
  const [left, wide, top, high] = [120, 250, 28, 20];
  const most = full ?? (largest(values) || 1);
  const places = largestPlaces(values, MOST_BARS);
  const named = places.length < values.length ? `${title}, the ${MOST_BARS} largest of ${whole(values.length)}` : title;
  const x = scaleLinear(signed ? [-most, most] : [0, most], [left, left + wide]);
  const shapes: Shape[] = [{ kind: "text", x: 4, y: 16, text: named, size: 13, bold: true, fill: inks.ink }];
  places.forEach((i, bar) => {
    const [y, value] = [top + bar * high, values[i]];
    if (i === marked) shapes.push({ kind: "rect", x: 1, y, w: left + wide + 88, h: high - 2, fill: "none", stroke: inks.second, width: 1.5 });
    const [from, to] = [Math.min(x(0), x(value)), Math.max(x(0), x(value))];
    shapes.push({ kind: "text", x: left - 8, y: y + 13, text: clip(labels[i] ?? String(i), 16), size: 12, anchor: "end", fill: inks.ink });
    shapes.push({ kind: "rect", x: from, y: y + 2, w: Math.max(0.5, to - from), h: high - 6, fill: signed && value > 0 ? inks.second : inks.accent });
    shapes.push({ kind: "text", x: left + wide + 8, y: y + 13, text: written(value), fill: inks.soft });
  });
  return { width: left + wide + 90, height: top + 6 + places.length * high, title: named, shapes, top, high, places };
}
