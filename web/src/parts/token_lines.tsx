/** Lines from token to token of one head or of several; what is pointed at is shared with the other drawings of the view. */

import { usePage } from "../page/context";
import { lineScene } from "../drawing/drawings";
import type { Lines } from "../drawing/drawings";
import { precise, whole } from "../numbers/format";
import { row } from "../numbers/matrix";
import type { Matrix } from "../numbers/matrix";
import { NOWHERE, usePointed, usePointing } from "../drawing/pointed";
import type { Pointed } from "../drawing/pointed";
import { Drawing } from "./ui";

interface TokenLinesProps {
  drawn: Lines[];
  queries: string[];
  keys: string[];
  title: string;
  /** The least weight that is a line: of all tokens, and of one that is pointed at. */
  least: { all: number; one: number };
  /** The query whose lines are drawn while nothing is pointed at; null for all. */
  only?: number | null;
  /** A line was clicked: the index of its head among those drawn. */
  pick?: (at: number, query: number, key: number) => void;
  fit?: boolean;
}

export function TokenLines({ drawn, queries, keys, title, least, only = null, pick, fit = false }: TokenLinesProps) {
  const { theme } = usePage();
  const pointing = usePointing();
  const pointed = usePointed(pointing);
  const query = pointed.query ?? (pointed.key === null ? only : null);
  const scene = lineScene(drawn, { theme, title: "", queries, keys, least: query === null && pointed.key === null ? least.all : least.one, only: query, onlyKey: pointed.key });
  /** The token at a point of the drawing. */
  const at = (x: number, y: number) => {
    const i = Math.floor((y - scene.top) / scene.high);
    const isKey = x > scene.width / 2;
    const inside = i >= 0 && i < (isKey ? keys : queries).length;
    pointing.set(!inside ? NOWHERE : isKey ? { query: pointing.now.query, key: i } : { query: i, key: null });
  };
  return (
    <>
      <Drawing fit={fit} scene={{ ...scene, title: `Token lines of ${title}` }} point={at} leave={() => pointing.set(NOWHERE)}
        {...(pick ? { pick: (name: string) => pick(...(name.split(",").map(Number) as [number, number, number])) } : {})} />
      {scene.left > 0 && <p class="small">The {whole(scene.drawn)} strongest of {whole(scene.drawn + scene.left)} lines.</p>}
    </>
  );
}

/** What the tokens that are pointed at say, of one head or of several: the weight of a pair, or the strongest ones of a token. */
export function readout(heads: { name?: string; of: Matrix }[], queries: string[], keys: string[], { query, key }: Pointed): string {
  const [{ of: { rows, columns } }] = heads;
  const alone = heads.length === 1;
  if ((query !== null && query >= rows) || (key !== null && key >= columns) || (query === null && key === null)) return `Point at a token${alone ? " or a cell" : ""}.`;
  /** The words of each head, after its name where there are several. */
  const each = (words: (of: Matrix) => string) => heads.map(({ name, of }) => (alone ? words(of) : `${name} ${words(of)}`)).join(" · ");
  if (query !== null && key !== null) return `${queries[query]} looks at ${keys[key]}: ${each((of) => precise(of.data[query * columns + key], 3))}`;
  const list = each((of) => strongest(weightsOf(of, query, key), alone ? TOLD : 1).map(({ weight, i }) => `${(query !== null ? keys : queries)[i]} ${of.signed ? precise(weight, 2) : weight.toFixed(2)}`).join(" · ") || "nothing");
  const most = alone ? "" : " most";
  return query !== null ? `${queries[query]} looks${most} at ${list}` : `${keys[key ?? 0]} is looked at${most} by ${list}`;
}

const TOLD = 4; // tokens that are named

/** The weights of the token that is pointed at: those with which a query looks at all keys, or those with which all queries look at a key. */
const weightsOf = (of: Matrix, query: number | null, key: number | null) =>
  query !== null ? Array.from(row(of, query)) : Array.from({ length: of.rows }, (_, i) => of.data[i * of.columns + (key ?? 0)]);

function strongest(weights: number[], most: number): { weight: number; i: number }[] {
  return weights.map((weight, i) => ({ weight, i })).sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight)).slice(0, most).filter(({ weight }) => weight !== 0);
}
