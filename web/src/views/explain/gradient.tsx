/** Gradients: of a prediction through a whole model, or of one attention's output; and attributions to weights and heads. */

import { Problem, call, callTensors } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { DependsOn } from "../../parts/dependence";
import { barScene, heatScene } from "../../drawing/drawings";
import { precise } from "../../numbers/format";
import { MOST_TOKENS } from "../../page/limits";
import { HeatMap } from "../../parts/heatmap";
import { attributionOf, forwardOf, gradientsOf, headOf } from "../../subjects/live";
import type { Matrix } from "../../numbers/matrix";
import { matrixRows } from "../../numbers/matrix";
import { shownToken } from "../../subjects/model_subject";
import { integer } from "../../page/state";
import { headTitle, notComputed, parsed, refOf, subjectKey } from "../../subjects/subject";
import type { Subject, SubjectProps } from "../../subjects/subject";
import type { Body, Tensor } from "../../server/tensors";
import type { Predictions, Ran } from "../../server/types";
import { Area, Button, Choice, Commands, Drawing, Export, FactList, Faulty, Field, ProblemBox, RanTable, Table, Waiting } from "../../parts/ui";

const READOUT = '{"weight": [[1, 0], [0, 1]], "targets": [0, 1]}';

interface Attribution {
  label: string;
  /** The method of the request, if its name differs. */
  method?: string;
  signed?: boolean;
  /** One matrix for all heads together. */
  together?: boolean;
}

const ATTRIBUTIONS: Record<string, Attribution> = {
  gradient_attention: { label: "gradient × attention", signed: true },
  integrated: { label: "integrated gradients", signed: true },
  relevance: { label: "relevance: the mean over heads of the positive part", together: true },
  norm: { label: "norm of the weighted values" },
  norm_of_sum: { label: "norm of the weighted values, summed over heads", method: "norm", together: true },
};

/** ∂L/∂output for L = the output's elements of one token, or of all, summed; or half its squared length. */
function upstream(output: Tensor, loss: string, tokens: number): Tensor {
  const width = output.shape.at(-1) ?? 1;
  const at = loss.startsWith("token:") ? Number(loss.slice(6)) : null;
  const data = output.data.map((value, i) => {
    if (loss === "square") return value;
    return at === null || Math.floor(i / width) % tokens === at ? 1 : 0;
  });
  return { shape: output.shape, data };
}

/** The readout of the parameters: a linear classifier of the output, whose log-likelihood is L. */
function readoutOf(text: string | undefined): Body {
  if (!text?.trim()) throw new Problem({ title: "Readout", detail: `Expected JSON such as ${READOUT}.`, param: "readout" });
  return { readout: parsed(text, "readout") };
}

/** The attributions that follow from ∂L/∂weights alone, of the whole model's prediction. */
const OF_PREDICTION = ["gradient_attention", "relevance"];
const PREDICTION = "prediction";

/** The gradients of one number, and what they say of the heads. */
interface Gradients {
  /** The layer that they are of. */
  layer: number;
  /** ∂L/∂weights `[head, query, key]`; none of a readout. */
  slopes: Tensor | null;
  /** Attributions by name. */
  tensors: Partial<Record<string, Tensor>>;
  /** |∂L/∂ξ| of each head's gate. */
  importance: number[];
  rans: Record<string, Ran>;
  calls: ApiRequest[];
}

/** L is the log-probability of a token: exact gradients through all later layers of the model. */
async function ofPrediction(subject: Subject, layer: number, of: Body, crop: number, signal: AbortSignal): Promise<Gradients> {
  const { whole, layers } = subject;
  const { ref = "", heads, queries, keys } = layers[layer];
  const body: Body = { ...whole?.input, of, layers: [refOf(ref)], wrt: ["weights"] };
  const request: ApiRequest = { method: "POST", path: `v1/models/${encodeURIComponent(whole?.id ?? "")}/gradients`, body };
  const [{ tensors }, ...own] = await Promise.all([callTensors(request.path, body, signal), ...heads.map((_, head) => subject.weights(layer, head))]);
  const cells = queries.length * keys.length;
  const { data: effects } = tensors["layers.0.heads"]; // of all crops of an image
  const data = tensors["layers.0.gradients.weights"].data.slice(crop * heads.length * cells, (crop + 1) * heads.length * cells);
  const slopes = { shape: [heads.length, queries.length, keys.length], data };
  const products = data.map((slope, at) => slope * own[Math.floor(at / cells)].data[at % cells]);
  const relevance = new Float32Array(cells);
  products.forEach((each, at) => (relevance[at % cells] += Math.max(0, each) / heads.length));
  return {
    layer,
    slopes,
    tensors: { gradient_attention: { shape: slopes.shape, data: products }, relevance: { shape: [queries.length, keys.length], data: relevance } },
    importance: heads.map((_, head) => Math.abs(effects.reduce((total, each, at) => (at % heads.length === head ? total + each : total), 0))),
    rans: {},
    calls: [request],
  };
}

const sum = ({ data }: Matrix) => data.reduce((a, b) => a + b, 0);

interface ShownProps {
  of: Matrix;
  name: string;
  title: string;
  signed: boolean;
  queries: string[];
  keys: string[];
  facts: Record<string, unknown>;
}

/** One heat map with its buttons to save it. */
function Shown({ of, name, title, signed, queries, keys, facts }: ShownProps) {
  const { theme } = usePage();
  return (
    <figure>
      <figcaption>{title}</figcaption>
      <HeatMap of={of} queries={queries} keys={keys} title={title} signed={signed} />
      <Export of={{ name, label: title, scene: () => heatScene(of, { theme, title, queries, keys, signed }), rows: () => matrixRows(of, queries, keys), json: () => ({ title, queries, keys, values: Array.from(of.data) }), facts }} />
    </figure>
  );
}

const LIKELIEST = 12;
const SATURATED = 0.9; // a probability from which on the gradient of its logarithm is small

/** The prediction of a whole model whose log-probability is L. */
interface Predicted {
  id: string;
  input: Body;
  prediction: Predictions;
  at: number;
  /** `position` and `token` of the request, where they are chosen. */
  of: Body;
}

export function Gradient(props: SubjectProps) {
  const { params } = usePage();
  const { whole } = props.subject;
  const at = integer(params.at, (whole?.tokens ?? 1) - 1, 0, (whole?.tokens ?? 1) - 1);
  const id = whole?.id;
  const input = whole?.input;
  const reads = input !== undefined && ["text", "messages", "audio"].some((each) => each in input) && whole?.predicts !== "class"; // else the model says what has a class
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${at}`, async (signal) => {
    if (!id || !input || whole.predicts === null) return { prediction: null };
    const body = { ...input, top_k: LIKELIEST, ...(reads ? { positions: [at] } : {}) };
    return { prediction: await call<Predictions>("POST", `v1/models/${encodeURIComponent(id)}/forward`, body, signal) };
  });
  if (!value) return busy ? <Waiting what="Asking the server for the prediction" /> : <ProblemBox problem={problem} />;
  const wanted = params.predicted ?? "";
  const token = /^#\d+$/.test(wanted) ? Number(wanted.slice(1)) : wanted;
  // A classifier of tokens has a prediction for each; a model that finds an answer has its likeliest ends.
  const several = !reads && (value.prediction?.predictions.length ?? 0) > 1;
  const place = several ? (value.prediction?.predictions.find(({ position }) => position === at) ?? value.prediction?.predictions[0])?.position : at;
  const of = { ...(reads || several ? { position: place } : {}), ...(token === "" ? {} : { token }) };
  // A model without a head predicts nothing, and is offered no gradient of it.
  return <Shaped {...props} predicted={id && input && value.prediction?.predicts ? { id, input, prediction: value.prediction, at: place ?? at, of } : null} />;
}

/** The choice of the token whose log-probability is L, and what that depends on, token by token and patch by patch. */
function OfPrediction({ predicted, picture, sound }: { predicted: Predicted; picture: string | undefined; sound: string | undefined }) {
  const { params, go } = usePage();
  const { id, input, at, of, prediction: { predicts, predictions, labels } } = predicted;
  const several = predicts === "class" && predictions.length > 1;
  const prediction = (several ? predictions.find(({ position }) => position === at) : undefined) ?? predictions[0];
  const wanted = params.predicted ?? "";
  const known = prediction.top.some(({ id: each }) => wanted === `#${each}`);
  const shown = (token: string) => (predicts === "class" ? token : shownToken(token));
  const named = (each: number) => {
    const found = prediction.top.find(({ id: one }) => one === each)?.token ?? (wanted && !wanted.startsWith("#") ? wanted : undefined);
    return found === undefined ? undefined : shown(found);
  };
  const likeliest = shown(prediction.top[0].token);
  const chosen = wanted === "" ? likeliest : (named(Number(wanted.slice(1))) ?? wanted);
  const { probability } = prediction.top.find(({ id: each }) => wanted === `#${each}`) ?? prediction.top[0];
  const saturated = probability > SATURATED && predicts !== "class";
  const options = prediction.top.map(({ id: each, token, probability: likely }): [string, string] => [`#${each}`, `${shown(token)} ${precise(likely, 3)}`]);
  return (
    <>
      <Controls summary={`log p(${chosen})${several ? ` of ${at} ${shownToken(labels.tokens[at])}` : predicts === "class" ? "" : ` ${predicts === "own" ? "in the place of" : "after"} ${at} ${shownToken(labels.tokens[at])}`}`}>
        {predicts !== "class" && <Choice label={predicts === "own" ? "In the place of" : "After"} value={String(at)} set={(each) => go({ at: each, predicted: "" })} options={labels.tokens.map((each, i): [string, string] => [String(i), `${i} ${shownToken(each)}`])} />}
        {several && <Choice label="Of" value={String(at)} set={(each) => go({ at: each, predicted: "" })} options={predictions.map(({ position }): [string, string] => [String(position), `${position} ${shownToken(labels.tokens[position])}`])} />}
        <Choice label={predicts === "class" ? "Class" : "Token"} value={known ? wanted : ""} set={(each) => go({ predicted: each })} options={[["", `the likeliest: ${likeliest}`], ...options]} />
        {predicts !== "class" && <Field label="Another token" hint="one token of the model" param="of.token" value={known ? "" : wanted} set={(each) => go({ predicted: each })} />}
      </Controls>
      {saturated && <p class="small">{chosen} has a probability of {precise(probability, 3)}: so near 1 that a small step hardly changes log p. A head with a gradient near 0 may still be needed: <Button class="quiet" onClick={() => go({ view: "effects" })}>take each head away</Button></p>}
      <DependsOn model={id} input={input} of={of} named={named} {...(predicts === "class" ? {} : { at: `${at} ${shownToken(labels.tokens[at])}`, own: predicts === "own" })} picture={picture} sound={sound} pick={(layer, head) => go({ layer, head })} />
    </>
  );
}

function Shaped({ subject, layer, head: wanted, predicted }: SubjectProps & { predicted: Predicted | null }) {
  const { params, go, theme } = usePage();
  const attention = subject.layers[layer];
  const fits = Math.max(attention.queries.length, attention.keys.length) <= MOST_TOKENS.gradient;
  const chosen = params.attribution && params.attribution in ATTRIBUTIONS ? params.attribution : "gradient_attention";
  const { label: kind, method = chosen, signed = false, together = false } = ATTRIBUTIONS[chosen];
  const predicts = predicted !== null && OF_PREDICTION.includes(chosen);
  const of = predicts ? predicted.of : {};
  // The sum of the whole output would give every query the same gradient.
  const usual = predicts ? PREDICTION : subject.sequences === 1 ? `token:${attention.queries.length - 1}` : "sum";
  const loss = params.loss ?? usual;
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${loss}/${loss === "readout" ? (params.readout ?? "") : ""}/${method}/${loss === PREDICTION ? JSON.stringify(of) : ""}`, async (signal): Promise<Gradients | null> => {
    if (!fits) return null;
    if (loss === PREDICTION && predicts) return ofPrediction(subject, layer, of, integer(params.sequence, 0), signal);
    const live = await subject.live(layer);
    if (!live) return null;
    const sequence = integer(params.sequence, 0);
    const methods = [...new Set(["gradient_attention", "head_importance", method])];
    const more: Body = {};
    if (loss === "readout") Object.assign(more, readoutOf(params.readout));
    else if (loss !== "sum" && subject.sequences === 1) more.upstream = upstream((await forwardOf(live, { return: ["output"] }, sequence)).tensors.output, loss, attention.queries.length);
    const [attributed, gradients] = await Promise.all([attributionOf(live, { methods, ...more }, sequence), loss === "readout" ? null : gradientsOf(live, { wrt: ["weights"], ...more }, sequence)]);
    return {
      layer,
      slopes: gradients && gradients.tensors["gradients.weights"],
      tensors: attributed.tensors,
      importance: Array.from(attributed.tensors.head_importance.data),
      rans: { ...(gradients ? { gradients: gradients.ran } : {}), attribution: attributed.ran },
      calls: [...(gradients ? [gradients.request] : []), attributed.request],
    };
  });
  // Until the next layer's are there, the gradients before with the tokens and names of their own.
  const shown = value?.layer ?? layer;
  const { name, heads, queries, keys } = subject.layers[shown];
  const head = Math.min(wanted, heads.length - 1);
  const tensors = value?.tensors ?? {};
  const slopes = value?.slopes ? headOf(value.slopes, head) : null;
  const products = tensors.gradient_attention && headOf(tensors.gradient_attention, head);
  const attributed = tensors[chosen] && headOf(tensors[chosen], together ? 0 : head);
  const importance = value?.importance ?? [];
  const gap = chosen === "integrated" ? tensors["completeness.gap"]?.data[0] : undefined;
  const label = headTitle(subject, shown, head);
  const options: [string, string][] = [...(predicts ? [[PREDICTION, predicted.prediction.predicts === "class" ? "the log-probability of a class" : "the log-probability of a token"] as [string, string]] : []), ["sum", "the sum of this attention's output"]];
  if (subject.sequences === 1) options.push(["square", "½ ‖output‖² of this attention"], ["readout", "the log-likelihood of classes, read off this attention's output"], ...attention.queries.map((each, i): [string, string] => [`token:${i}`, `the sum of this attention's output at token ${i} ${each}`]));
  const lossText = options.find(([each]) => each === loss)?.[1] ?? loss;
  const title = together ? `${kind}, ${name}` : `${kind} of ${label}`;
  const shared = { queries, keys, facts: { loss, layer: name, head, importance } };
  return (
    <>
      <Controls summary={`L is ${lossText}`}>
        <Choice wide label="L is" value={loss} set={(each) => go({ loss: each === usual ? "" : each })} options={options} />
        <Choice wide label="Attribution" value={chosen} set={(each) => go({ attribution: each === "gradient_attention" ? "" : each })} options={Object.entries(ATTRIBUTIONS).map(([each, { label: text }]) => [each, text])} />
      </Controls>
      {loss !== PREDICTION && <p class="of">{subject.whole?.id && !predicted ? "This model predicts no token and no class, so L" : "L"} is {lossText}.</p>}
      {loss === "readout" && <Faulty problem={problem}><Area label="Readout" hint="a linear classifier of each query's output: weight [classes, width], bias, and the class of each query as targets (−1: not counted)" param="readout" rows={3} value={params.readout ?? ""} placeholder={READOUT} set={(readout) => go({ readout })} /></Faulty>}
      {predicts && loss === PREDICTION && (
        <>
          <OfPrediction predicted={predicted} picture={subject.picture} sound={subject.sound} />
          <h3>The weights of {label}</h3>
          <p class="small">The gradient goes through all layers after this one.</p>
        </>
      )}
      <ProblemBox problem={problem} />
      {!value && busy && <Waiting what={`Asking the server for the gradients of ${label}`} />}
      {!value && !problem && !busy && <p>This attention {fits ? notComputed(subject, layer) : `has more than ${MOST_TOKENS.gradient} tokens.`}</p>}
      {value && attributed && (
        <div aria-busy={busy}>
          <FactList facts={[
            ...(products ? [["Σ w · ∂L/∂w of this head", precise(sum(products))] as const] : []),
            ["most important head", heads[importance.indexOf(Math.max(...importance))]],
            ...(gap === undefined ? [] : [["gap of completeness", precise(gap)] as const]),
          ]} />
          <div class="side">
            {slopes && <Shown of={slopes} name="gradient" title={`∂L/∂weights of ${label}`} signed {...shared} />}
            <Shown of={attributed} name={chosen} title={title} signed={signed} {...shared} />
            {heads.length > 1 && <Drawing fit scene={barScene({ theme, title: "importance of each head: |∂L/∂ξ| of its gate ξ", labels: heads, values: importance })} />}
          </div>
          {heads.length > 1 && <Table caption="Importance of the heads, |∂L/∂ξ| of a gate ξ on each head's context (Michel et al. 2019)" rows={heads} columns={[{ head: "head", header: true, cell: (each) => each }, { head: "importance", number: true, cell: (_, i) => precise(importance[i]) }]} />}
          {Object.keys(value.rans).length > 0 && <RanTable rans={value.rans} />}
          <Commands calls={value.calls} />
        </div>
      )}
    </>
  );
}
