/** Interventions on an attention, as the API takes them, kept as text in the URL. */

import { decimal } from "../page/state";
import type { Params } from "../page/state";
import type { Body } from "../server/tensors";

export interface Edit {
  tap: string;
  heads?: number[];
  queries?: number[];
  keys?: number[];
  set?: number;
  scale?: number;
  renormalize?: boolean;
}

const isEdit = (each: Partial<Edit> | null): each is Edit =>
  typeof each?.tap === "string" && [each.heads, each.queries, each.keys].every((at) => at === undefined || Array.isArray(at));

/** Read edits; text that holds none gives none. */
function readEdits(text: string | undefined): Edit[] {
  try {
    const read: unknown = JSON.parse(text ?? "[]");
    return Array.isArray(read) ? (read as (Partial<Edit> | null)[]).filter(isEdit) : [];
  } catch {
    return [];
  }
}

/** What is changed, by the parameters of the page. */
export const readChanges = (params: Params) => ({ edits: readEdits(params.edits), temperature: decimal(params.temperature, 1, 0.25, 4), causal: Boolean(params.masked) });

export const writeEdits = (edits: Edit[]) => (edits.length ? JSON.stringify(edits) : "");

const same = (one: Edit, other: Edit) => JSON.stringify(one) === JSON.stringify(other);

/** Add an edit, or take it away if it is there. */
export const toggled = (edits: Edit[], edit: Edit) => (edits.some((each) => same(each, edit)) ? edits.filter((each) => !same(each, edit)) : [...edits, edit]);

export const has = (edits: Edit[], edit: Edit) => edits.some((each) => same(each, edit));

/** Knock out a head: it adds nothing to the output. */
export const noHead = (head: number): Edit => ({ tap: "context", heads: [head], set: 0 });
/** Hide a token from all queries of all heads; the other keys share its weight. */
export const noToken = (key: number): Edit => ({ tap: "weights", keys: [key], set: 0, renormalize: true });
/** Hide a key from one query of one head. */
export const noCell = (head: number, query: number, key: number): Edit => ({ tap: "weights", heads: [head], queries: [query], keys: [key], set: 0, renormalize: true });

/** What an edit does, in words. */
export function describeEdit({ tap, heads, queries, keys, set, scale }: Edit, names: { heads: string[]; queries: string[]; keys: string[] }): string {
  const list = (label: string, at: number[] | undefined, of: string[]) => (at ? ` ${label} ${at.map((i) => of[i] ?? String(i)).join(", ")}` : "");
  const what = set === undefined ? `× ${scale ?? 1}` : `= ${set}`;
  return `${tap}${list("of", heads, names.heads)}${list("from", queries, names.queries)}${list("to", keys, names.keys)} ${what}`;
}

/** The same change as edits alone: a mask hides keys, and the others share their weight. */
export function wholeEdits(edits: Edit[], temperature: number, causal: boolean, queries: number, keys: number): Edit[] {
  const hidden = causal ? Array.from({ length: queries }, (_, i) => ({ query: i, from: Math.max(0, i + keys - queries + 1) })).filter(({ from }) => from < keys) : [];
  const masks = hidden.map(({ query, from }): Edit => ({ tap: "weights", queries: [query], keys: Array.from({ length: keys - from }, (_, j) => from + j), set: 0, renormalize: true }));
  return [...(temperature === 1 ? [] : [{ tap: "masked_scores", scale: 1 / temperature }]), ...masks, ...edits];
}

/** The fields of a request with these edits, a temperature, and a causal mask if wanted. */
export function editedFields(edits: Edit[], temperature: number, causal: boolean, queries: number, keys: number): Body {
  const all: Edit[] = temperature === 1 ? edits : [{ tap: "masked_scores", scale: 1 / temperature }, ...edits];
  const fields: Body = { edits: all };
  if (causal) fields.mask = Array.from({ length: queries }, (_, i) => Array.from({ length: keys }, (__, j) => j <= i + keys - queries));
  return fields;
}
