/** Surveys: every statistic of every head of a model over many texts, asked for a few texts at a time, or over sounds or images one by one. */

import { Problem, call, callTensors } from "../server/api";
import type { ApiRequest } from "../server/api";
import type { Body } from "../server/tensors";
import { COUNTING, statisticsOf } from "../numbers/matrix";
import { headName } from "./subject";

export const SURVEYED = statisticsOf(COUNTING);
/** The statistic of a survey with a needle. */
export const RETRIEVAL: [string, string, string] = ["retrieval", "retrieval of the needle", "the share of the needle's tokens that the head copies into an answer (Wu et al. 2024)"];
const NAMES = SURVEYED.map(([name]) => name);
const ANSWER = 32; // most tokens of an answer
const BATCH = 16; // texts of one request
const BINS = 20;
const INVALID = 422;

export interface SurveyedHead {
  /** The index of its layer in the model's replies, and the name of that layer there. */
  layer: number;
  ref: number | string;
  head: number;
  name: string;
}

/** A sound or an image of a survey: the name that stands for it, what is shown of it, and the fields of its request. */
export interface MediaInput {
  file: string;
  shown: string;
  body: Body;
}

export interface Survey {
  model: string;
  /** The texts, or what is shown of the sounds or images. */
  texts: string[];
  media?: { kind: Medium; inputs: MediaInput[] };
  heads: SurveyedHead[];
  /** Texts × heads, by the name of each statistic. */
  values: Record<string, Float32Array>;
  /** With a needle: it, and the model's answer to each text. */
  needle?: string;
  answers?: string[];
}

/** The statistics that a survey has. */
export const statisticsIn = ({ needle }: Survey) => (needle ? [...SURVEYED, RETRIEVAL] : SURVEYED);

interface Reply {
  layers: { layer: number | string }[];
}

export type Medium = "sounds" | "images";

export const weightsPath = (model: string) => `v1/models/${encodeURIComponent(model)}/weights`;

/** The texts of a file: one a line. */
export const textsOf = (content: string) => content.split(/\r?\n/).map((line) => line.trim()).filter(Boolean);

/** The lines of a field that has one for each of so many files; a line may be empty. */
export function linesOf(content: string, many: number): string[] {
  const lines = content.split(/\r?\n/).map((line) => line.trim());
  while (lines.length > many && !lines.at(-1)) lines.pop();
  return lines.some(Boolean) ? lines : [];
}

/** Go through the texts, those of similar lengths together; `done` is told how many are. With a needle, a part of every text, the model first answers each. Sounds and images go one by one. Throws Problem. */
export async function survey(model: string, texts: string[], signal: AbortSignal, done: (many: number) => void, needle = "", media?: Survey["media"]): Promise<Survey> {
  const order = texts.map((_, i) => i);
  if (!media) order.sort((a, b) => texts[a].length - texts[b].length);
  const batch = media ? 1 : BATCH;
  const heads: SurveyedHead[] = [];
  const values: Record<string, Float32Array> = {};
  const answers: string[] = [];
  const names = needle ? [...NAMES, RETRIEVAL[0]] : NAMES;
  for (let start = 0; start < texts.length; start += batch) {
    const chosen = order.slice(start, start + batch);
    if (needle) (await answersOf(model, chosen.map((at) => texts[at]), signal)).forEach((answer, i) => (answers[chosen[i]] = answer));
    const more = needle ? { answer: chosen.map((at) => answers[at]), statistic_options: { needle: chosen.map(() => needle) } } : {};
    const read = media ? media.inputs[start].body : { text: chosen.map((at) => texts[at]) };
    const { reply, tensors } = await ask(model, chosen, texts, { ...read, statistics: names, ...more }, signal);
    const sizes = reply.layers.map((_, at) => tensors[`layers.${at}.statistics.entropy`].shape.at(-1) ?? 0);
    if (!heads.length) {
      reply.layers.forEach(({ layer: ref }, layer) => {
        for (let head = 0; head < sizes[layer]; head += 1) heads.push({ layer, ref, head, name: headName(ref, head) });
      });
    }
    for (const name of names) {
      const all = (values[name] ??= new Float32Array(texts.length * heads.length));
      let from = 0;
      reply.layers.forEach((_, at) => {
        const { data } = tensors[`layers.${at}.statistics.${name}`];
        const rows = media ? [meanRow(data, sizes[at])] : chosen.map((_text, i) => data.subarray(i * sizes[at], (i + 1) * sizes[at]));
        chosen.forEach((text, i) => all.set(rows[i], text * heads.length + from));
        from += sizes[at];
      });
    }
    done(start + chosen.length);
  }
  return { model, texts, heads, values, ...(media && { media }), ...(needle && { needle, answers }) };
}

/** The mean of rows of numbers: a layer that sees or hears has a row for each window of an image or a sound. */
function meanRow(data: Float32Array, wide: number): Float32Array {
  const found = new Float32Array(wide);
  data.forEach((value, i) => (found[i % wide] += (value * wide) / data.length));
  return found;
}

/** The likeliest continuation of each text. */
async function answersOf(model: string, prompt: string[], signal: AbortSignal) {
  const body = { model, prompt, max_tokens: ANSWER, min_tokens: 1, temperature: 0 };
  const { choices } = await call<{ choices: { index: number; text: string }[] }>("POST", "v1/completions", body, signal);
  return [...choices].sort((a, b) => a.index - b.index).map(({ text }) => text);
}

/** One request; a problem with one of its texts names the line of all texts, or the file. */
async function ask(model: string, chosen: number[], texts: string[], fields: Record<string, unknown>, signal: AbortSignal) {
  try {
    return await callTensors<Reply>(weightsPath(model), { return_weights: false, ...fields }, signal);
  } catch (fault) {
    if (fault instanceof Problem && !Array.isArray(fields.text) && fault.document.status === INVALID) throw new Problem({ ...fault.document, title: `${texts[chosen[0]]} cannot be read` });
    const at = fault instanceof Problem ? /^(?:text|statistic_options\.needle)\.(\d+)$/.exec(fault.document.param ?? "") : null;
    if (!at || !(fault instanceof Problem)) throw fault;
    throw new Problem({ ...fault.document, title: `Line ${chosen[Number(at[1])] + 1} cannot be read` });
  }
}

/** The values of a statistic of one head, one a text; NaN where there is none. */
export const valuesOf = ({ heads, texts, values }: Survey, at: number, name: string) => texts.map((_, text) => values[name][text * heads.length + at]);

/** The mean of a statistic of every head over the texts that have one. */
export const means = (of: Survey, name: string) => of.heads.map((_, at) => mean(valuesOf(of, at, name)));

function mean(values: number[]): number {
  const known = values.filter(Number.isFinite);
  return known.reduce((sum, value) => sum + value, 0) / known.length;
}

/** The texts for which a statistic of a head is largest, the largest first. */
export const strongest = (of: Survey, at: number, name: string, many: number) =>
  valuesOf(of, at, name).map((value, text) => ({ value, text })).filter(({ value }) => Number.isFinite(value)).sort((a, b) => b.value - a.value).slice(0, many);

export interface Distribution {
  mean: number;
  /** The least, the quartiles and the largest. */
  quantiles: [number, number, number, number, number];
  /** Texts in equal bins from the least to the largest. */
  counts: number[];
}

/** The distribution of a statistic of a head over the texts. */
export function distribution(of: Survey, at: number, name: string): Distribution {
  const values = valuesOf(of, at, name).filter(Number.isFinite).sort((a, b) => a - b);
  const quantile = (share: number) => {
    const place = share * (values.length - 1);
    const low = Math.floor(place);
    return values[low] + (place - low) * ((values[low + 1] ?? values[low]) - values[low]);
  };
  const [least, most] = [values[0], values[values.length - 1]];
  const counts = Array.from({ length: BINS }, () => 0);
  for (const value of values) counts[most > least ? Math.min(BINS - 1, Math.floor(((value - least) / (most - least)) * BINS)) : 0] += 1;
  return { mean: mean(values), quantiles: [least, quantile(0.25), quantile(0.5), quantile(0.75), most], counts };
}

/** The request for the weights of one head in one text, sound or image. */
export const passageRequest = ({ model, texts, media, answers }: Survey, { ref, head }: SurveyedHead, text: number): ApiRequest => ({
  method: "POST", path: weightsPath(model), body: { ...(media ? media.inputs[text].body : { text: texts[text] }), ...(answers && { answer: answers[text] }), layers: [ref], select: { heads: [head] }, statistics: [] },
});
