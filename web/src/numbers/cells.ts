/** The cells of a head at several levels of detail: of a matrix that is here, or in strips that a server pools. */

import { largest, marginals, pyramid, spreadOf } from "./matrix";
import type { Matrix, Spread } from "./matrix";

/** Rows of a level from `top` on, all columns. */
export interface Strip {
  level: number;
  top: number;
  of: Matrix;
}

export interface Cells {
  rows: number;
  columns: number;
  /** Levels of detail: a cell of level l is the largest of 2^l × 2^l cells. */
  levels: number;
  /** The largest magnitude. */
  most: number;
  /** What the scale of colours is made of: the ends of the numbers, of weights without those of queries with one key. */
  spread: Spread;
  /** What is drawn beside rows and columns: a number for each `every` of them. */
  bars: { queries: Float32Array; keys: Float32Array; every: number };
  /** What there is to paint of a level's rows `top` to before `below`, coarser strips first. */
  strips(level: number, top: number, below: number): Strip[];
  /** A cell's number; undefined until it is here. */
  value(query: number, key: number): number | undefined;
  /** Weights of either sign, as in `Matrix`. */
  signed?: boolean;
  /** False for a key that its query may not look at, of a layer that chooses keys. */
  chosen?(query: number, key: number): boolean;
}

/** The cells of a matrix: beside them the largest weight of each query, and the mean that each key receives. */
export function whole(of: Matrix, signed = of.signed): Cells {
  const levels = pyramid(of);
  const { chosen } = of;
  return {
    rows: of.rows,
    columns: of.columns,
    levels: levels.length,
    most: largest(of.data),
    spread: signed ? { low: 0, high: largest(of.data) } : spreadOf(of),
    bars: { ...marginals(of), every: 1 },
    strips: (level) => [{ level, top: 0, of: levels[level] }],
    value: (query, key) => of.data[query * of.columns + key],
    ...(of.signed && { signed: true }),
    ...(chosen && { chosen: (query: number, key: number) => chosen[query * of.columns + key] === 1 }),
  };
}

/** Read rows `first` to before `last` with the largest of each square of `pool` cells; with 1, the cells themselves. */
export type Read = (pool: number, first: number, last: number) => Promise<Matrix>;

const LEAST_SIDE = 512; // cells a side of the coarsest level, which is read whole
const STRIP_CELLS = 2 ** 19;
const KEPT_CELLS = 2 ** 25; // 128 MiB
const VIEWED_CELLS = KEPT_CELLS / 2; // more would push each other out, and be read again and again
const PATIENCE_MS = 60; // a zoom passes through levels that nobody needs to see

/** A strip that is not here: rows `top` to before `below` of a level. */
interface Missing {
  name: string;
  level: number;
  top: number;
  below: number;
}

/** The cells of a head that are read from a server as they come into view. */
export class Tiles implements Cells {
  readonly levels: number;
  readonly most: number;
  readonly spread: Spread;
  readonly bars: Cells["bars"];
  readonly signed: boolean;
  /** Called when a strip came. */
  changed: () => void = () => undefined;
  /** Called when no strip is waited for any more. */
  settled: () => void = () => undefined;
  private readonly kept = new Map<string, Strip>();
  private readonly reading = new Set<string>();
  private wanted: Missing[] = [];
  private row: Missing | null = null;
  private cells = 0; // of the strips that are kept
  private timer: ReturnType<typeof setTimeout> | undefined;

  private constructor(readonly rows: number, readonly columns: number, readonly coarsest: Matrix, private readonly read: Read, halvings: number) {
    this.levels = halvings + 1;
    this.signed = coarsest.signed ?? false;
    this.most = largest(coarsest.data);
    this.spread = { ...spreadOf(coarsest), high: this.most };
    const keys = new Float32Array(coarsest.columns);
    coarsest.data.forEach((value, at) => (keys[at % keys.length] = Math.max(keys[at % keys.length], value)));
    this.bars = { queries: marginals(coarsest).queries, keys, every: 2 ** halvings };
  }

  /** How often the coarsest level of a head of this size is halved. */
  static halvings(rows: number, columns: number): number {
    return Math.max(1, Math.ceil(Math.log2(Math.max(rows, columns) / LEAST_SIDE)));
  }

  /** Read the coarsest level. Its bars are the largest weights of queries and of keys. */
  static async open(rows: number, columns: number, read: Read): Promise<Tiles> {
    const halvings = Tiles.halvings(rows, columns);
    return new Tiles(rows, columns, await read(2 ** halvings, 0, rows), read, halvings);
  }

  /** True while strips are asked for that are not here. */
  get waits(): boolean {
    return this.timer !== undefined || this.reading.size > 0;
  }

  /** Strips of a coarser level where those of this one are too many. */
  strips(level: number, top: number, below: number): Strip[] {
    const wide = Math.ceil(this.columns / 2 ** level);
    if (level < this.levels - 1 && (below - top) * wide > VIEWED_CELLS) return this.strips(level + 1, Math.floor(top / 2), Math.ceil(below / 2));
    const found = [{ level: this.levels - 1, top: 0, of: this.coarsest }];
    if (level >= this.levels - 1) return found;
    const height = Math.max(1, Math.floor(STRIP_CELLS / wide));
    this.wanted = [];
    for (let at = Math.floor(top / height); at * height < below; at += 1) {
      const strip = this.find({ name: `${level}/${at}`, level, top: at * height, below: (at + 1) * height });
      if ("of" in strip) found.push(strip);
      else this.wanted.push(strip);
    }
    return found;
  }

  value(query: number, key: number): number | undefined {
    const strip = this.find({ name: `row/${query}`, level: 0, top: query, below: query + 1 });
    if ("of" in strip) return strip.of.data[key];
    this.row = strip;
    return undefined;
  }

  /** A strip that is here, or else the same that is missing; what is missing then is read soon. */
  private find(missing: Missing): Strip | Missing {
    const strip = this.kept.get(missing.name);
    if (strip) {
      this.kept.delete(missing.name);
      this.kept.set(missing.name, strip); // the latest used come last
      return strip;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = undefined;
      [...this.wanted, ...(this.row ? [this.row] : [])].forEach((each) => void this.load(each));
      if (!this.waits) this.settled();
    }, PATIENCE_MS);
    return missing;
  }

  private async load({ name, level, top, below }: Missing): Promise<void> {
    if (this.kept.has(name) || this.reading.has(name)) return;
    this.reading.add(name);
    try {
      const pool = 2 ** level;
      const of = await this.read(pool, top * pool, Math.min(below * pool, this.rows));
      this.kept.set(name, { level, top, of });
      this.cells += of.data.length;
      for (const [oldest, strip] of this.kept) {
        if (this.cells <= KEPT_CELLS) break;
        this.kept.delete(oldest);
        this.cells -= strip.of.data.length;
      }
      this.changed();
    } catch {
      // The coarser strip stays in view; the next look at this place asks again.
    } finally {
      this.reading.delete(name);
      if (!this.waits) this.settled();
    }
  }
}
