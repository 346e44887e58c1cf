/** Subjects: what the page looks at. A recording, a module with its input, or raw attention. */

import { Problem, bytesOf, call, callTensors, of } from "../server/api";
import type { ApiRequest } from "../server/api";
import type { Read } from "../numbers/cells";
import { bytes as sized } from "../numbers/format";
import { CLASSES, COUNTING, matrix, OF_TOKENS, statisticsOf, tokenIds } from "../numbers/matrix";
import type { Counting, Matrix } from "../numbers/matrix";
import { normal } from "../numbers/random";
import { MOST_CELLS } from "../page/limits";
import { integer } from "../page/state";
import type { Params } from "../page/state";
import { fromNested, ofBlob, openTensors } from "../server/tensors";
import type { Body, Tensor, TensorFile } from "../server/tensors";
import type { Facts, ModuleInfo, Predictions, Ran, RecordingInfo } from "../server/types";

/** The inputs of one attention, to be sent to the server: the module's name (or none, for raw attention), and fields. */
export interface Live {
  module: string;
  body: Body;
}

export interface Layer {
  name: string;
  /** It has no softmax: its weights are implicit, of either sign. */
  implicit?: boolean;
  /** Its channels have weights of their own, so many that it is shown by itself. */
  wide?: boolean;
  /** Its key in a request to a whole model. */
  ref?: string;
  heads: string[];
  queries: string[];
  keys: string[];
  /** The tokens of the queries, by which equal ones are known; else their labels. */
  ids?: number[];
  /** The pixels that each token shows, of a layer that sees an image: left, top, right and bottom. */
  places?: Place[];
  /** The seconds of the queries and of the keys that are frames of a sound. */
  seconds?: { queries?: Span[]; keys?: Span[] };
}

/** Begin and end of a frame in seconds; null for other tokens, and after the end of the sound. */
export type Span = [number, number] | null;

/** Left, top, right and bottom of a patch in pixels of its image; null for other tokens. */
export type Place = [number, number, number, number] | null;

/** The name of a head of a layer by the layer's key: `L1H3`, `vision.1 H3`; of a layer that has none, `H3`. */
export const headName = (ref: string | number, head: number | string) => (/^\d+$/.test(String(ref)) ? `L${ref}H${head}` : `${ref} H${head}`.trim());

/** A layer's key as requests have it: a number where it is one. */
export const refOf = (ref: string): number | string => (/^\d+$/.test(ref) ? Number(ref) : ref);

/** A head by its name: `L1H3`; of a module, a stack of several or a file's tensor after its name: `tiny-bert.1 H3`. */
export function headTitle({ layers }: Subject, layer: number, head: number): string {
  const { name, heads } = layers[layer];
  const own = heads[head];
  if (own.startsWith(name) || (/^L\d/.test(own) && name.startsWith("layers."))) return own;
  return `${name} ${own.replace(/^(L\d+)?H?(?=\d+$)/, "H")}`;
}

/** Why an attention cannot be computed again, after its name. */
export const notComputed = ({ whole, layers }: Subject, layer?: number) =>
  layer !== undefined && layers[layer].implicit ? "has no softmax, so that no q and k say how its weights come about." : `cannot be computed again: ${whole?.id ? "" : "the recording holds no q, k and v (record with --taps weights --taps q --taps k --taps v), or "}its weights are not softmax(q·k/√d) of one text.`;

/** What weights of either sign are. */
export const IMPLICIT = "A linear or state-space layer has no softmax. Its weights are implicit: the matrix M for which M·V is what the layer mixes. They may be negative, and do not sum to one.";

/** Statistics by name, a number for each head. */
export type Statistics = Partial<Record<string, number[]>>;

/** The queries of a request and how it ran, for subjects that the server computes. */
export interface RunFacts {
  queries: number;
  ran: Ran;
}

/** Taps of one head and one query, and the request that brought them. */
export interface Tapped {
  request: ApiRequest;
  tensors: Record<string, Tensor>;
}

/** The model and the text of a recording. */
export interface Whole {
  model: string;
  /** The model's name and what it read, where the server was asked for this. */
  id?: string;
  input?: Body;
  /** What it predicts, where that is known: the token after each or in its place, classes, or nothing. */
  predicts?: Predictions["predicts"];
  text: string;
  target?: string | null | undefined;
  /** The tokens that it predicts at: the decoder's, of a model with both. */
  tokens: number;
  /** The tokens of its text: the encoder's, of a model with both. */
  read?: number;
}

export interface Subject {
  title: string;
  counting: Counting;
  /** The whole model that a recording is of. */
  whole?: Whole;
  /** The path of a recording that the server has. */
  recording?: string;
  /** The name of the image that the model read. */
  picture?: string;
  /** The name of the sound that the model heard. */
  sound?: string;
  facts: [string, string][];
  layers: Layer[];
  /** The layers that also mix tokens, but have no weights of pairs of tokens. */
  unseen?: string[];
  /** The weights of a head. */
  weights(layer: number, head: number): Promise<Matrix>;
  /** How to read the weights of a head in strips that the server pools; null where they are read whole. */
  strips(layer: number, head: number): Read | null;
  /** What one query of a head goes through, by the taps of the whole model itself. */
  taps?(layer: number, head: number, query: number): Promise<Tapped>;
  /** The fields of a request for this layer, or null if the subject cannot be computed again. */
  live(layer: number): Promise<Live | null>;
  /** The request that brings these weights; null for a file. */
  requestFor(layer: number, head: number): Promise<ApiRequest | null>;
  /** The server's statistics of a layer; null where the page computes them. */
  statistics(layer: number): Promise<Statistics | null>;
  /** How the request ran; null for recordings. */
  runOf(layer: number): Promise<RunFacts | null>;
  sequences: number;
}

export const BUILT_IN = [
  { id: "cat", label: "MiniLM: “The cat sat on the mat because it was tired.”", file: "recordings/cat.safetensors" },
  { id: "toy", label: "A trained toy with induction heads: letters that repeat", file: "recordings/toy.safetensors" },
] as const;

export const DEFAULT_RECORDING = "builtin:cat";
/** The most cells of a head whose weights the page asks for: 256 MiB. */
export const MOST_HEAD_CELLS = 8192 ** 2;

/** Throw a Problem if the weights of one head are too many for a browser. */
function check(queries: number, keys: number): void {
  if (queries * keys <= MOST_HEAD_CELLS) return;
  const title = "These are too many weights for a page";
  throw new Problem({ title, detail: `One head has ${queries} × ${keys} weights; the page shows up to 8192 × 8192. The statistics under Overview cover all of them.` });
}

const WHOLE_CELLS = 2_000_000; // of a head that is read whole although the server could pool it
const isLarge = ({ queries, keys }: Layer) => queries.length * keys.length > WHOLE_CELLS;
const KEPT_CELLS = 60_000_000; // of all matrices that stay in memory

/** Files that were opened in this browser, by the name in the URL. */
export const files = new Map<string, File>();

/** What views of a subject get. */
export interface SubjectProps {
  subject: Subject;
  layer: number;
  head: number;
}

/** The parameters that a subject depends on; two states that agree in them share it. */
export const subjectKey = (params: Params, prefix = "") =>
  SUBJECT_PARAMS.map((name) => params[prefix + name] ?? "").join("\u0000");

export const SUBJECT_PARAMS = [
  "source", "text", "messages", "pair", "target", "image", "sound", "opened", "tokens", "seed", "states", "input", "labels", "keys", "further", "sequence", "q", "k", "v", "score", "normalizer", "heads", "causal",
  "window", "sinks", "classes",
];

export const RAW = {
  q: "[[1, 0],\n [0, 1]]",
  k: "[[1, 0],\n [0, 1],\n [1, 1]]",
  v: "[[1, 2],\n [3, 4],\n [5, 6]]",
};

/** What statistics count. Classes are written as in `articles: the a; stops: . ,`. */
export function countingOf(params: Params): Counting {
  const written = (params.classes ?? "").split(";").map((each) => each.split(/:(.*)/s).map((part) => part.trim()));
  const classes = written.filter(([name, members]) => /^[^.]{1,64}$/.test(name) && members).slice(0, 64);
  return {
    window: integer(params.window, COUNTING.window, 0),
    sinks: integer(params.sinks, COUNTING.sinks, 0),
    classes: Object.fromEntries(classes.map(([name, members]) => [name, members.split(/\s+/)])),
  };
}

/** The names of the statistics in a request. */
export const namesOf = (counting: Counting) => [...new Set(statisticsOf(counting).map(([name]) => name.split(".")[0]))];

/** Open a recording, a module with its input, or raw attention, as the parameters name it. Throws Problem. */
export async function openSubject(params: Params): Promise<Subject> {
  const [kind, id] = (params.source ?? "").split(/:(.*)/s);
  const counting = countingOf(params);
  if (kind === "builtin") return openBuiltIn(id, counting);
  if (kind === "stored") return openStored(id, counting);
  if (kind === "file") return openLocal(id, counting);
  if (kind === "module") return openModule(id, params);
  if (kind === "raw") return openRaw(params);
  throw new Problem({ title: "Unknown source", detail: `Expected model, builtin, stored, file, module or raw; got ${kind}.` });
}

// ── recordings ──────────────────────────────────────────────────────────────────────────────────────────────────────

async function openBuiltIn(id: string, counting: Counting): Promise<Subject> {
  const found = BUILT_IN.find((each) => each.id === id);
  if (!found) throw new Problem({ title: "No such recording", detail: `This page ships no recording ${id}.` });
  return ofFile(await openTensors(await bytesOf(`web/${found.file}`)), "built in", counting);
}

async function openLocal(name: string, counting: Counting): Promise<Subject> {
  const file = files.get(name);
  if (!file) throw new Problem({ title: "The file is not open", detail: `Choose ${name} again under Text: a page cannot reopen a file by itself.` });
  try {
    return await ofFile(await openTensors(ofBlob(file)), `file ${name}`, counting);
  } catch (fault) {
    if (fault instanceof Problem) throw fault;
    throw new Problem({ title: "This file cannot be opened", detail: fault instanceof Error ? fault.message : String(fault) });
  }
}

async function ofFile(file: TensorFile, from: string, counting: Counting): Promise<Subject> {
  const text = file.entries.recording;
  if (text === undefined) return ofTensors(file, from, counting);
  const facts = JSON.parse(text) as Facts;
  const read = (name: string, first?: number, last?: number) => file.read(name, first, last);
  return Promise.resolve(ofRecording(facts, new Set(Object.keys(file.shapes)), read, null, from, counting));
}

/** A file of tensors `[head, query, key]` or `[query, key]`: each is a layer. */
function ofTensors(file: TensorFile, from: string, counting: Counting): Subject {
  const names = Object.entries(file.shapes).filter(([, shape]) => shape.length === 2 || shape.length === 3);
  if (!names.length) throw new Problem({ title: "Nothing to show", detail: "The file holds neither a recording nor a tensor [head, query, key]." });
  const numbered = (many: number) => Array.from({ length: many }, (_, i) => String(i));
  const named = (many: number) => Array.from({ length: many }, (_, i) => headName("", i));
  const layers = names.map(([name, shape]) => {
    const [heads, rows, columns] = shape.length === 3 ? shape : [1, ...shape];
    return { name, heads: named(heads), queries: numbered(rows), keys: numbered(columns) };
  });
  return {
    title: from,
    counting,
    facts: [["tensors", String(layers.length)]],
    layers,
    sequences: 1,
    weights: cached(async (layer, head) => {
      const { name, queries, keys } = layers[layer];
      const flat = file.shapes[name].length === 2;
      const { data } = await (flat ? file.read(name) : file.read(name, head, head + 1));
      return matrix(queries.length, keys.length, data);
    }),
    strips: () => null,
    statistics: () => Promise.resolve(null),
    live: () => Promise.resolve(null),
    requestFor: () => Promise.resolve(null),
    runOf: () => Promise.resolve(null),
  };
}

async function openStored(id: string, counting: Counting): Promise<Subject> {
  const path = `v1/recordings/${encodeURIComponent(id)}`;
  const described = await call<RecordingInfo>("GET", path);
  const part = async (parts: Record<string, string>) => {
    const { value } = (await callTensors(`${path}?${new URLSearchParams(parts)}`)).tensors;
    return value;
  };
  const read = (name: string, first?: number, last?: number) => {
    const cut = name.lastIndexOf(".");
    const heads = first === undefined || last === undefined ? {} : { heads: `${first}:${last}` };
    return part({ layer: name.slice(0, cut), tensor: name.slice(cut + 1), ...heads });
  };
  const server: Server = {
    requestFor: (layer, head) => ({ method: "GET", path: `${path}?${new URLSearchParams({ layer, heads: `${head}:${head + 1}` })}` }),
    strips: (layer, head) => async (pool, first, last) => {
      const pooled = pool > 1 ? { pool: String(pool) } : {};
      const { shape, data } = await part({ layer, heads: `${head}:${head + 1}`, queries: `${first}:${last}`, ...pooled });
      return matrix(shape[1], shape[2], data);
    },
    // A pass over all weights of the layer.
    statistics: remembered(async (layer) => {
      const body = { ...counting, statistics: namesOf(counting), layers: [layer] };
      const { attentions } = await call<RecordingStatistics>("POST", `${path}/statistics`, body);
      const { classes = {}, ...others } = attentions[0].statistics;
      return { ...others, ...Object.fromEntries(Object.entries(classes).map(([name, each]) => [CLASSES + name, each])) };
    }),
  };
  const subject = ofRecording(described, new Set(described.tensors.map(({ name }) => name)), read, server, `stored, ${sized(described.bytes)}`, counting);
  return { ...subject, recording: path };
}

/** What only the server's own recordings have. */
interface Server {
  requestFor(layer: string, head: number): ApiRequest;
  strips(layer: string, head: number): Read;
  statistics(layer: string): Promise<Statistics>;
}

interface RecordingStatistics {
  attentions: { statistics: Omit<Statistics, "classes"> & { classes?: Record<string, number[]> } }[];
}

type ReadTensor = (name: string, first?: number, last?: number) => Promise<Tensor>;

function ofRecording(facts: Facts, names: Set<string>, read: ReadTensor, server: Server | null, from: string, counting: Counting): Subject {
  const layers = facts.attentions
    .filter(({ name }) => names.has(`${name}.weights`))
    .map(({ name, heads }) => {
      const [stack] = name.split(".");
      return { name, heads, queries: facts.tokens[stack], keys: facts.tokens[name.endsWith(".cross") ? "encoder" : stack] };
    });
  if (!layers.length) throw new Problem({ title: "Nothing to show", detail: "The recording holds no weights." });
  const weights = cached(async (layer, head) => {
    const { name, queries, keys } = layers[layer];
    return matrix(queries.length, keys.length, (await read(`${name}.weights`, head, head + 1)).data);
  });
  const origin: [string, string][] = [["model", facts.model], ["text", facts.text]];
  if (facts.target) origin.push(["target", facts.target]);
  return {
    title: `${facts.model}: ${facts.text}`,
    counting,
    whole: { model: facts.model, text: facts.text, target: facts.target, tokens: facts.tokens["decoder" in facts.tokens ? "decoder" : "layers"].length },
    facts: [...origin, ["recording", from], ...Object.entries(facts.versions)],
    layers,
    unseen: Object.entries(facts.unseen ?? {}).map(([name, why]) => `${name} (${why})`),
    sequences: 1,
    weights,
    strips: (layer, head) => (server && isLarge(layers[layer]) ? server.strips(layers[layer].name, head) : null),
    statistics: (layer) => (server && isLarge(layers[layer]) ? server.statistics(layers[layer].name) : Promise.resolve(null)),
    live: async (layer) => {
      const { name } = layers[layer];
      if (!["q", "k", "v"].every((tap) => names.has(`${name}.${tap}`))) return null;
      const [query, key, value] = await Promise.all(["q", "k", "v"].map((tap) => read(`${name}.${tap}`)));
      const recorded = await weights(layer, 0);
      const causal = isCausal(recorded);
      if (!isScaledDot(recorded, query, key, causal)) return null;
      const spec = causal ? { masks: [{ name: "causal" }] } : {};
      return { module: "", body: { query, key, value, spec } };
    },
    requestFor: (layer, head) => Promise.resolve(server && server.requestFor(layers[layer].name, head)),
    runOf: () => Promise.resolve(null),
  };
}

/** True if the last row of weights is softmax(q · k / √width), to the precision of a recording. */
export function isScaledDot({ rows, columns, data }: Matrix, query: Tensor, key: Tensor, causal: boolean): boolean {
  const width = query.shape.at(-1) ?? 1;
  const last = query.data.subarray((rows - 1) * width, rows * width);
  const scores = Array.from({ length: columns }, (_, j) => {
    if (causal && j > rows - 1) return -Infinity;
    return last.reduce((sum, each, i) => sum + each * key.data[j * width + i], 0) / Math.sqrt(width);
  });
  const most = Math.max(...scores);
  const total = scores.reduce((sum, each) => sum + Math.exp(each - most), 0);
  return scores.every((each, j) => Math.abs(Math.exp(each - most) / total - data[(rows - 1) * columns + j]) < 0.01);
}

/** A square matrix of two rows or more whose upper triangle is exactly 0. */
export function isCausal({ rows, columns, data }: Matrix): boolean {
  if (rows !== columns || rows < 2) return false;
  for (let i = 0; i < rows; i += 1) for (let j = i + 1; j < columns; j += 1) if (data[i * columns + j] !== 0) return false;
  return true;
}

// ── modules and raw attention ───────────────────────────────────────────────────────────────────────────────────────

const words = (text: string | undefined) => (text ?? "").split(/[\s,]+/).filter(Boolean);

export function parsed(text: string, param: string, title = param): unknown {
  try {
    return JSON.parse(text);
  } catch (fault) {
    throw new Problem({ title: "This is not JSON", detail: `${title}: ${fault instanceof Error ? fault.message : ""}`, param });
  }
}

function tensor(text: string, param: string): Tensor {
  try {
    return fromNested(parsed(text, param));
  } catch (fault) {
    if (fault instanceof Problem) throw fault;
    throw new Problem({ title: "These are no nested lists", detail: `${param}: ${fault instanceof Error ? fault.message : ""}`, param });
  }
}

function further(params: Params): Body {
  if (!params.further?.trim()) return {};
  const fields = parsed(params.further, "further", "further request fields");
  if (typeof fields === "object" && fields !== null && !Array.isArray(fields)) return fields as Body;
  throw new Problem({ title: "This is no JSON object", detail: 'Further request fields: expected an object such as {"key_lengths": [6]}.', param: "further" });
}

/** The width of the hidden states of the built-in sentence, and the number of its layers. */
export const SENTENCE = { width: 384, layers: 6 };

/** The hidden states of the built-in sentence in front of a layer: what its attention reads in MiniLM. */
async function statesBefore(layer: number): Promise<{ query: Tensor; tokens: string[] }> {
  const file = await openTensors(await bytesOf(`web/${BUILT_IN[0].file}`));
  const facts = JSON.parse(file.entries.recording ?? "{}") as Facts;
  return { query: await file.read(layer ? `layers.${layer - 1}.hidden` : "layers.embeddings"), tokens: facts.tokens.layers };
}

async function openModule(name: string, params: Params): Promise<Subject> {
  const module = await call<ModuleInfo>("GET", `v1/modules/${encodeURIComponent(name)}`);
  const width = module.config.d_model;
  const facts: [string, string][] = [["module", name], ["version", module.version.slice(0, 10)]];
  const send = (query: Tensor, input: string, labelled: Params) =>
    served(name, { query, ...further(params) }, labelled, name, [...facts, ["input", input]], module.config.num_heads);
  if (params.states !== undefined && width === SENTENCE.width) {
    const layer = integer(params.states, 0, 0, SENTENCE.layers - 1);
    const { query, tokens } = await statesBefore(layer);
    return send(query, `MiniLM's states of its sentence before layer ${layer}`, { ...params, labels: params.labels ?? tokens.join(" ") });
  }
  if (params.input) return send(tensor(params.input, "query"), "your own", params);
  const tokens = integer(params.tokens, words(params.labels).length || 8, 1, 32_768);
  const query = { shape: [tokens, width], data: normal(tokens, width, integer(params.seed, 0)) };
  return send(query, `${tokens} random vectors, seed ${params.seed ?? "0"}`, params);
}

async function openRaw(params: Params): Promise<Subject> {
  const spec: Body = { score: { name: params.score ?? "scaled_dot" } };
  if (params.normalizer && params.normalizer !== "softmax") spec.normalizer = { name: params.normalizer };
  if (params.causal) spec.masks = [{ name: "causal" }];
  const more = further(params);
  const body: Body = {
    query: tensor(params.q ?? RAW.q, "query"),
    key: tensor(params.k ?? RAW.k, "key"),
    value: tensor(params.v ?? RAW.v, "value"),
    ...(params.heads ? { num_heads: integer(params.heads, 1, 1) } : {}),
    ...more,
    spec: { ...spec, ...(more.spec as Body | undefined) },
  };
  return served("", body, params, "raw attention", [["input", "raw q, k and v"]], integer(params.heads, 1, 1));
}

interface WeightsReply {
  ran: Ran;
}

async function served(module: string, body: Body, params: Params, name: string, facts: [string, string][], heads: number): Promise<Subject> {
  const rows = (body.query as Tensor).shape.at(-2) ?? 1;
  const columns = ((body.key as Tensor | undefined) ?? (body.query as Tensor)).shape.at(-2) ?? 1;
  const all = heads * rows * columns <= MOST_CELLS;
  const [labels, keyLabels] = [words(params.labels), words(params.keys)];
  const known = labels.length === columns && !body.key && !body.past_key;
  const counting = countingOf(params);
  const named = keyLabels.length ? keyLabels : labels;
  if (named.length !== columns) counting.classes = {};
  const classes = Object.fromEntries(Object.entries(counting.classes).map(([each, members]) => [each, named.map((key) => members.includes(key))]));
  const names = statisticsOf(counting).map(([each]) => each).filter((each) => known || !OF_TOKENS.includes(each));
  const { window, sinks } = counting;
  const asks: Body = {
    statistics: namesOf(counting).filter((each) => known || !OF_TOKENS.includes(each)),
    statistic_options: { window, sinks, classes, ...(known ? { tokens: tokenIds(labels) } : {}) },
  };
  const request: Body = { ...body, ...asks, ...(all ? {} : { return_weights: false }) };
  const path = of(module, "weights");
  const { reply, tensors } = await callTensors<WeightsReply>(path, request);
  const depth = tensors["statistics.entropy"].shape.length; // [B, H] or [H] or []
  const sequences = depth === 2 ? tensors["statistics.entropy"].shape[0] : 1;
  const many = depth === 0 ? 1 : tensors["statistics.entropy"].shape[depth - 1];
  const sequence = integer(params.sequence, 0, 0, sequences - 1);
  const size = all ? tensors.weights.shape.slice(-2) : [rows, columns];
  const label = (list: string[], length: number) => Array.from({ length }, (_, i) => list[i] ?? String(i));
  const layer = {
    name,
    heads: Array.from({ length: many }, (_, head) => headName("", head)),
    queries: label(labels, size[0]),
    keys: label(keyLabels.length ? keyLabels : labels, size[1]),
  };
  const cells = size[0] * size[1];
  const cut = ({ data }: Tensor, at: number) => matrix(size[0], size[1], data.subarray(at * cells, (at + 1) * cells));
  const weights = cached(async (_, head) => {
    if (all) return cut(tensors.weights, sequence * many + head);
    check(rows, columns);
    const one = await callTensors(path, { ...body, select: { heads: [head] } });
    return cut(one.tensors.weights, sequence);
  });
  const part = (of: Tensor) => Array.from(of.data.subarray(sequence * many, (sequence + 1) * many));
  const queries = tensors.queries as Tensor | undefined;
  return {
    title: name,
    counting,
    facts,
    layers: [layer],
    sequences,
    weights,
    strips: (_, head) => {
      if (!isLarge(layer)) return null;
      return async (pool, first, last) => {
        const queries = last - first < rows ? { queries: Array.from({ length: last - first }, (_each, i) => first + i) } : {};
        const fields = { ...body, statistics: [], select: { heads: [head], ...queries }, ...(pool > 1 ? { pool, return_weights: false } : {}) };
        const { tensors: found } = await callTensors(path, fields);
        const { shape, data } = pool > 1 ? found.pooled : found.weights;
        const [high, wide] = shape.slice(-2);
        return matrix(high, wide, data.subarray(sequence * high * wide, (sequence + 1) * high * wide));
      };
    },
    live: () => Promise.resolve({ module, body }),
    requestFor: (_, head) => Promise.resolve({ method: "POST", path, body: many > 1 ? { ...body, select: { heads: [head] } } : body }),
    statistics: () => Promise.resolve(Object.fromEntries(names.map((each) => [each, part(tensors[`statistics.${each}`])]))),
    runOf: () =>
      Promise.resolve({
        queries: queries ? queries.data[Math.min(sequence, queries.data.length - 1)] : size[0],
        ran: reply.ran,
      }),
  };
}

/** Remember what was asked for by its key. What failed is asked for again. */
export function remembered<K, T>(make: (key: K) => Promise<T>): (key: K) => Promise<T> {
  const kept = new Map<K, Promise<T>>();
  return (key) => {
    const old = kept.get(key);
    if (old) return old;
    const made = make(key);
    kept.set(key, made);
    made.catch(() => kept.delete(key));
    return made;
  };
}

/** Remember matrices by layer and head, up to a number of cells, the latest used. */
export function cached(make: (layer: number, head: number) => Promise<Matrix>): (layer: number, head: number) => Promise<Matrix> {
  const kept = new Map<string, { made: Promise<Matrix>; cells: number }>();
  return (layer, head) => {
    const key = `${layer}/${head}`;
    const old = kept.get(key);
    if (old) {
      kept.delete(key);
      kept.set(key, old);
      return old.made;
    }
    const entry = { made: make(layer, head), cells: 0 };
    kept.set(key, entry);
    entry.made.then(
      ({ data }) => {
        entry.cells = data.length;
        let sum = [...kept.values()].reduce((total, each) => total + each.cells, 0);
        for (const [oldest, each] of kept) {
          if (sum <= KEPT_CELLS || oldest === key) break;
          kept.delete(oldest);
          sum -= each.cells;
        }
      },
      () => kept.delete(key),
    );
    return entry.made;
  };
}
