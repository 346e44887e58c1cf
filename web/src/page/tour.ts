/** The tour: five findings in the model that ships, where each is seen, and the cells that show it. */

import { integer, format } from "./state";
import type { Params, State } from "./state";

interface Finding {
  title: string;
  about: string;
  /** Where it is seen. */
  at: State;
  /** The head that shows it. */
  head: string;
  /** True for a cell that shows it, of queries and keys that are the same tokens. */
  shows: (query: number, key: number, tokens: string[]) => boolean;
  /** The next token that it is about, with its id in the model. */
  token?: { id: number; token: string };
}

const REPEATED = "Kate met Tamiro in the park. Then Tamiro met Kate in the park. Then Kate met Tamiro";
const tiny = (view: string, params: State["params"]): State => ({ view, params: { source: "model:tiny", ...params } });
const afterTheLast = (query: number, key: number, tokens: string[]) => key > 0 && key <= query && tokens[key - 1] === tokens[query];

export const FINDINGS: Finding[] = [
  { title: "A head looks one token back", about: "Every token looks at the one before it, so that the next layer knows what stood there: the line below the diagonal is dark.", at: tiny("head", { layer: "0", head: "0" }), head: "L0H0", shows: (query, key) => key === query - 1 },
  { title: "A head looks at its own token", about: "L0H1 looks at the token itself: the diagonal is dark.", at: tiny("head", { layer: "0", head: "1" }), head: "L0H1", shows: (query, key) => query > 0 && key === query },
  { title: "Induction: a head looks at what came next last time", about: "In a text that repeats, the head looks at what followed the same token before, and the model goes on in the same way (Olsson et al. 2022). Sorted by induction, it comes first.", at: tiny("overview", { text: REPEATED, sort: "induction" }), head: "L1H0", shows: afterTheLast },
  { title: "A sink: a head that rests on the first token", about: "A head that has nothing to look for puts its weight on the first token (Xiao et al. 2024): its column is dark.", at: tiny("head", { layer: "2", head: "3" }), head: "L2H3", shows: (query, key) => query > 0 && key === 0 },
  { title: "Without the induction head the name is lost", about: "The text ends in the middle of a name that it has had before. With the induction head knocked out, the model no longer knows how the name goes on: see the likeliest next tokens, and press its button to bring it back.", at: tiny("decode", { layer: "1", head: "0", knocked: "1.0" }), head: "L1H0", shows: afterTheLast, token: { id: 299, token: "ir" } },
];

/** The number of the finding that the tour is at, from 1; 0 outside the tour. */
export const stopOf = (params: Params) => integer(params.tour, 0, 0, FINDINGS.length);

/** The finding that the tour is at. */
export const findingOf = (params: Params) => (stopOf(params) ? FINDINGS[stopOf(params) - 1] : undefined);

/** The parameters of a stop of the tour. Nothing of the subject at hand comes along but how the page looks. */
export function paramsOf(stop: number, { theme, shortcuts, embed }: Params): Params {
  return { ...FINDINGS[stop - 1].at.params, ...(theme && { theme }), ...(shortcuts && { shortcuts }), ...(embed && { embed }), tour: String(stop) };
}

/** The address of a stop of the tour. */
export const addressOf = (stop: number, params: Params) => format({ view: FINDINGS[stop - 1].at.view, params: paramsOf(stop, params) });

const MOST_TOKENS = 128;

/** The cells of a head that show the finding that the tour is at: `query,key`. */
export function ringed(params: Params, head: string, queries: string[], keys: string[]): [number, number][] {
  const finding = findingOf(params);
  if (finding?.head !== head || queries.length !== keys.length || queries.length > MOST_TOKENS) return [];
  return queries.flatMap((_, query) => keys.flatMap((__, key): [number, number][] => (finding.shows(query, key, queries) ? [[query, key]] : [])));
}
