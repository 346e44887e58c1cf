/** ∂L/∂weights, and attributions to weights and heads. */

import { Problem, callTensors } from "../api";
import type { Asked } from "../api";
import { useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { barScene, heatScene } from "../drawings";
import { precise } from "../format";
import { MOST_TOKENS } from "../limits";
import { HeatMap } from "../heatmap";
import { attributionOf, forwardOf, gradientsOf, headOf } from "../live";
import type { Matrix } from "../matrix";
import { integer } from "../state";
import { headTitle, parsed, subjectKey } from "../subject";
import type { Subject } from "../subject";
import type { Body, Tensor } from "../tensors";
import type { Ran } from "../types";
import { Area, Choice, Commands, Drawing, Export, FactList, Faulty, ProblemBox, RanTable, Table, Waiting } from "../ui";
import { matrixRows } from "./head";

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
  /** ∂L/∂weights `[head, query, key]`; none of a readout. */
  slopes: Tensor | null;
  /** Attributions by name. */
  tensors: Partial<Record<string, Tensor>>;
  /** |∂L/∂ξ| of each head's gate. */
  importance: number[];
  rans: Record<string, Ran>;
  calls: Asked[];
  /** L in words, where the request alone does not say it. */
  about?: string;
}

/** L is the log-probability of the likeliest next token: exact gradients through all later layers of the model. */
async function ofPrediction(subject: Subject, layer: number): Promise<Gradients> {
  const { whole, layers } = subject;
  const { ref = "", heads, queries, keys } = layers[layer];
  const body: Body = { ...whole?.input, layers: [/^\d+$/.test(ref) ? Number(ref) : ref], wrt: ["weights"] };
  const asked: Asked = { method: "POST", path: `v1/models/${encodeURIComponent(whole?.id ?? "")}/gradients`, body };
  const [{ tensors }, ...own] = await Promise.all([callTensors(asked.path, body), ...heads.map((_, head) => subject.weights(layer, head))]);
  const slopes = tensors["layers.0.gradients.weights"];
  const cells = queries.length * keys.length;
  const products = slopes.data.map((slope, at) => slope * own[Math.floor(at / cells)].data[at % cells]);
  const relevance = new Float32Array(cells);
  products.forEach((each, at) => (relevance[at % cells] += Math.max(0, each) / heads.length));
  return {
    slopes,
    tensors: { gradient_attention: { shape: slopes.shape, data: products }, relevance: { shape: [queries.length, keys.length], data: relevance } },
    importance: Array.from(tensors["layers.0.heads"].data, Math.abs),
    rans: {},
    calls: [asked],
    about: `L is the log-probability that ${whole?.model} gives to the token that it finds likeliest after the text: ${precise(tensors.value.data[0])}. The gradient goes through all layers behind this one.`,
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

export function Gradient({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const { name, heads, queries, keys } = subject.layers[layer];
  const fits = Math.max(queries.length, keys.length) <= MOST_TOKENS.gradient;
  const chosen = params.attribution && params.attribution in ATTRIBUTIONS ? params.attribution : "gradient_attention";
  const { label: kind, method = chosen, signed = false, together = false } = ATTRIBUTIONS[chosen];
  const predicts = Boolean(subject.whole?.generates) && subject.sequences === 1 && OF_PREDICTION.includes(chosen);
  // The sum of the whole output would give every query the same gradient.
  const usual = predicts ? PREDICTION : subject.sequences === 1 ? `token:${queries.length - 1}` : "sum";
  const loss = params.loss ?? usual;
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${loss}/${loss === "readout" ? (params.readout ?? "") : ""}/${method}`, async (): Promise<Gradients | null> => {
    if (!fits) return null;
    if (loss === PREDICTION && predicts) return ofPrediction(subject, layer);
    const live = await subject.live(layer);
    if (!live) return null;
    const sequence = integer(params.sequence, 0);
    const methods = [...new Set(["gradient_attention", "head_importance", method])];
    const more: Body = {};
    if (loss === "readout") Object.assign(more, readoutOf(params.readout));
    else if (loss !== "sum" && subject.sequences === 1) more.upstream = upstream((await forwardOf(live, { return: ["output"] }, sequence)).tensors.output, loss, queries.length);
    const [attributed, gradients] = await Promise.all([attributionOf(live, { methods, ...more }, sequence), loss === "readout" ? null : gradientsOf(live, { wrt: ["weights"], ...more }, sequence)]);
    return {
      slopes: gradients && gradients.tensors["gradients.weights"],
      tensors: attributed.tensors,
      importance: Array.from(attributed.tensors.head_importance.data),
      rans: { ...(gradients ? { gradients: gradients.ran } : {}), attribution: attributed.ran },
      calls: [...(gradients ? [gradients.asked] : []), attributed.asked],
    };
  });
  const tensors = value?.tensors ?? {};
  const slopes = value?.slopes ? headOf(value.slopes, head) : null;
  const products = tensors.gradient_attention && headOf(tensors.gradient_attention, head);
  const attributed = tensors[chosen] && headOf(tensors[chosen], together ? 0 : head);
  const importance = value?.importance ?? [];
  const gap = chosen === "integrated" ? tensors["completeness.gap"]?.data[0] : undefined;
  const label = headTitle(subject, layer, head);
  const options: [string, string][] = [...(predicts ? [[PREDICTION, "the log-probability of the next token"] as [string, string]] : []), ["sum", "the sum of the output"]];
  if (subject.sequences === 1) options.push(["square", "½ ‖output‖²"], ["readout", "the log-likelihood of classes"], ...queries.map((each, i): [string, string] => [`token:${i}`, `the sum of the output of ${i} ${each}`]));
  const title = together ? `${kind}, ${name}` : `${kind} of ${label}`;
  const shared = { queries, keys, facts: { loss, layer: name, head, importance } };
  return (
    <>
      <div class="fields">
        <Choice wide label="L is" value={loss} set={(each) => go({ loss: each === usual ? "" : each })} options={options} />
        <Choice wide label="Attribution" value={chosen} set={(each) => go({ attribution: each === "gradient_attention" ? "" : each })} options={Object.entries(ATTRIBUTIONS).map(([each, { label: text }]) => [each, text])} />
      </div>
      {loss === "readout" && <Faulty problem={problem}><Area label="Readout" hint="a linear classifier of each query's output: weight [classes, width], bias, and the class of each query as targets (−1: not counted)" param="readout" rows={3} value={params.readout ?? ""} placeholder={READOUT} set={(readout) => go({ readout })} /></Faulty>}
      <ProblemBox problem={problem} />
      {!value && busy && <Waiting what={`Asking the server for the gradients of ${label}`} />}
      {!value && !problem && !busy && <p>This attention cannot be computed again: {fits ? "the recording holds no q, k and v." : `it has more than ${MOST_TOKENS.gradient} tokens.`}</p>}
      {value && attributed && (
        <div aria-busy={busy}>
          <FactList facts={[
            ...(products ? [["Σ w · ∂L/∂w of this head", precise(sum(products))] as const] : []),
            ["most important head", heads[importance.indexOf(Math.max(...importance))]],
            ...(gap === undefined ? [] : [["gap of completeness", precise(gap)] as const]),
          ]} />
          {value.about && <p class="small">{value.about}</p>}
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
