/** Two heads of one size side by side: what is drawn of each and of their difference, and how far they are apart. */

import { whole } from "./cells";
import type { Cells } from "./cells";
import { difference, divergence, largest, marginals, matrix, spreadOf } from "./matrix";
import type { Matrix } from "./matrix";

export interface Pair {
  one: Cells;
  other: Cells;
  /** The first less the second. */
  less: Cells;
  /** What a picture that is saved shows of the difference: squares of `pool` cells, each by its largest. */
  shown: Matrix;
  pool: number;
  divergence: { rows: Float32Array; mean: number };
}

const MOST_WHOLE = 2_000_000; // cells of a head that is kept at every level of detail
const MOST_SIDE = 512; // cells of a picture of more

/** Compare two heads. Of many weights all pictures are made in one pass over them, at the one size that is drawn. */
export function pairOf(one: Matrix, other: Matrix): Pair {
  if (one.data.length <= MOST_WHOLE) {
    const less = difference(one, other);
    return { one: whole(one), other: whole(other), less: whole(less, true), shown: less, pool: 1, divergence: divergence(one, other) };
  }
  const halvings = Math.ceil(Math.log2(Math.max(one.rows, one.columns) / MOST_SIDE));
  const [first, second, less] = [0, 1, 2].map(() => matrix(Math.ceil(one.rows / 2 ** halvings), Math.ceil(one.columns / 2 ** halvings)));
  const [a, b] = [one.data, other.data];
  for (let i = 0, at = 0; i < one.rows; i += 1) {
    const top = (i >> halvings) * less.columns;
    for (let j = 0; j < one.columns; j += 1, at += 1) {
      const place = top + (j >> halvings);
      const [p, q] = [a[at], b[at]];
      if (Math.abs(p) > Math.abs(first.data[place])) first.data[place] = p;
      if (Math.abs(q) > Math.abs(second.data[place])) second.data[place] = q;
      if (Math.abs(p - q) > Math.abs(less.data[place])) less.data[place] = p - q;
    }
  }
  const cells = (pooled: Matrix, value: Cells["value"]): Cells => ({
    rows: one.rows,
    columns: one.columns,
    levels: halvings + 1,
    most: largest(pooled.data),
    spread: { low: pooled === less ? 0 : spreadOf(pooled).low, high: largest(pooled.data) },
    bars: { ...marginals(pooled), every: 2 ** halvings },
    strips: () => [{ level: halvings, top: 0, of: pooled }],
    value,
  });
  const place = (query: number, key: number) => query * one.columns + key;
  return {
    one: { ...cells(first, (query, key) => a[place(query, key)]), ...(one.signed && { signed: true }) },
    other: { ...cells(second, (query, key) => b[place(query, key)]), ...(other.signed && { signed: true }) },
    less: cells(less, (query, key) => a[place(query, key)] - b[place(query, key)]),
    shown: less,
    pool: 2 ** halvings,
    divergence: divergence(one, other),
  };
}
