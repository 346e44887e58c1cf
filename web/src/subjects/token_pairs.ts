/** Pairs of tokens of a text, a query and a key each, and the heads that look from one to the other. */

import type { ModelInfo } from "../server/types";
import { headName } from "./subject";

export type TokenPair = [number, number];

const PAIR = /^(\d+)\s*[-–→>:]\s*(\d+)$/;

/** The pairs that a text such as `3-7, 10-12` names, and the first fault in it; an empty text if there is none. */
export function readPairs(text: string, tokens = Infinity): { pairs: TokenPair[]; fault: string } {
  const pairs: TokenPair[] = [];
  let fault = "";
  for (const part of text.split(/[,;\n]+/).map((each) => each.trim()).filter(Boolean)) {
    const read = PAIR.exec(part);
    const pair = read && ([Number(read[1]), Number(read[2])] as TokenPair);
    if (!pair) fault ||= `“${part}” is no pair: write the numbers of a query and a key, as in 3-7.`;
    else if (Math.max(...pair) >= tokens) fault ||= `There is no token ${Math.max(...pair)}: the last one is ${tokens - 1}.`;
    else if (!pairs.some(([query, key]) => query === pair[0] && key === pair[1])) pairs.push(pair);
  }
  return { pairs, fault };
}

export const writePairs = (pairs: TokenPair[]) => pairs.map((each) => each.join("-")).join(", ");

/** The numbers of a head at the pairs: from query to key, from key to query, and both added. */
export const LINKS: [string, string, string][] = [
  ["share", "query → key", "the mean weight from the query to the key"],
  ["first", "key is first", "the share of pairs whose key has the largest weight of its query"],
  ["swapped_share", "key → query", "the mean weight from the key to the query"],
  ["swapped_first", "query is first", "the share of pairs whose query has the largest weight of its key"],
  ["both_share", "both added", "the mean of both weights added"],
  ["both_first", "first of both", "the share of pairs whose key has the largest sum of both weights"],
];

export interface PairsReply {
  layers: { layer: number | string; implicit?: boolean; statistics: { pairs: Partial<Record<string, number[]>> } }[];
}

export interface LinkingHead {
  ref: string;
  /** The index of its layer in the reply. */
  row: number;
  head: number;
  name: string;
  values: Record<string, number>;
}

/** The heads of a reply, those with the largest number first. */
export function linking({ layers }: PairsReply, by: string): LinkingHead[] {
  const heads = layers.flatMap(({ layer, statistics: { pairs } }, row) => (pairs.share ?? []).map((_, head): LinkingHead => ({ ref: String(layer), row, head, name: headName(layer, head), values: Object.fromEntries(LINKS.map(([name]) => [name, pairs[name]?.[head] ?? NaN])) })));
  return heads.sort((a, b) => b.values[by] - a.values[by]);
}

/** The layers whose queries and keys are the tokens of the text, where a model has others too. */
export function textLayers({ layers }: Pick<ModelInfo, "layers">): (number | string)[] | null {
  const encodes = layers.some(({ layer }) => String(layer).startsWith("encoder."));
  const own = layers.map(({ layer }) => layer).filter((layer) => !/^(vision|audio|cross)\./.test(String(layer)) && (!encodes || String(layer).startsWith("encoder.")));
  return own.length < layers.length ? own : null;
}
