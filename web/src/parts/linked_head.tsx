/** One head as token lines beside its heat map: a token or a cell under the pointer shows its lines and its weight in both. */

import { usePage } from "../page/context";
import type { Range } from "../drawing/drawings";
import { HeatMap } from "./heatmap";
import type { Matrix, Spread } from "../numbers/matrix";
import type { Cell } from "../drawing/painter";
import { usePointed, usePointing } from "../drawing/pointed";
import { TokenLines, readout } from "./token_lines";
import { ringed } from "../page/tour";

interface LinkedHeadProps {
  of: Matrix;
  queries: string[];
  keys: string[];
  title: string;
  range: Range;
  shared?: Spread | undefined;
  /** The most tokens that are drawn with lines. */
  most?: number;
  pick?: (cell: Cell) => void;
}

const MOST_LINES = 48; // tokens of a drawing with lines, which stands above its map
const LEAST = { all: 0.15, one: 0.01 }; // weights that are drawn as lines

export function LinkedHead({ of, queries, keys, title, range, shared, most = MOST_LINES, pick }: LinkedHeadProps) {
  const { params } = usePage();
  const pointed = usePointed(usePointing());
  return (
    <div class={ringed(params, title, queries, keys).length ? "linked ringed" : "linked"}>
      <p class="readout" aria-hidden="true">{readout([{ of }], queries, keys, pointed)}</p>
      {Math.max(queries.length, keys.length) <= most && <TokenLines fit drawn={[{ of }]} queries={queries} keys={keys} title={title} least={LEAST} />}
      <HeatMap of={of} queries={queries} keys={keys} title={title} range={range} {...(shared ? { shared } : {})} {...(pick ? { pick } : {})} />
    </div>
  );
}
