/** What a prediction of a whole model depends on: the gradient of its log-probability, by token, by patch and by head. */

import { callTensors } from "../server/api";
import type { ApiRequest } from "../server/api";
import { useLoaded, usePage } from "../page/context";
import { Controls } from "./controls";
import { heatScene } from "../drawing/drawings";
import { placed, precise, real } from "../numbers/format";
import { HeatMap } from "./heatmap";
import { largest, matrix } from "../numbers/matrix";
import type { Matrix } from "../numbers/matrix";
import { shownToken } from "../subjects/model_subject";
import { sounds } from "../subjects/media";
import { NOWHERE, usePointing } from "../drawing/pointed";
import { OverImage } from "./patches";
import { ShadedTokens } from "./shaded_tokens";
import { SoundStrip } from "./sound_strip";
import { headName } from "../subjects/subject";
import type { Body, Tensor } from "../server/tensors";
import type { ModelLabels, ModelRan } from "../server/types";
import { Choice, Commands, Export, FactList, ProblemBox, Table } from "./ui";

/** One number for each token, made of the gradient at its embedding. */
interface Measure {
  label: string;
  about: string;
  asks: Body;
}

const STEPS = 32; // of integrated gradients
const MEASURES = {
  input: { label: "gradient · input", about: "Gradient · embedding of each token: the first-order change of log p if the token's embedding grows. Orange makes the prediction likelier, blue less likely.", asks: { wrt: ["tokens"] } },
  norm: { label: "‖gradient‖", about: "The length of the gradient at each token's embedding: how much log p changes with it, in whatever direction.", asks: { wrt: ["embeddings"] } },
  integrated: { label: `integrated gradients, ${STEPS} steps`, about: "Gradient · embedding, averaged while all embeddings grow from zero (Sundararajan et al. 2017). The numbers sum to log p less log p at zero, the closer the more steps.", asks: { wrt: ["tokens"], integrated: STEPS } },
} satisfies Record<string, Measure>;

interface GradientsReply {
  labels: ModelLabels | ModelLabels[];
  encoder_labels?: ModelLabels | ModelLabels[];
  token?: number[];
  layers: { layer: number | string }[];
  ran: ModelRan;
}

/** log p of a token, and what it depends on. */
interface Dependence {
  request: ApiRequest;
  logProbability: number;
  token: number;
  labels: ModelLabels;
  /** A number for each token. */
  values: Float32Array;
  layers: string[];
  /** Layers × heads: the first-order effect of removing each head, with the opposite sign. */
  heads: Matrix;
  ran: ModelRan;
}

const first = <T,>(of: T | T[]): T => (Array.isArray(of) ? of[0] : of);

/** The length of each row. */
function lengths({ shape, data }: Tensor): Float32Array {
  const width = shape.at(-1) ?? 1;
  return Float32Array.from({ length: data.length / width }, (_, i) => Math.hypot(...data.subarray(i * width, (i + 1) * width)));
}

const KEPT = 32;
const kept = new Map<string, Dependence>();

/** Differentiate log p through the whole model; what was asked lately is remembered. Throws Problem. */
async function dependenceOf(model: string, body: Body, signal: AbortSignal): Promise<Dependence> {
  const request: ApiRequest = { method: "POST", path: `v1/models/${encodeURIComponent(model)}/gradients`, body };
  const key = JSON.stringify([model, body]);
  const known = kept.get(key);
  if (known) return known;
  const { reply, tensors } = await callTensors<GradientsReply>(request.path, body, signal);
  const rows = reply.layers.map((_, i) => tensors[`layers.${i}.heads`]);
  const heads = matrix(rows.length, Math.max(...rows.map(({ shape }) => shape.at(-1) ?? 1)));
  rows.forEach(({ shape, data }, i) => {
    const many = shape.at(-1) ?? 1;
    data.forEach((each, at) => (heads.data[i * heads.columns + (at % many)] += each)); // of all crops of an image
  });
  const made: Dependence = {
    request,
    logProbability: tensors.value.data[0],
    token: reply.token?.[0] ?? -1,
    labels: first(reply.encoder_labels ?? reply.labels),
    values: "tokens" in tensors ? tensors.tokens.data : lengths(tensors.embeddings),
    layers: reply.layers.map(({ layer }) => String(layer)),
    heads,
    ran: reply.ran,
  };
  kept.set(key, made);
  for (const oldest of kept.keys()) {
    if (kept.size <= KEPT) break;
    kept.delete(oldest);
  }
  return made;
}

const MOST_SPANS = 1024;
const MOST_ROWS = 24;

interface DependsOnProps {
  model: string;
  /** The input of the request, with its edits. */
  input: Body;
  /** The number that is differentiated: `position` and `token`, both optional. */
  of: Body;
  /** The name of the token of this id, if it is known. */
  named: (id: number) => string | undefined;
  /** The token after which it is predicted, or in whose own place; none of a class. */
  at?: string;
  own?: boolean;
  /** The image that the model read, and the sound that it heard. */
  picture?: string | undefined;
  sound?: string | undefined;
  /** A head was chosen. */
  pick?: (layer: number, head: number) => void;
}

export function DependsOn({ model, input, of, named, at, own = false, picture, sound, pick }: DependsOnProps) {
  const { params, go } = usePage();
  const by = params.by && params.by in MEASURES ? (params.by as keyof typeof MEASURES) : "input";
  const { about, label: measured, asks } = MEASURES[by];
  const body = { ...input, of, ...asks };
  const key = JSON.stringify([model, body]);
  const { value, problem, busy } = useLoaded(key, async (signal) => ({ key, by, ...(await dependenceOf(model, body, signal)) }));
  return (
    <section aria-label="What the prediction depends on" aria-busy={busy}>
      <Controls summary={measured}>
        <Choice wide label="A number for each token" value={by} set={(each) => go({ by: each === "input" ? "" : each })} options={Object.entries(MEASURES).map(([each, { label }]) => [each, label])} />
      </Controls>
      <ProblemBox problem={problem} />
      {!value && !problem && <p class="small" role="status">Differentiating…</p>}
      {value && <Shown of={value} signed={value.by !== "norm"} measured={MEASURES[value.by].label} token={named(value.token) ?? String(value.token)} at={at} own={own} picture={picture} sound={sound} {...(pick ? { pick } : {})} />}
      <p class="small">{about}</p>
      {value?.key === key && <p class="hidden" role="status">{measured} is there.</p>}
    </section>
  );
}

interface ShownProps {
  of: Dependence;
  signed: boolean;
  measured: string;
  token: string;
  at: string | undefined;
  own: boolean;
  picture: string | undefined;
  sound: string | undefined;
  pick?: (layer: number, head: number) => void;
}

function Shown({ of, signed, measured, token, at, own, picture, sound, pick }: ShownProps) {
  const { theme } = usePage();
  const { labels, values, heads, layers, logProbability } = of;
  const names = labels.tokens.map(shownToken);
  const places = labels.rectangles?.map((each) => each ?? null);
  const over = picture !== undefined && places !== undefined;
  const heard = sound === undefined || !labels.seconds ? undefined : sounds.get(sound);
  const pointing = usePointing();
  const log = `log p(${token})`;
  const most = largest(values);
  const spans = heard ? [] : names.map((name, i) => ({ name, i })).filter(({ i }) => !(over && places[i])).slice(0, MOST_SPANS);
  const strongest = placed(names).map((name, i) => ({ name, value: values[i] })).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, MOST_ROWS);
  const columns = Array.from({ length: heads.columns }, (_, i) => headName("", i));
  const title = `gradient · context of each head, of ${log}`;
  return (
    <>
      <p>The number that is differentiated is {log}: the log-probability of <code>{token}</code>{at === undefined ? "" : <>{own ? " in the place of " : " after "}<code>{at}</code></>}.</p>
      <FactList facts={[[log, real(logProbability)], ["probability", precise(Math.exp(logProbability), 3)], ["computed in", `${of.ran.compute_ms.toFixed(1)} ms`]]} />
      {over && (
        <figure class="patches">
          <figcaption>{measured} of {log}, by patch</figcaption>
          <OverImage picture={picture} places={places} values={values} signed={signed} label={`${picture} with ${measured} of ${log}`}
            describe={(patch) => (patch === null ? "Point at a patch. Orange is above 0, blue below." : `${log} by ${names[patch]}: ${precise(values[patch], 4)}`)} />
        </figure>
      )}
      {heard && (
        <figure>
          <figcaption>{measured} of {log}, by frame</figcaption>
          <SoundStrip sound={heard} spans={labels.seconds ?? []} values={values} signed={signed} label={`${heard.name} with ${measured} of ${log}; the table has the largest.`} point={(frame) => pointing.set(frame === null ? NOWHERE : { query: null, key: frame })} />
        </figure>
      )}
      {spans.length > 0 && <ShadedTokens tokens={spans.map(({ name, i }) => ({ name, value: values[i] }))} most={most} signed={signed}><b class="predicted">→ {token}</b></ShadedTokens>}
      <Export of={{
        name: "dependence",
        label: "what the prediction depends on",
        scene: () => heatScene(matrix(1, values.length, values), { theme, title: `${measured} of ${log}`, queries: [token], keys: placed(names), signed }),
        rows: () => [["token", measured], ...names.map((name, i) => [name, values[i]])],
        json: () => ({ request: of.request.body, token, log_probability: logProbability, tokens: names, values: Array.from(values), layers, heads: layers.map((_, i) => Array.from(heads.data.subarray(i * heads.columns, (i + 1) * heads.columns))) }),
      }} />
      <div class="side">
        <Table caption={`The tokens with the largest ${measured}`} rows={strongest} columns={[{ head: "token", header: true, cell: ({ name }) => name }, { head: measured, number: true, cell: ({ value }) => precise(value) }]} />
        <figure>
          <figcaption>{title}</figcaption>
          <HeatMap of={heads} queries={layers} keys={columns} title={title} axes={["layers", "heads"]} signed {...(pick ? { pick: ({ query, key }) => pick(query, key) } : {})} />
          <p class="small">What log p loses, to first order, if the head adds nothing.</p>
        </figure>
      </div>
      <Commands calls={[of.request]} />
    </>
  );
}
