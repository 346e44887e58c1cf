/** One head as token lines beside its heat map: a token or a cell under the pointer shows its lines and its weight in both. */

import { useEffect, useState } from "preact/hooks";
import { usePage } from "./context";
import { lineScene } from "./drawings";
import type { Range } from "./drawings";
import { precise } from "./format";
import { HeatMap } from "./heatmap";
import { row } from "./matrix";
import type { Matrix } from "./matrix";
import type { Cell } from "./painter";
import { Drawing } from "./ui";

interface LinkedHeadProps {
  of: Matrix;
  queries: string[];
  keys: string[];
  title: string;
  range: Range;
  shared?: number;
  /** The most tokens that are drawn with lines. */
  most?: number;
  pick?: (cell: Cell) => void;
}

const MOST_LINES = 48; // tokens of a drawing with lines, which stands above its map
const LEAST = { all: 0.15, one: 0.01 }; // weights that are drawn as lines
const TOLD = 4; // keys of a query that are named

/** A query, a key, or both. */
interface Pointed {
  query: number | null;
  key: number | null;
}
const NOTHING: Pointed = { query: null, key: null };

export function LinkedHead({ of, queries, keys, title, range, shared = 0, most = MOST_LINES, pick }: LinkedHeadProps) {
  const { theme } = usePage();
  const [pointed, point] = useState<Pointed>(NOTHING); // in the lines
  const [cell, setCell] = useState<Cell | null>(null); // in the map
  useEffect(() => {
    point(NOTHING);
    setCell(null);
  }, [queries, keys]);
  const { query, key } = cell ?? pointed;
  const lines = Math.max(queries.length, keys.length) <= most;
  const scene = lines ? lineScene(of, { theme, title: "", queries, keys, least: query === null && key === null ? LEAST.all : LEAST.one, only: query, onlyKey: key !== null && query === null ? key : null }) : null;
  /** The token at a point of the drawing. */
  const at = (x: number, y: number) => {
    if (!scene) return;
    const i = Math.floor((y - scene.top) / scene.high);
    const isKey = x > scene.width / 2;
    const inside = i >= 0 && i < (isKey ? keys : queries).length;
    point(!inside ? NOTHING : isKey ? { query: pointed.query, key: i } : { query: i, key: null });
  };
  return (
    <div class="linked">
      <p class="readout" aria-hidden="true">{told(of, queries, keys, query, key)}</p>
      {scene && <Drawing fit scene={{ ...scene, title: `Token lines of ${title}` }} point={at} leave={() => point(NOTHING)} />}
      <HeatMap of={of} queries={queries} keys={keys} title={title} range={range} shared={shared} hovered={setCell} {...(pick ? { pick } : {})}
        at={pointed.query !== null && pointed.key !== null ? { query: pointed.query, key: pointed.key } : null} />
    </div>
  );
}

/** What the token or the cell under the pointer says. */
function told(of: Matrix, queries: string[], keys: string[], query: number | null, key: number | null): string {
  if (query === null && key === null) return "Point at a token or a cell.";
  const name = (list: string[], i: number) => list[i] ?? "";
  if (query !== null && key !== null) return `${name(queries, query)} looks at ${name(keys, key)}: ${precise(of.data[query * of.columns + key] ?? 0, 3)}`;
  const weights = query !== null ? Array.from(row(of, query)) : Array.from({ length: of.rows }, (_, i) => of.data[i * of.columns + (key ?? 0)]);
  const best = weights.map((weight, i) => ({ weight, i })).sort((a, b) => b.weight - a.weight).slice(0, TOLD).filter(({ weight }) => weight > 0);
  const list = best.map(({ weight, i }) => `${name(query !== null ? keys : queries, i)} ${weight.toFixed(2)}`).join(" · ");
  return query !== null ? `${name(queries, query)} looks at ${list}` : `${name(keys, key ?? 0)} is looked at by ${list}`;
}
