/** Requests about the subject at hand: forward passes, gradients, attributions and effects, cut to one sequence. */

import { callTensors, of } from "../server/api";
import type { ApiRequest } from "../server/api";
import { matrix } from "../numbers/matrix";
import type { Matrix } from "../numbers/matrix";
import type { Live, Subject } from "./subject";
import { stacked } from "../server/tensors";
import type { Body, Tensor } from "../server/tensors";
import type { Ran } from "../server/types";

/** Rows of a matrix. */
export type Rows = Float32Array[];

export interface Made {
  request: ApiRequest;
  ran: Ran;
  /** Heads in front of the output: those of raw attention in the layout [head, token, width]. */
  heads: number;
  /** The rows of each returned tap, of all heads one after the other, for one sequence. */
  taps: Record<string, Rows | undefined>;
  /** The sizes of each returned tap, without the batch. */
  tensors: Record<string, Tensor>;
}

/** The part of a tensor that belongs to one sequence. `depth` is its number of dimensions without a batch. */
export function ofSequence({ shape, data }: Tensor, depth: number, sequence: number): Tensor {
  if (shape.length <= depth) return { shape, data };
  const size = data.length / shape[0];
  return { shape: shape.slice(1), data: data.subarray(sequence * size, (sequence + 1) * size) };
}

/** The rows of a tensor: its last dimension is the width. */
export function rowsOf({ shape, data }: Tensor): Rows {
  const width = shape.at(-1) ?? 1;
  return Array.from({ length: width ? data.length / width : 0 }, (_, i) => data.subarray(i * width, (i + 1) * width));
}

/** Run the subject's attention on the server, with further fields such as `edits` and `return`. */
export async function forwardOf(live: Live, more: Body, sequence: number): Promise<Made> {
  return run("forward", live, more, sequence);
}

/** Gradients of the subject's attention. Taps of the reply and gradients, those as `gradients.weights` and its like. */
export async function gradientsOf(live: Live, more: Body, sequence: number): Promise<Made> {
  return run("gradients", live, more, sequence);
}

/** The share of each weight and head in a number that depends on the output, by the methods of the request. */
export async function attributionOf(live: Live, more: Body, sequence: number): Promise<Made> {
  return run("attribution", live, more, sequence);
}

/** The change of the output by each edit of a sweep, as `effects.norm` and its like. */
export async function effectsOf(live: Live, more: Body, sequence: number): Promise<Made> {
  return run("effects", live, more, sequence);
}

async function run(question: string, live: Live, more: Body, sequence: number): Promise<Made> {
  const request: ApiRequest = { method: "POST", path: of(live.module, question), body: { ...live.body, ...more } };
  const { reply, tensors } = await callTensors<{ ran: Ran }>(request.path, request.body ?? {});
  const query = live.body.query as Tensor;
  const layout = live.module || "num_heads" in live.body ? 2 : Math.min(3, query.shape.length); // without a batch
  const batched = query.shape.length > layout;
  const cut = Object.fromEntries(Object.entries(tensors).map(([name, each]) => [name, batched ? ofSequence(each, each.shape.length - 1, sequence) : each]));
  const heads = layout === 3 ? (batched ? query.shape[1] : query.shape[0]) : 1;
  return { request, ran: reply.ran, heads, tensors: cut, taps: Object.fromEntries(Object.entries(cut).map(([name, each]) => [name, rowsOf(each)])) };
}

/** The weights of all heads of some layers, one layer after the other: `[head, query, key]`. */
export async function allWeights(subject: Subject, layers: number[]): Promise<Tensor> {
  const heads = await Promise.all(layers.flatMap((layer) => subject.layers[layer].heads.map((_, head) => subject.weights(layer, head))));
  return stacked(heads.map(({ rows, columns, data }) => ({ shape: [rows, columns], data })));
}

/** One head of a tensor [head, query, key], or of [query, key] itself. */
export function headOf({ shape, data }: Tensor, head: number): Matrix {
  const [rows, columns] = shape.slice(-2);
  const cells = rows * columns;
  return shape.length < 3 ? matrix(rows, columns, data) : matrix(rows, columns, data.subarray(head * cells, (head + 1) * cells));
}
