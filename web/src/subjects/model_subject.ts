/** Whole models as subjects: a text, an image or a sound in, the weights of every layer out. */

import { Problem, call, callTensors } from "../server/api";
import type { ApiRequest } from "../server/api";
import { duration, isolated, waits } from "../numbers/format";
import { ofSequence } from "./live";
import { pictures, sounds } from "./media";
import { matrix } from "../numbers/matrix";
import type { Counting, Matrix } from "../numbers/matrix";
import { integer } from "../page/state";
import type { Params } from "../page/state";
import { IMPLICIT, MOST_CELLS, cached, countingOf, headName, isCausal, isScaledDot, namesOf, remembered } from "./subject";
import type { Layer, Statistics, Subject } from "./subject";
import type { Body, Tensor } from "../server/tensors";
import type { ModelInfo, ModelLabels, ModelRan } from "../server/types";

export const FIRST_TEXT = "Kate met Tamiro in the park. Then Tam";
/** A token as the page shows it: a space before it is a dot, an end of a line an arrow. */
export const shownToken = (token: string) => isolated(token.replace(/^ /, "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅");

/** A token without the marks of spaces. */
const bare = (token: string) => token.trim() || token;

/** The input of a request, by the parameters of the page. Throws Problem. */
export function inputOf(params: Params, model: Pick<ModelInfo, "id" | "takes">): Body {
  const takes = (what: string) => model.takes.includes(what);
  const waits = (title: string, detail: string, param: string) => new Problem({ title, detail, param, waits: true });
  const picture = params.image ? pictures.get(params.image) : undefined;
  if (params.image && !picture) throw waits("The image is not open", `Choose ${params.image} again: a page cannot reopen a file by itself.`, "images");
  const sound = takes("audio") && params.sound ? sounds.get(params.sound) : undefined;
  if (takes("audio") && params.sound && !sound) throw waits("The sound is not open", `Choose ${params.sound} again: a page cannot reopen a file by itself.`, "audio");
  const reads = takes("text");
  if (!reads && takes("audio") && !sound) throw waits("Choose a sound", `${model.id} hears. Choose a WAV, FLAC, OGG or MP3 file above, or drop it on the page.`, "audio");
  if (!reads && !takes("audio") && !picture) throw waits("Choose an image", `${model.id} takes images alone. Choose one above, or drop it on the page.`, "images");
  const images = picture && takes("images") ? { images: [{ base64: picture.base64 }] } : {};
  const audio = sound ? { audio: [{ base64: sound.base64 }] } : {};
  const target = params.target && takes("target") ? { target: params.target } : {};
  const pair = params.pair && takes("text_pair") ? { text_pair: params.pair } : {};
  return { ...(reads ? { text: params.text ?? FIRST_TEXT } : {}), ...pair, ...target, ...images, ...audio };
}

const MOST_POOLED = 2 ** 24; // cells of all heads that are asked for in one pass

export interface WeightsReply {
  labels: ModelLabels | ModelLabels[];
  image_labels?: ModelLabels[];
  audio_labels?: ModelLabels[];
  encoder_labels?: ModelLabels | ModelLabels[];
  /** The keys of layers whose keys are not the tokens of one text. */
  key_labels?: Record<string, ModelLabels | ModelLabels[]>;
  layers: { layer: number | string; implicit?: boolean }[];
  ran: ModelRan;
}

const first = <T>(of: T | T[]): T => (Array.isArray(of) ? of[0] : of);

/** The tokens of each crop or window of a layer that sees images, or of each sound of one that hears, if it has a batch of them. */
function mediaLabels(reply: WeightsReply, ref: string): ModelLabels[] | undefined {
  const keys = reply.key_labels?.[ref];
  if (Array.isArray(keys) && keys[0].rectangles) return keys;
  return { vision: reply.image_labels, audio: reply.audio_labels }[ref.split(".")[0] as "vision" | "audio"];
}

/** The index of the batch of a layer: the last one, if it has fewer windows than another. */
const cropOf = (media: ModelLabels[] | undefined, crop: number) => (media ? Math.min(crop, media.length - 1) : 0);

/** The tokens that are the queries and the keys of a layer; `crop` is the index of the batch of a layer that sees images. */
export function layerTokens(reply: WeightsReply, ref: string, crop: number): [ModelLabels, ModelLabels] {
  const [stack] = ref.split(".");
  const media = mediaLabels(reply, ref);
  if (media) return [media[cropOf(media, crop)], media[cropOf(media, crop)]];
  const own = first(reply.labels);
  const keys = reply.key_labels?.[ref];
  if (keys) return [own, first(keys)];
  if (!reply.encoder_labels) return [own, own];
  const read = first(reply.encoder_labels);
  return [stack === "encoder" ? read : own, stack === "decoder" ? own : read];
}

/** A layer without a softmax. */
const isImplicit = ({ kind = "attention" }: ModelInfo["layers"][number]) => kind !== "attention";

/** The layers that mix tokens otherwise than the page shows: kinds of layers, layers with other keys, and those whose weights are too many. */
function unseenOf({ layers, unseen = [] }: ModelInfo, inspected: { layer: number | string }[]): string[] {
  const others = layers.filter(({ layer, keys }) => keys && keys !== "tokens" && inspected.some((each) => each.layer === layer));
  const implicit = layers.filter((each) => isImplicit(each) && !inspected.some(({ layer }) => layer === each.layer)).map(({ layer, kind }) => `layer ${layer} (${kind?.replace("_", " ")})`);
  return [...unseen, ...others.map(({ layer, keys }) => `layer ${layer} (keys of ${keys})`), ...implicit];
}

/** Open a whole model with the text and the image of the parameters. Throws Problem. */
export async function openModel(id: string, params: Params, signal: AbortSignal): Promise<Subject> {
  const path = `v1/models/${encodeURIComponent(id)}`;
  const model = await call<ModelInfo>("GET", path, undefined, signal);
  if (model.refused) throw new Problem({ title: "This model cannot be asked", detail: model.refused, param: "model" });
  const input = inputOf(params, model);
  const ask = (body: Body, until?: AbortSignal) => callTensors<WeightsReply>(`${path}/weights`, { ...input, statistics: [], ...body }, until);
  const text = typeof input.text === "string" ? input.text : ((input.audio ? params.sound : params.image) ?? "");
  // The tokens are known once the model has read the text; a text has more characters than tokens, but for the ends.
  const most = (text.length + 8) ** 2 * model.layers.reduce((sum, { heads }) => sum + heads, 0);
  const sure = !input.images && !input.audio && !input.target && !input.text_pair && most > 0 && most <= MOST_CELLS;
  // Until the model is resident, nobody knows whether it has layers without a softmax.
  const shares = model.layers.length === 0 || model.layers.some(isImplicit) ? { normalize: "absolute" } : {};
  let answer = await ask(sure ? {} : { return_weights: false, statistics: ["entropy"], ...shares }, signal);
  const { reply } = answer;
  const inspected = { layers: reply.layers.map(({ layer }) => layer) };
  const headsOf = (at: number) => answer.tensors[sure ? `layers.${at}.weights` : `layers.${at}.statistics.entropy`].shape.at(sure ? -3 : -1) ?? 1;
  const crops = Math.max(1, ...reply.layers.map(({ layer }) => mediaLabels(reply, String(layer))?.length ?? 1));
  const crop = integer(params.sequence, 0, 0, crops - 1);
  const layers = reply.layers.map(({ layer, implicit }, at): Layer => {
    const ref = String(layer);
    const [queries, keys] = layerTokens(reply, ref, crop);
    const name = /^\d+$/.test(ref) ? `layers.${ref}` : ref;
    const heads = Array.from({ length: headsOf(at) }, (_, head) => headName(ref, head));
    const places = keys.rectangles ? { places: keys.rectangles } : {};
    const seconds = queries.seconds || keys.seconds ? { seconds: { ...(queries.seconds && { queries: queries.seconds }), ...(keys.seconds && { keys: keys.seconds }) } } : {};
    return { ref, name, ...(implicit && { implicit }), heads, queries: queries.tokens.map(shownToken), keys: keys.tokens.map(shownToken), ids: queries.ids, ...places, ...seconds };
  });
  const all = layers.reduce((sum, { heads, queries, keys }) => sum + heads.length * queries.length * keys.length, 0);
  const whole = all <= MOST_CELLS;
  if (whole && !sure) answer = await ask(inspected, signal);
  const batched = (ref: string) => mediaLabels(reply, ref) !== undefined;
  const cropAt = (ref = "") => cropOf(mediaLabels(reply, ref), crop);
  /** The weights of a head. `chosen`: the keys that queries may look at, of a layer that chooses keys. */
  const cut = ({ shape, data }: Tensor, ref: string, head: number, chosen?: Tensor): Matrix => {
    const [rows, columns] = shape.slice(-2);
    const many = shape.at(-3) ?? 1;
    const from = (cropAt(ref) * many + head) * rows * columns;
    const signed = layers.find((each) => each.ref === ref)?.implicit;
    return { ...matrix(rows, columns, data.subarray(from, from + rows * columns)), ...(signed && { signed }), ...(chosen && { chosen: Uint8Array.from(chosen.data.subarray(0, rows * columns)) }) };
  };
  /** The largest weights of squares of all heads: one pass for all of them. */
  const pooled = remembered(async (pool: number) => (await ask({ ...inspected, pool, return_weights: false })).tensors);
  const labels = first(reply.labels);
  const read = first(reply.encoder_labels ?? reply.labels); // of the sentence
  const counting = countingOf(params);
  /** The statistics of all layers, of a text whose weights are too many to count here. */
  const served = remembered(async ({ window, sinks, classes }: Counting) => {
    const ids = (members: string[]) => [...new Set(labels.ids.filter((_id, i) => members.includes(bare(labels.tokens[i]))))];
    const token_classes = Object.fromEntries(Object.entries(classes).map(([name, members]) => [name, ids(members)]));
    const { tensors } = await ask({ ...inspected, return_weights: false, statistics: namesOf(counting), statistic_options: { window, sinks, token_classes }, ...(layers.some(({ implicit }) => implicit) && { normalize: "absolute" }) });
    return layers.map(({ ref = "", heads }, at): Statistics => {
      const own = Object.entries(tensors).filter(([name]) => name.startsWith(`layers.${at}.statistics.`));
      const from = cropAt(ref) * heads.length;
      return Object.fromEntries(own.map(([name, { data }]) => [name.split(".").slice(3).join("."), Array.from(data.subarray(from, from + heads.length))]));
    });
  });
  const waited = waits(reply.ran);
  const body = (layer: number, head: number): Body => ({ ...input, layers: [reply.layers[layer].layer], select: { heads: [head] } });
  return {
    title: `${id}: ${text}`,
    counting,
    unseen: unseenOf(model, reply.layers),
    whole: { model: id, id, text, tokens: labels.tokens.length, read: read.tokens.length, input, predictsByToken: model.predicts === "next" || model.predicts === "own" },
    facts: [["model", `${id}, ${reply.ran.architecture}`], ["tokens", read === labels ? String(read.tokens.length) : `${read.tokens.length}, and ${labels.tokens.length} of the decoder`], ["computed in", `${duration(reply.ran.compute_ms)}, ${reply.ran.weights ?? reply.ran.dtype} on ${reply.ran.device}`], ...(waited ? [["waited", waited] as [string, string]] : [])],
    layers,
    sequences: crops,
    ...(params.image && input.images ? { picture: params.image } : {}),
    ...(params.sound && input.audio ? { sound: params.sound } : {}),
    weights: cached(async (layer, head) => {
      const { ref = "" } = layers[layer];
      if (whole) return cut(answer.tensors[`layers.${layer}.weights`], ref, head, answer.tensors[`layers.${layer}.chosen`]);
      const { tensors } = await callTensors<WeightsReply>(`${path}/weights`, { ...body(layer, head), statistics: [] });
      return cut(tensors["layers.0.weights"], ref, 0, tensors["layers.0.chosen"]);
    }),
    strips: (layer, head) => {
      if (whole) return null;
      const { ref = "", queries } = layers[layer];
      return async (pool, from, to) => {
        if (pool > 1 && from === 0 && to >= queries.length && all / pool ** 2 <= MOST_POOLED) {
          return cut((await pooled(pool))[`layers.${layer}.pooled`], ref, head);
        }
        const rows = Array.from({ length: to - from }, (_, i) => from + i);
        const fields = { ...body(layer, head), statistics: [], select: { heads: [head], queries: rows }, ...(pool > 1 ? { pool, return_weights: false } : {}) };
        const { tensors } = await callTensors(`${path}/weights`, fields);
        return cut(tensors[pool > 1 ? "layers.0.pooled" : "layers.0.weights"], ref, 0, tensors["layers.0.chosen"]);
      };
    },
    live: async (layer) => {
      const { ref = "", queries, keys } = layers[layer];
      if (batched(ref) || queries.length !== keys.length || layers[layer].implicit) return null;
      const { tensors } = await callTensors(`${path}/forward`, { ...input, layers: [reply.layers[layer].layer], return: ["q", "k", "v", "weights"], top_k: 0 });
      const [query, key, value] = ["q", "k", "v"].map((tap) => tensors[`layers.0.${tap}`]);
      const weights = cut(tensors["layers.0.weights"], ref, 0);
      const causal = isCausal(weights);
      if (!isScaledDot(weights, query, key, causal)) return null;
      return { module: "", body: { query, key, value, spec: causal ? { masks: [{ name: "causal" }] } : {} } };
    },
    taps: async (layer, head, query) => {
      if (layers[layer].implicit) throw new Problem({ title: "There are no steps", detail: IMPLICIT, waits: true });
      const taps = { return: ["q", "k", "v", "scores", "masked_scores", "weights", "context"], top_k: 0, layers: [reply.layers[layer].layer] };
      const request: ApiRequest = { method: "POST", path: `${path}/forward`, body: { ...input, ...taps, select: { heads: [head], queries: [query] } } };
      const { tensors } = await callTensors(request.path, request.body);
      const own = Object.entries(tensors).filter(([name]) => name.startsWith("layers.0."));
      return { request, tensors: Object.fromEntries(own.map(([name, each]) => [name.slice(9), ofSequence(each, 3, cropAt(layers[layer].ref))])) };
    },
    // The page counts keys as tokens; of others the server knows the positions.
    statistics: async (layer) => (whole && !reply.key_labels?.[layers[layer].ref ?? ""] ? null : (await served(counting))[layer]),
    requestFor: (layer, head) => Promise.resolve<ApiRequest>({ method: "POST", path: `${path}/weights`, body: body(layer, head) }),
    runOf: () => Promise.resolve(null),
  };
}
