/** Matrices of weights: pooling for pictures, marginals, and the statistics of a head. */

import { plainToken } from "./format";

export interface Matrix {
  rows: number;
  columns: number;
  /** Row by row. */
  data: Float32Array;
  /** Weights of either sign, which are no shares: the implicit weights of a layer without a softmax. */
  signed?: boolean;
  /** 1 for each key that its query may look at, row by row, of a layer that chooses keys. */
  chosen?: Uint8Array;
}

export const matrix = (rows: number, columns: number, data: Float32Array = new Float32Array(rows * columns)): Matrix => ({ rows, columns, data });

export const row = (of: Matrix, i: number) => of.data.subarray(i * of.columns, (i + 1) * of.columns);

/** The largest magnitude; 0 for an empty matrix. */
export function largest(numbers: ArrayLike<number>): number {
  let most = 0;
  for (let i = 0; i < numbers.length; i += 1) {
    const size = Math.abs(numbers[i]);
    if (size > most) most = size;
  }
  return most;
}

const ROUNDED = 1e-3; // of a weight of 1

/** The largest weight of the queries that look at more than one key; of all, where no query does. A single key has weight 1. */
export function largestShared(of: Matrix): number {
  if (of.signed) return largest(of.data);
  let most = 0;
  for (let i = 0; i < of.rows; i += 1) {
    const weights = row(of, i);
    const own = largest(weights);
    if (own > most && !(Math.abs(own - 1) < ROUNDED && weights.reduce((many, each) => many + (each === 0 ? 0 : 1), 0) === 1)) most = own;
  }
  return most || largest(of.data);
}

/** Where the weights of a head lie: the first percentile of those above 0, and the largest of the queries that look at several keys. */
export interface Spread {
  low: number;
  high: number;
}

const SAMPLED = 16_384; // cells, from which a percentile is read

/** The spread of weights; of numbers of either sign from 0. */
export function spreadOf(of: Matrix): Spread {
  const high = largestShared(of);
  if (of.signed) return { low: 0, high };
  const every = Math.max(1, of.data.length / SAMPLED);
  const positive = Array.from({ length: Math.floor(of.data.length / every) }, (_, i) => of.data[Math.floor(i * every)]).filter((each) => each > 0).sort((a, b) => a - b);
  return { low: Math.min(high, positive[Math.floor(positive.length / 100)] ?? 0), high };
}

/** The spread of several heads together. */
export const joined = (spreads: Spread[]): Spread => ({ low: Math.min(...spreads.map(({ low }) => low)), high: Math.max(...spreads.map(({ high }) => high)) });

/** Halve both sides: each cell is the one of the largest magnitude among up to four. */
export function pooled(of: Matrix): Matrix {
  const rows = Math.ceil(of.rows / 2);
  const columns = Math.ceil(of.columns / 2);
  const made: Matrix = { ...matrix(rows, columns), ...(of.signed && { signed: true }), ...(of.chosen && { chosen: new Uint8Array(rows * columns) }) };
  const { data, columns: wide } = of;
  for (let i = 0; i < rows; i += 1) {
    const top = 2 * i * wide;
    const below = 2 * i + 1 < of.rows ? top + wide : top;
    for (let j = 0; j < columns; j += 1) {
      const left = 2 * j;
      const right = left + 1 < wide ? left + 1 : left;
      if (made.chosen && of.chosen) made.chosen[i * columns + j] = of.chosen[top + left] | of.chosen[top + right] | of.chosen[below + left] | of.chosen[below + right];
      let best = data[top + left];
      let most = best < 0 ? -best : best;
      for (let at = 0; at < 3; at += 1) {
        const value = data[(at ? below : top) + (at === 1 ? left : right)];
        const size = value < 0 ? -value : value;
        if (size > most) {
          best = value;
          most = size;
        }
      }
      made.data[i * columns + j] = best;
    }
  }
  return made;
}

/** The matrix, then each half as large as the one before, down to `least` cells a side. */
export function pyramid(of: Matrix, least = 256): Matrix[] {
  const levels = [of];
  for (let last = of; Math.max(last.rows, last.columns) > least; ) {
    last = pooled(last);
    levels.push(last);
  }
  return levels;
}

/** One matrix less another of the same size. Throws an Error for another size. */
export function difference(one: Matrix, other: Matrix): Matrix {
  if (one.rows !== other.rows || one.columns !== other.columns) {
    throw new Error(`The sizes differ: ${one.rows} × ${one.columns} and ${other.rows} × ${other.columns}.`);
  }
  const made = matrix(one.rows, one.columns);
  const [{ data }, { data: less }] = [one, other];
  for (let i = 0; i < data.length; i += 1) made.data[i] = data[i] - less[i];
  return made;
}

/** The places of the `many` numbers with the largest magnitudes, in their order. */
export const largestPlaces = (of: ArrayLike<number>, many: number): number[] =>
  Array.from(of, (_, i) => i).sort((a, b) => Math.abs(of[b]) - Math.abs(of[a])).slice(0, many).sort((a, b) => a - b);

/** Means over the queries (what each key gets), and the largest weight of each query. */
export function marginals(of: Matrix): { keys: Float32Array; queries: Float32Array } {
  const keys = new Float32Array(of.columns);
  const queries = new Float32Array(of.rows);
  for (let i = 0; i < of.rows; i += 1) {
    const weights = row(of, i);
    for (let j = 0; j < of.columns; j += 1) {
      const size = of.signed ? Math.abs(weights[j]) : weights[j];
      keys[j] += size / of.rows;
      if (size > queries[i]) queries[i] = size;
    }
  }
  return { keys, queries };
}

/** What some of the statistics count. */
export interface Counting {
  /** Tokens to each side that are near. */
  window: number;
  /** First keys that are sinks. */
  sinks: number;
  /** Labels of tokens by the name of their class. */
  classes: Record<string, string[]>;
}

export const COUNTING: Counting = { window: 8, sinks: 1, classes: {} };

/** The statistics of a head, by the names of the API: name, label, and a sentence that says what its ends mean. Means over the queries that attend to anything. */
export const statisticsOf = ({ window, sinks, classes }: Counting): [string, string, string][] => [
  ["entropy", "entropy, nats", "How widely a query looks, −Σ p ln p of its shares: 0 if at one key, ln(n) if at n keys alike."],
  ["effective_keys", "effective keys", "The number of keys that a query looks at, exp(−Σ p ln p): 1 if at one, n if at n alike."],
  ["max_weight", "largest weight", "The largest weight of a query: 1 if it looks at one key alone, near 0 if at very many."],
  ["mean_distance", "mean distance, tokens", "How far away the keys are, Σ p · |j − i|: 0 if a query looks at itself, 1 if at a neighbour."],
  ["signed_distance", "signed distance", "How far ahead the keys are, Σ p · (j − i): below 0 for a head that looks back, 0 at itself or evenly around it, −1 at the token before."],
  ["locality", `within ${window} tokens`, `The share of the keys at most ${window} tokens away: 1 if a query looks at near keys alone, 0 if at far ones.`],
  ["first_key", "first key", "The share of the first key: 1 if a query looks at it alone, 0 if never."],
  ["sink_share", sinks === 1 ? "sinks: first key" : `sinks: first ${sinks} keys`, `The share of the first ${sinks} keys, which often take what a head has no use for (Xiao et al. 2024): 1 if all, 0 if nothing.`],
  ["own_position", "own position", "The share of the key at the query's own position: 1 if each token looks at itself, 0 if never."],
  ["previous_token", "previous token", "The share of the key before the query's own position: 1 if each token looks at the one before it, 0 if never."],
  ["next_token", "next token", "The share of the key after the query's own position: 1 if each token looks at the next, 0 if never, as under a causal mask."],
  ["duplicate_token", "duplicate token", "The share of earlier keys with the query's own token (Wang et al. 2023): 1 if each looks at its earlier copies, 0 if never, or if no token comes twice."],
  ["induction", "induction", "The share of earlier keys that follow a token equal to the query's (Olsson et al. 2022): 1 if each looks at what followed its earlier copies, 0 if never, or if no token comes twice."],
  ["alignment", "alignment", "Whether later queries look at later keys (Somers 1962): 1 if each query looks at later keys than the queries before it, 0 if all look at the same keys, −1 if at earlier keys."],
  ...Object.keys(classes).map((name): [string, string, string] => [CLASSES + name, `class ${name}`, `The share of the keys ${classes[name].join(" ")} (Clark et al. 2019): 1 if a query looks at these alone, 0 if never.`]),
];

/** The statistics to show: the share of the sinks is that of the first key where this is the only sink. */
export const shownStatistics = (counting: Counting) => statisticsOf(counting).filter(([name]) => name !== "sink_share" || counting.sinks !== 1);

export type Statistics = Record<string, number>;
/** What stands before the name of a class. */
export const CLASSES = "classes.";
/** The statistics that compare tokens. */
export const OF_TOKENS: readonly string[] = ["duplicate_token", "induction"];

/** The labels of the tokens of self-attention; none where queries and keys differ. */
export const tokensOf = ({ queries, keys }: Labels) => (queries.length === keys.length ? queries : []);

interface Labels {
  queries: string[];
  keys: string[];
  ids?: number[];
}

/** A number for each token, equal for equal ones. */
export function tokenIds(tokens: string[]): number[] {
  const numbers = new Map<string, number>();
  return tokens.map((token) => numbers.get(token) ?? (numbers.set(token, numbers.size), numbers.size - 1));
}

/** The statistics of one head, with positions counted from the first key; of weights of either sign those of the shares |w| / Σ|w|. */
export function statistics(of: Matrix, labels: Labels = { queries: [], keys: [] }, counting = COUNTING): Statistics {
  const tokens = tokensOf(labels);
  const counted = statisticsOf(counting);
  const classes = Object.entries(counting.classes).map(([name, members]): [string, boolean[]] => [CLASSES + name, labels.keys.map((key) => members.includes(plainToken(key)))]);
  const numbers = tokens.length ? (labels.ids ?? tokenIds(tokens)) : [];
  const ids = new Set(numbers).size < numbers.length ? numbers : [];
  const sums: Statistics = Object.fromEntries(counted.map(([name]) => [name, 0]));
  const earlier = new Float64Array(of.columns); // the shares of the earlier queries, added up
  let queries = 0;
  for (let i = 0; i < of.rows; i += 1) {
    const weights = row(of, i);
    let total = 0;
    let most = 0;
    for (const weight of weights) {
      const size = of.signed ? Math.abs(weight) : weight;
      total += size;
      if (size > most) most = size;
    }
    if (!(total > 0)) continue;
    queries += 1;
    let entropy = 0;
    let before = 0;
    const at = (j: number) => (j >= 0 && j < weights.length ? (of.signed ? Math.abs(weights[j]) : weights[j]) / total : 0);
    for (let j = 0; j < weights.length; j += 1) {
      const share = at(j);
      if (share > 0) entropy -= share * Math.log(share);
      sums.alignment += share * (2 * before + earlier[j] - (queries - 1));
      before += earlier[j];
      earlier[j] += share;
      sums.mean_distance += share * Math.abs(i - j);
      sums.signed_distance += share * (j - i);
      if (Math.abs(i - j) <= counting.window) sums.locality += share;
      if (j < counting.sinks) sums.sink_share += share;
      for (const [name, members] of classes) if (members[j]) sums[name] += share;
    }
    sums.entropy += entropy;
    sums.effective_keys += Math.exp(entropy);
    sums.max_weight += of.signed ? most / total : most;
    sums.first_key += at(0);
    sums.own_position += at(i);
    sums.previous_token += at(i - 1);
    sums.next_token += at(i + 1);
    for (let j = 0; ids.length && j < i; j += 1) {
      if (ids[j] !== ids[i]) continue;
      sums.duplicate_token += at(j);
      sums.induction += at(j + 1);
    }
  }
  const pairs = (queries * (queries - 1)) / 2;
  return Object.fromEntries(counted.map(([name]) => [name, queries ? sums[name] / (name === "alignment" ? pairs : queries) : NaN]));
}

/** Jensen-Shannon divergence of the shares of each two rows in nats (Lin 1991), and its mean. */
export function divergence(one: Matrix, other: Matrix): { rows: Float32Array; mean: number } {
  const rows = new Float32Array(one.rows);
  for (let i = 0; i < one.rows; i += 1) {
    const [a, b] = [row(one, i), row(other, i)];
    const [ofA, ofB] = [1 / (total(a) || 1), 1 / (total(b) || 1)];
    let sum = 0;
    for (let j = 0; j < a.length; j += 1) sum += apart(Math.abs(a[j]) * ofA, Math.abs(b[j]) * ofB);
    rows[i] = sum;
  }
  return { rows, mean: rows.reduce((a, b) => a + b, 0) / Math.max(1, one.rows) };
}

const SERIES = 0.3;

/** The part of two shares in the divergence: with m their mean and p, q = m(1 ± x), m/2 · ((1 + x) ln(1 + x) + (1 − x) ln(1 − x)). */
function apart(p: number, q: number): number {
  const both = p + q;
  if (!(both > 0)) return 0;
  const x = (p - q) / both;
  const square = x * x;
  // The series Σ x²ⁿ / (n(2n − 1)) to its sixth term is right to 1e-9, and much faster than two logarithms.
  if (x < SERIES && x > -SERIES) return (both / 4) * square * (1 + square * (1 / 6 + square * (1 / 15 + square * (1 / 28 + square * (1 / 45 + square / 66)))));
  return (both / 4) * ((x > -1 ? (1 + x) * Math.log(1 + x) : 0) + (x < 1 ? (1 - x) * Math.log(1 - x) : 0));
}

function total(weights: Float32Array): number {
  let sum = 0;
  for (let j = 0; j < weights.length; j += 1) sum += Math.abs(weights[j]);
  return sum;
}

/** A matrix as rows of a table, the first of them its heads. */
export const matrixRows = (of: Matrix, queries: string[], keys: string[]) => [
  ["query", ...keys],
  ...queries.map((query, i) => [query, ...Array.from(row(of, i))]),
];
