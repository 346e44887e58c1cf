/** Whole models as subjects: a text, an image or a sound in, the weights of every layer out. */

import { Problem, call, callTensors } from "../server/api";
import type { ApiRequest } from "../server/api";
import { duration, isolated, waits } from "../numbers/format";
import { chatOf, shownChat } from "./chat";
import { ofSequence } from "./live";
import { pictures, sounds } from "./media";
import { matrix } from "../numbers/matrix";
import type { Counting, Matrix } from "../numbers/matrix";
import { integer } from "../page/state";
import type { Params } from "../page/state";
import { IMPLICIT, cached, countingOf, headName, isCausal, isScaledDot, namesOf, remembered } from "./subject";
import { MOST_CELLS } from "../page/limits";
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
  const messages = reads ? chatOf(params) : null;
  if (reads && params.messages && !messages) throw waits("This is no chat", "The address has messages that are no list of turns, each with a role and a content. Write them again under Text.", "messages");
  if (messages && !takes("messages")) throw waits("This model reads no chat", `${model.id} has no chat template. Choose another model, or a text in place of the chat.`, "messages");
  if (messages) return { messages, ...target, ...images, ...audio };
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

/** A layer whose channels have weights of their own: so many that only one layer's are asked for. */
const isByChannel = (layer: ModelInfo["layers"][number]) => isImplicit(layer) && layer.head_dim === 1;

/** What a view needs at once: the weights of all layers, or the tokens alone. */
export type Needs = "weights" | "tokens";

/**
 * Open a whole model with the text and the image of the parameters. Throws Problem.
 *
 * The weights of a layer that was not asked for at once are asked for when they are first needed.
 */
export async function openModel(id: string, params: Params, signal: AbortSignal, needs: Needs): Promise<Subject> {
  const path = `v1/models/${encodeURIComponent(id)}`;
  const described = () => call<ModelInfo>("GET", path, undefined, signal);
  let model = await described();
  if (model.refused) throw new Problem({ title: "This model cannot be asked", detail: model.refused, param: "model" });
  const input = inputOf(params, model);
  const ask = (body: Body, until?: AbortSignal) => callTensors<WeightsReply>(`${path}/weights`, { ...input, statistics: [], ...body }, until);
  const chat = input.messages ? chatOf(params) : null;
  const text = typeof input.text === "string" ? input.text : chat ? shownChat(chat) : ((input.audio ? params.sound : params.image) ?? "");
  const asTokens = () => callTensors<WeightsReply>(`${path}/forward`, { ...input, top_k: 0 }, signal);
  // What layers a model has is known once it is resident.
  const loading = model.layers.length ? null : await asTokens();
  if (loading) model = await described();
  // The tokens are known once the model has read the text; a text has more characters than tokens, but for the ends.
  const most = (text.length + 8) ** 2 * model.layers.reduce((sum, { heads }) => sum + heads, 0);
  const sure = !chat && !input.images && !input.audio && !input.target && !input.text_pair && most > 0 && most <= MOST_CELLS;
  const shares = model.layers.some(isImplicit) ? { normalize: "absolute" } : {};
  const ofText = model.layers.every(({ keys = "tokens" }) => keys === "tokens") && !["images", "audio"].some((each) => model.takes.includes(each));
  const fewer = model.layers.every(isByChannel) || (needs === "tokens" && ofText);
  let answer = await (fewer ? (loading ?? asTokens()) : ask(sure ? {} : { return_weights: false, statistics: ["entropy"], ...shares }, signal));
  const { reply } = answer;
  const inspected = { layers: reply.layers.map(({ layer }) => layer) };
  const headsOf = (at: number) => answer.tensors[sure ? `layers.${at}.weights` : `layers.${at}.statistics.entropy`].shape.at(sure ? -3 : -1) ?? 1;
  const crops = Math.max(1, ...reply.layers.map(({ layer }) => mediaLabels(reply, String(layer))?.length ?? 1));
  const crop = integer(params.sequence, 0, 0, crops - 1);
  /** The layers whose weights are asked for by themselves: all, or those with too many channels to be asked for at once. */
  const asked = new Set(inspected.layers);
  const others = (asked.size ? model.layers.filter(isByChannel) : model.layers).filter(({ layer }) => !asked.has(layer));
  const listed = [
    ...reply.layers.map(({ layer, implicit = false }, at) => ({ layer, implicit, heads: headsOf(at), wide: false })),
    ...others.map((each) => ({ layer: each.layer, implicit: isImplicit(each), heads: each.heads, wide: isByChannel(each) })),
  ];
  const place = (of: number | string) => model.layers.findIndex(({ layer }) => layer === of);
  if (others.length) listed.sort((one, other) => place(one.layer) - place(other.layer));
  const layers = listed.map(({ layer, implicit, heads, wide }): Layer => {
    const ref = String(layer);
    const [queries, keys] = layerTokens(reply, ref, crop);
    const name = /^\d+$/.test(ref) ? `layers.${ref}` : ref;
    const places = keys.rectangles ? { places: keys.rectangles } : {};
    const seconds = queries.seconds || keys.seconds ? { seconds: { ...(queries.seconds && { queries: queries.seconds }), ...(keys.seconds && { keys: keys.seconds }) } } : {};
    return { ref, name, ...(implicit && { implicit }), ...(wide && { wide }), heads: Array.from({ length: heads }, (_, head) => headName(ref, head)), queries: queries.tokens.map(shownToken), keys: keys.tokens.map(shownToken), ids: queries.ids, ...places, ...seconds };
  });
  const cellsOf = ({ heads, queries, keys }: Layer) => heads.length * queries.length * keys.length;
  /** The place of a layer in the reply of the layers that were asked for at once; −1 for another. */
  const placeIn = (layer: number) => inspected.layers.indexOf(listed[layer].layer);
  const all = layers.reduce((sum, each, at) => sum + (placeIn(at) < 0 ? 0 : cellsOf(each)), 0);
  const whole = asked.size > 0 && all <= MOST_CELLS;
  if (whole && !sure) answer = await ask(inspected, signal);
  /** The request for all that is asked for with a layer, and the layer's place in its reply. */
  const groupOf = (layer: number) => (placeIn(layer) < 0 ? { body: { layers: [listed[layer].layer] }, at: 0, cells: cellsOf(layers[layer]) } : { body: inspected, at: placeIn(layer), cells: all });
  const firstOf = (layer: number) => (placeIn(layer) < 0 ? layer : listed.findIndex((each) => asked.has(each.layer)));
  const isWhole = (layer: number) => (placeIn(layer) < 0 ? cellsOf(layers[layer]) <= MOST_CELLS : whole);
  /** The weights of a layer that was not asked for at once. */
  const later = remembered(async (layer: number) => (await ask({ layers: [listed[layer].layer] })).tensors);
  const wholeOf = async (layer: number): Promise<[Record<string, Tensor>, number]> => (placeIn(layer) < 0 ? [await later(layer), 0] : [answer.tensors, placeIn(layer)]);
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
  const pooled = remembered(async (key: string) => {
    const [pool, layer] = key.split("/").map(Number);
    return (await ask({ ...groupOf(layer).body, pool, return_weights: false })).tensors;
  });
  const labels = first(reply.labels);
  const read = first(reply.encoder_labels ?? reply.labels); // of the sentence
  const counting = countingOf(params);
  /** The statistics of all layers, of a text whose weights are too many to count here. */
  const served = remembered(async (one: number) => {
    const { window, sinks, classes }: Counting = counting;
    const { body: group } = groupOf(one);
    const ids = (members: string[]) => [...new Set(labels.ids.filter((_id, i) => members.includes(bare(labels.tokens[i]))))];
    const token_classes = Object.fromEntries(Object.entries(classes).map(([name, members]) => [name, ids(members)]));
    const { tensors } = await ask({ ...group, return_weights: false, statistics: namesOf(counting), statistic_options: { window, sinks, token_classes }, ...(layers.some(({ implicit }) => implicit) && { normalize: "absolute" }) });
    return group.layers.map((each, at): Statistics => {
      const { ref = "", heads } = layers[listed.findIndex(({ layer }) => layer === each)];
      const own = Object.entries(tensors).filter(([name]) => name.startsWith(`layers.${at}.statistics.`));
      const from = cropAt(ref) * heads.length;
      return Object.fromEntries(own.map(([name, { data }]) => [name.split(".").slice(3).join("."), Array.from(data.subarray(from, from + heads.length))]));
    });
  });
  const waited = waits((loading ?? answer).reply.ran);
  const body = (layer: number, head: number): Body => ({ ...input, layers: [listed[layer].layer], select: { heads: [head] } });
  return {
    title: `${id}: ${text}`,
    counting,
    unseen: unseenOf(model, listed),
    whole: { model: id, id, text, tokens: labels.tokens.length, read: read.tokens.length, input, predicts: model.predicts ?? null },
    facts: [["model", `${id}, ${reply.ran.architecture}`], ["tokens", read === labels ? String(read.tokens.length) : `${read.tokens.length}, and ${labels.tokens.length} of the decoder`], ["computed in", `${duration(reply.ran.compute_ms)}, ${reply.ran.weights ?? reply.ran.dtype} on ${reply.ran.device}`], ...(waited ? [["waited", waited] as [string, string]] : [])],
    layers,
    sequences: crops,
    ...(params.image && input.images ? { picture: params.image } : {}),
    ...(params.sound && input.audio ? { sound: params.sound } : {}),
    weights: cached(async (layer, head) => {
      const { ref = "" } = layers[layer];
      if (isWhole(layer)) {
        const [tensors, at] = await wholeOf(layer);
        return cut(tensors[`layers.${at}.weights`], ref, head, tensors[`layers.${at}.chosen`]);
      }
      const { tensors } = await callTensors<WeightsReply>(`${path}/weights`, { ...body(layer, head), statistics: [] });
      return cut(tensors["layers.0.weights"], ref, 0, tensors["layers.0.chosen"]);
    }),
    strips: (layer, head) => {
      if (isWhole(layer)) return null;
      const { ref = "", queries } = layers[layer];
      const { at, cells } = groupOf(layer);
      return async (pool, from, to) => {
        if (pool > 1 && from === 0 && to >= queries.length && cells / pool ** 2 <= MOST_POOLED) {
          return cut((await pooled(`${pool}/${firstOf(layer)}`))[`layers.${at}.pooled`], ref, head);
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
      const { tensors } = await callTensors(`${path}/forward`, { ...input, layers: [listed[layer].layer], return: ["q", "k", "v", "weights"], top_k: 0 });
      const [query, key, value] = ["q", "k", "v"].map((tap) => tensors[`layers.0.${tap}`]);
      const weights = cut(tensors["layers.0.weights"], ref, 0);
      const causal = isCausal(weights);
      if (!isScaledDot(weights, query, key, causal)) return null;
      return { module: "", body: { query, key, value, spec: causal ? { masks: [{ name: "causal" }] } : {} } };
    },
    taps: async (layer, head, query) => {
      if (layers[layer].implicit) throw new Problem({ title: "There are no steps", detail: IMPLICIT, waits: true });
      const taps = { return: ["q", "k", "v", "scores", "masked_scores", "weights", "context"], top_k: 0, layers: [listed[layer].layer] };
      const request: ApiRequest = { method: "POST", path: `${path}/forward`, body: { ...input, ...taps, select: { heads: [head], queries: [query] } } };
      const { tensors } = await callTensors(request.path, request.body);
      const own = Object.entries(tensors).filter(([name]) => name.startsWith("layers.0."));
      return { request, tensors: Object.fromEntries(own.map(([name, each]) => [name.slice(9), ofSequence(each, 3, cropAt(layers[layer].ref))])) };
    },
    // The page counts keys as tokens; of others the server knows the positions.
    statistics: async (layer) => (isWhole(layer) && !reply.key_labels?.[layers[layer].ref ?? ""] ? null : (await served(firstOf(layer)))[groupOf(layer).at]),
    requestFor: (layer, head) => Promise.resolve<ApiRequest>({ method: "POST", path: `${path}/weights`, body: body(layer, head) }),
    runOf: () => Promise.resolve(null),
  };
}
