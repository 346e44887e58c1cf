/** The continuation of a text by a whole model: its tokens with their log-probabilities, by a completion or a chat. */

import { call } from "../server/api";
import type { ApiRequest } from "../server/api";
import type { Body } from "../server/tensors";
import type { ModelInfo } from "../server/types";
import { chatOf } from "./chat";
import { FIRST_TEXT } from "./model_subject";
import type { Params } from "../page/state";

const LIKELIEST = 5;

interface StopReason {
  probe: string;
  score: number;
  /** Its index among the tokens that came. */
  token: number;
}

export interface ContinuedToken {
  token: string;
  logprob: number;
  /** The likeliest tokens in its place, with their log-probabilities. */
  likeliest: [string, number][];
  /** The score of the state that chose it, by each probe that watched. */
  scores?: Record<string, number>;
}

export interface Continuation {
  tokens: ContinuedToken[];
  finish: string | null;
  stopped?: StopReason;
}

interface Choice {
  finish_reason: string | null;
  stop_reason?: StopReason;
  attention?: { scores?: Record<string, number> }[];
  logprobs?: {
    tokens?: string[];
    token_logprobs?: (number | null)[];
    top_logprobs?: (Record<string, number> | null)[] | null;
    content?: { token: string; logprob: number; top_logprobs: { token: string; logprob: number }[] }[] | null;
  } | null;
}

/** The text or the chat that is continued. */
export const promptOf = (params: Params, model: ModelInfo) => {
  const chat = model.takes.includes("messages") ? chatOf(params) : null;
  return { chat, text: params.text ?? FIRST_TEXT };
};

/** The request for the likeliest tokens that follow, with their log-probabilities. */
export function continuing(model: ModelInfo, params: Params, most: number, attention?: Body): ApiRequest & { body: Body } {
  const { chat, text } = promptOf(params, model);
  const rest = { max_tokens: most, temperature: 0, ...(attention && { attention }) };
  return chat
    ? { method: "POST", path: "v1/chat/completions", body: { model: model.id, messages: chat, ...rest, logprobs: true, top_logprobs: LIKELIEST } }
    : { method: "POST", path: "v1/completions", body: { model: model.id, prompt: text, ...rest, logprobs: LIKELIEST } };
}

/** What a choice of a reply continued. */
export function continuationOf({ finish_reason: finish, stop_reason: stopped, attention = [], logprobs }: Choice): Continuation {
  const listed = logprobs?.content
    ? logprobs.content.map(({ token, logprob, top_logprobs }): ContinuedToken => ({ token, logprob, likeliest: top_logprobs.map((each) => [each.token, each.logprob]) }))
    : (logprobs?.tokens ?? []).map((token, i): ContinuedToken => ({ token, logprob: logprobs?.token_logprobs?.[i] ?? NaN, likeliest: Object.entries(logprobs?.top_logprobs?.[i] ?? {}) }));
  const tokens = listed.map((each, i) => {
    const scores = attention[i]?.scores;
    return { ...each, likeliest: [...each.likeliest].sort((a, b) => b[1] - a[1]).slice(0, LIKELIEST), ...(scores && { scores }) };
  });
  return { tokens, finish, ...(stopped && { stopped }) };
}

/** Ask for a continuation. Throws Problem. */
export async function continued(request: ApiRequest, signal: AbortSignal): Promise<Continuation> {
  const { choices: [choice] } = await call<{ choices: [Choice] }>(request.method, request.path, request.body, signal);
  return continuationOf(choice);
}

/** The index of the first token in which two continuations differ; null if one of them goes on as the other does. */
export function parting(one: Continuation, other: Continuation): number | null {
  const at = one.tokens.findIndex(({ token }, i) => token !== other.tokens.at(i)?.token);
  const both = Math.min(one.tokens.length, other.tokens.length);
  return at >= 0 ? at : one.tokens.length < other.tokens.length ? both : null;
}
