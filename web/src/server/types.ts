/** The part of the service's contract that this page reads. Field names are those of the wire. */

export interface Named {
  name: string;
  [option: string]: unknown;
}
export interface Spec {
  score?: Named;
  masks?: Named[];
  position?: Named;
  normalizer?: Named;
  method?: Named;
}
export interface ModuleConfig {
  d_model: number;
  num_heads: number;
  num_kv_heads?: number | null;
  head_dim?: number | null;
  spec?: Spec;
}
export interface ModuleInfo {
  name: string;
  config: ModuleConfig;
  version: string;
  device: string;
  parameter_count: number;
  bytes: number;
  source?: { checkpoint: string; layer: number; part: string } | null;
}
export interface ServerInfo {
  version: string;
  device: string;
  device_name: string;
  torch: string;
  modules: number;
  memory: { resident_bytes: number; models_bytes: number; sessions_bytes: number; in_flight_bytes: number; free_bytes: number };
  limits: { memory_budget_bytes: number };
  hub: HubInfo;
}
/** The Hugging Face hub, as far as callers may have the server fetch from it. */
export interface HubInfo {
  /** The reason why they may not. */
  problem?: string | null;
  models: { repository: string; revision: string; bytes: number; license: string; about: string }[];
  /** Paths of the checkpoints that are being fetched. */
  fetching: string[];
}
export interface FetchProgress {
  bytes: number;
  total_bytes?: number | null;
}
export interface CheckpointInfo {
  path: string;
  family: string | null;
  bytes: number;
  layers: number;
  heads: number | null;
  d_model: number | null;
  problem: string | null;
  /** Its progress while it is being fetched. */
  fetch?: FetchProgress | null;
}
export interface ModelInfo {
  id: string;
  checkpoint: string;
  /** The model whose process answers for a variant, and its adapter. */
  base?: string | null;
  adapter?: string | null;
  state: "idle" | "loading" | "resident" | "stuck";
  /** The share that is loaded, 0 to 1, while it is loading. */
  progress?: number | null;
  /** Requests that its process has. */
  running: number;
  /** Requests that wait until others have their answers, or until it is loaded. */
  waiting: number;
  architecture?: string | null;
  takes: string[];
  generates: boolean;
  /** As in `Predictions`. */
  predicts?: Predictions["predicts"];
  bytes: number;
  max_length?: number | null;
  /** `kind`: how a layer mixes tokens. `edits`: the taps that can be edited; `refused`: the reason why others are not there. */
  layers: { layer: number | string; kind?: "attention" | "linear" | "state_space"; heads: number; head_dim?: number | null; keys?: string; taps?: string[]; edits?: string[]; refused?: Record<string, string> }[];
  /** Kinds of layers whose attention cannot be inspected. */
  unseen?: string[];
  /** Why it cannot be loaded. */
  refused?: string;
}
export interface PassCost {
  flops: number;
  bytes: number;
  peak_bytes: number;
  predicted_ms: number;
}
export interface ModelComplexityReply {
  parameters: number;
  parameter_bytes: number;
  prefill: PassCost;
  /** Of one further token after all others; zeros for an image encoder. */
  per_token: PassCost;
  fit?: PassCost;
  images?: { tokens: number; crops: number }[];
  total_ms: number;
  cache_bytes_per_token: number;
  cache_bytes: number;
  max_batch: number;
  max_length: number;
}
export interface ModelLabels {
  tokens: string[];
  ids: number[];
  rectangles?: ([number, number, number, number] | null)[];
  /** Begin and end of each frame of a sound. */
  seconds?: ([number, number] | null)[];
}
/** A generated token and what the heads looked at when they chose it. */
export interface GeneratedToken {
  /** Its place among the tokens of prompt and answer. */
  position: number;
  token: string;
  id: number;
  layers: { layer: number | string; top_keys: { keys: number[][]; weights: number[][] } }[];
}
export interface CompletionChunk {
  choices: {
    text: string;
    finish_reason: string | null;
    attention?: GeneratedToken[];
    logprobs?: { tokens: string[]; token_logprobs: number[]; top_logprobs: Record<string, number>[] } | null;
  }[];
}
export interface ModelRan {
  architecture: string;
  device: string;
  dtype: string;
  weights?: string;
  compute_ms: number;
  queue_ms: number;
  load_ms?: number;
}
export interface Predictions {
  labels: { tokens: string[] };
  /** `next`: the token that follows; `own`: the one in its place; `class`: of the image, the text or each token; null without such a head. */
  predicts: "next" | "own" | "class" | null;
  predictions: {
    position: number;
    top: { token: string; id: number; logit: number; unedited_logit: number; probability: number; unedited_probability: number; base_probability?: number }[];
    divergence?: number | null;
  }[];
}
/** S sources and A sentences: numbers are S rows of A. */
export interface ContextReply {
  prompt: string;
  generated: boolean;
  sources: { name: string; text: string; span: [number, number] }[];
  answer: { text: string; logprob: number }[];
  attention?: number[][];
  gradient?: number[][];
  ablation?: { hidden?: number[][]; removed?: number[][] };
  ran: ModelRan;
}
/** P positions, H heads, T targets; tokens are ids. */
export interface LensReply {
  labels: ModelLabels | ModelLabels[];
  /** The texts of all tokens in the reply. */
  names: Partial<Record<number, string>>;
  layers: {
    layer: number | string;
    /** `[P, k]` each. */
    hidden?: { top?: { ids: number[][]; logits: number[][]; probabilities?: number[][] } };
    /** Tops `[H, P, k]`, targets `[H, P, T]`. */
    heads?: { top?: { ids: number[][][] }; targets?: number[][][] };
  }[];
}
/** A component at the beginning or the end of paths. */
export interface PathEnd {
  part: string;
  layer?: number | string | null;
  head?: number | null;
}
/** Effects of a sweep over layers and heads, a row for each layer; or of paths, a row for each beginning. NaN: none. */
export interface EffectsReply {
  swept: { layers?: (number | string)[]; heads?: number[]; from?: PathEnd[]; to?: PathEnd[] };
  baseline: number;
  effects: { value: number[][]; divergence?: number[][] };
  token_names?: string[];
}
export interface CheckpointAttention {
  name: string;
  layer: number;
  part: string;
  stack: string | null;
  config: ModuleConfig | null;
  missing: string[];
  problem: string | null;
  bytes: number;
}
export interface Facts {
  model: string;
  text: string;
  target?: string | null;
  created: string;
  versions: Record<string, string>;
  tokens: Record<string, string[]>;
  attentions: { name: string; heads: string[] }[];
  /** The layers that also mix tokens, but have no recorded weights, and the reason. */
  unseen?: Record<string, string>;
}
export interface RecordingSummary {
  id: string;
  model: string;
  text: string;
  bytes: number;
}
export interface RecordingInfo extends Facts {
  id: string;
  bytes: number;
  tensors: { name: string; dtype: string; shape: number[] }[];
}
export interface Ran {
  kernel: string;
  device: string;
  dtype: string;
  version?: string | null;
  flops: number;
  predicted_ms: number;
  predicted_low_ms: number;
  predicted_high_ms: number;
  compute_ms: number;
  cpu_ms: number;
  queue_ms: number;
  batch: number;
  peak_bytes: number;
}
export interface CircuitsReply {
  spectra: { name: string; shape: number[] }[];
  composition?: { module: string; version: string; baseline: number };
  left_out: string[];
  ran: Ran;
}
export interface SessionInfo {
  session: string;
  module: string;
  version: string;
  sequences: number;
  length: number;
  held: number;
  capacity: number | null;
  policy: Named;
  bytes: number;
  expires_at: string;
  parent: string | null;
}
export interface VariantInfo {
  kind: string;
  name: string;
  summary: string;
  formula: string;
  gradient: string;
  cost: string;
  source: string;
}
export interface Times {
  median_ms: number;
  low_ms: number;
  high_ms: number;
}
export interface Cost {
  shape: { batch: number; queries: number };
  allowed_pairs: number;
  forward: { dense: { total: number }; masked: { total: number } };
  backward: { masked: { total: number } };
  peak_bytes: { fused?: number | null; materialized?: number | null; request: number };
  kv_cache_bytes: number;
  kernel: string;
  executed_flops: number;
  predicted_ms: number;
  predicted: { forward: Times };
}
interface Fits {
  longest: { size: number; kernel: string | null };
  largest_batch: { size: number };
}
export interface Growth {
  flops_exponent?: number | null;
  peak_bytes_exponent?: number | null;
  time_order: string;
  memory_order: string;
  letters: Record<string, string>;
}
export interface Crossover {
  of: "time" | "peak_bytes" | "flops";
  between: [string, string];
  cheaper: string | null;
  at: number | null;
  low: number | null;
  high: number | null;
}
export interface ComplexityReply {
  device_name: string;
  costs: Cost[];
  growth: Growth;
  limits: { free_bytes: number; forward: Fits; gradients?: Fits | null };
  compared?: { label: string; costs: Cost[] }[];
  crossovers?: Crossover[];
}
