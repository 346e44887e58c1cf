/** The score of a query and each key, dimension by dimension: the products that add up to it, and their drawing. */

import { INKS, SCALES, step } from "./colour";
import type { Theme } from "./colour";
import { clip, precise } from "../numbers/format";
import { largest } from "../numbers/matrix";
import type { Scene, Shape } from "./scene";

export interface Products {
  q: Float32Array;
  /** The vector of each key. */
  k: Float32Array[];
  /** The factor on each product. */
  scale: number;
  /** The part of each dimension in the score of each key: scale · q · k. They add up to the score. */
  parts: Float32Array[];
  scores: Float32Array;
  weights: ArrayLike<number>;
}

const CLOSE = 1e-3; // of the largest score: half types and TF32 round as much

/**
 * Find the factor by which the products of q and k add up to the scores. Null where there is none, since the score is
 * no product: additive and gaussian scores, or a matrix between q and k.
 */
export function productsOf(q: Float32Array, k: Float32Array[], scores: Float32Array, weights: ArrayLike<number>): Products | null {
  const dots = k.map((each) => each.reduce((sum, value, i) => sum + value * q[i], 0));
  const square = dots.reduce((sum, each) => sum + each * each, 0);
  const scale = square > 0 ? dots.reduce((sum, each, j) => sum + each * scores[j], 0) / square : 1 / Math.sqrt(q.length);
  const off = Math.max(...dots.map((each, j) => Math.abs(scale * each - scores[j])));
  if (!(off <= CLOSE * Math.max(1e-6, largest(scores)))) return null;
  return { q, k, scale, scores, weights, parts: k.map((each) => each.map((value, i) => scale * q[i] * value)) };
}

/** The factor in words; empty for 1. */
export function scaleName({ scale, q }: Products): string {
  if (Math.abs(scale - 1) < CLOSE) return "";
  return Math.abs(scale * Math.sqrt(q.length) - 1) < CLOSE ? `1/√${q.length}` : precise(scale, 3);
}

/** Where the parts of the drawing lie. */
export interface Layout {
  width: number;
  height: number;
  /** The left ends of the vectors and of their products. */
  blocks: [number, number];
  /** A dimension's width. */
  cell: number;
  /** The top of the query's row, and that of the first key's. */
  first: number;
  top: number;
  high: number;
}

const LABEL = 104;
const BAR = 26; // the length of the longest bar to each side
const BARS = 2 * BAR + 70; // the width of a column of bars with its numbers, the longest of which is like −1.23e−10
const GAP = 18;
const LEAST_BLOCK = 200; // the width of the words above a block

/** Lay out the drawing for a width in CSS pixels; it is wider where its cells or the words above them need more. */
export function layoutOf({ q, k }: Products, width: number): Layout {
  const cell = Math.max(LEAST_BLOCK / q.length, Math.min(14, Math.max(1.5, (width - LABEL - 2 * BARS - 3 * GAP) / (2 * q.length))));
  const wide = cell * q.length;
  const [first, high] = [40, 18];
  const top = first + high + 6;
  return { width: Math.ceil(LABEL + 2 * wide + 3 * GAP + 2 * BARS), height: top + k.length * high + 6, blocks: [LABEL, LABEL + wide + GAP], cell, first, top, high };
}

/** The place under a point: a key, or −1 for the query's row, and a dimension; null outside the cells. */
export function placeAt({ blocks, cell, first, top, high }: Layout, { q, k }: Products, x: number, y: number): { key: number; dimension: number } | null {
  const key = y >= first && y < first + high ? -1 : Math.floor((y - top) / high);
  if (key < -1 || key >= k.length || (key === -1 && y >= first + high)) return null;
  for (const left of key < 0 ? blocks.slice(0, 1) : blocks) {
    const dimension = Math.floor((x - left) / cell);
    if (dimension >= 0 && dimension < q.length) return { key, dimension };
  }
  return null;
}

/** The query's vector over those of the keys, their products beside them, and the scores and weights as bars. */
export function productScene(of: Products, layout: Layout, options: { theme: Theme; title: string; query: string; keys: string[] }): Scene {
  const { q, k, parts, scores, weights } = of;
  const { theme, title, query, keys } = options;
  const { blocks: [vectors, products], cell, first, top, high } = layout;
  const inks = INKS[theme];
  const { css } = SCALES.differences[theme];
  const mostVector = Math.max(largest(q), ...k.map(largest)) || 1;
  const mostPart = Math.max(...parts.map(largest)) || 1;
  const shapes: Shape[] = [];
  const text = (x: number, y: number, words: string, more: object = {}) => shapes.push({ kind: "text", x, y, text: words, size: 11, fill: inks.soft, ...more });
  const cells = (x: number, y: number, values: Float32Array, most: number) => values.forEach((value, i) => shapes.push({ kind: "rect", x: x + i * cell, y: y + 1, w: cell > 4 ? cell - 1 : cell, h: high - 2, fill: css[step(0.5 + value / most / 2)] }));
  const wide = cell * q.length;
  text(vectors, 12, `q, and k of each key: −${precise(mostVector, 2)} to ${precise(mostVector, 2)}`);
  text(products, 12, `q × k${scaleName(of) && ` × ${scaleName(of)}`}: −${precise(mostPart, 2)} to ${precise(mostPart, 2)}`);
  const every = [1, 2, 4, 8, 16, 32, 64, 128].find((each) => each * cell >= 26) ?? 256;
  for (const left of [vectors, products]) {
    for (let i = 0; i < q.length; i += every) text(left + (i + 0.5) * cell, 34, String(i), { anchor: "middle", size: 9 });
  }
  text(vectors - 8, 20, "keys ↓", { anchor: "end", size: 10 });
  text(vectors - 8, 34, "dimensions →", { anchor: "end", size: 10 });
  text(vectors - 8, first + 13, `q ${clip(query)}`, { anchor: "end", size: 12, bold: true, fill: inks.ink });
  cells(vectors, first, q, mostVector);
  const bars = products + wide + GAP;
  const mostScore = largest(scores) || 1;
  text(bars, 12, "row's sum: score");
  text(bars + BARS + GAP, 12, "weight");
  keys.forEach((key, j) => {
    const y = top + j * high;
    text(vectors - 8, y + 13, clip(key), { anchor: "end", size: 12, fill: inks.ink });
    cells(vectors, y, k[j], mostVector);
    cells(products, y, parts[j], mostPart);
    const long = (BAR * Math.abs(scores[j])) / mostScore;
    shapes.push({ kind: "rect", x: bars + BAR - (scores[j] < 0 ? long : 0), y: y + 3, w: Math.max(0.5, long), h: high - 6, fill: scores[j] < 0 ? css[0] : css[255] });
    text(bars + 2 * BAR + 4, y + 13, precise(scores[j], 3));
    shapes.push({ kind: "rect", x: bars + BARS + GAP, y: y + 3, w: Math.max(0.5, 2 * BAR * weights[j]), h: high - 6, fill: inks.accent });
    text(bars + BARS + GAP + 2 * BAR + 4, y + 13, precise(weights[j], 3));
  });
  return { width: layout.width, height: layout.height, title, shapes };
}
