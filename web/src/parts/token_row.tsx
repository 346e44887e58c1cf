/** The tokens as a text: the one that is pointed at, and how much a head lets it look at each of the others. */

import type { TargetedPointerEvent } from "preact";
import { SCALES, colour, step } from "../drawing/colour";
import { usePage } from "../page/context";
import { largest } from "../numbers/matrix";
import type { Matrix } from "../numbers/matrix";
import { NOWHERE, usePointed, usePointing } from "../drawing/pointed";
import type { Pointed } from "../drawing/pointed";
import { readout } from "./token_lines";

const MOST_TOKENS = 128;
const DARKEST = { light: 0.5, dark: 0.35 }; // of the scale: letters stay readable

interface TokenRowProps {
  of: Matrix;
  queries: string[];
  keys: string[];
  /** What is shown while nothing is pointed at. */
  at?: Pointed;
  pick?: (query: number) => void;
  /** Say below what is pointed at. */
  say?: boolean;
}

export function TokenRow({ of, queries, keys, at = NOWHERE, pick, say = false }: TokenRowProps) {
  const { theme } = usePage();
  const pointing = usePointing();
  const now = usePointed(pointing);
  const few = keys.length <= MOST_TOKENS; // else the queries stand alone, as the words of a text about a long sound
  const whole = of.rows === queries.length && of.columns === keys.length;
  if (queries.length > MOST_TOKENS || (few && !whole)) return null;
  const pointed = now.query === null && now.key === null ? at : now;
  const { query, key } = pointed;
  const one = queries.length === keys.length && queries.every((each, i) => each === keys[i]); // queries and keys are the same tokens
  /** Weights from the query to the keys, or to the key from the queries. */
  const toKeys = (j: number) => (whole && query !== null && query < of.rows ? of.data[query * of.columns + j] : 0);
  const fromQueries = (i: number) => (whole && query === null && key !== null && key < of.columns ? of.data[i * of.columns + key] : 0);
  const most = of.signed ? largest(of.data) || 1 : 1;
  const shade = (weight: number) => (of.signed ? SCALES.differences[theme].css[step(0.5 + (DARKEST[theme] * weight) / most / 2)] : colour(theme, DARKEST[theme] * weight));
  const list = (tokens: string[], isKey: boolean, weight: (i: number) => number) => {
    const point = (i: number) => () => pointing.set(isKey ? { query: null, key: i } : { query: i, key: null });
    const enter = (i: number) => (event: TargetedPointerEvent<HTMLSpanElement>) => event.pointerType !== "touch" && point(i)();
    return tokens.map((token, i) => {
      const marks = [...(!isKey && i === query ? ["query"] : []), ...((isKey || one) && i === key ? ["key"] : [])];
      return (
        <span key={i} class={marks.join(" ") || undefined} style={{ background: shade(weight(i)) }}
          onPointerEnter={enter(i)} onPointerDown={point(i)} onClick={pick && !isKey ? () => pick(i) : undefined}>{token}</span>
      );
    });
  };
  return (
    <div class="tokens" onPointerLeave={() => pointing.set(NOWHERE)}>
      {one ? <p>{list(queries, false, (i) => toKeys(i) || fromQueries(i))}</p> : <><p><small>queries</small> {list(queries, false, fromQueries)}</p>{few && <p><small>keys</small> {list(keys, true, toKeys)}</p>}</>}
      {say && whole && <p class="caption" aria-hidden="true">{readout([{ of }], queries, keys, pointed)}</p>}
    </div>
  );
}
