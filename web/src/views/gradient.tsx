/** ∂L/∂weights, and attributions to weights and heads. */

import { Problem } from "../api";
import { useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { barScene, endsOf, heatScene } from "../drawings";
import { precise } from "../format";
import { HeatMap } from "../heatmap";
import { attributionOf, forwardOf, gradientsOf, headOf } from "../live";
import type { Matrix } from "../matrix";
import { integer } from "../state";
import { parsed, subjectKey } from "../subject";
import type { Body, Tensor } from "../tensors";
import { Area, Choice, Commands, Drawing, Export, FactList, Faulty, ProblemBox, RanTable, Table } from "../ui";
import { matrixRows } from "./head";

const MOST_TOKENS = 512;
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
      <figcaption>{title}{signed ? `: ${endsOf(of)}` : ""}</figcaption>
      <HeatMap of={of} queries={queries} keys={keys} title={title} signed={signed} />
      <Export of={{ name, scene: () => heatScene(of, { theme, title, queries, keys, signed }), rows: () => matrixRows(of, queries, keys), json: () => ({ title, queries, keys, values: Array.from(of.data) }), facts }} />
    </figure>
  );
}

export function Gradient({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const { name, heads, queries, keys } = subject.layers[layer];
  const loss = params.loss ?? "sum";
  const fits = Math.max(queries.length, keys.length) <= MOST_TOKENS;
  const chosen = params.attribution && params.attribution in ATTRIBUTIONS ? params.attribution : "gradient_attention";
  const { label: kind, method = chosen, signed = false, together = false } = ATTRIBUTIONS[chosen];
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${loss}/${loss === "readout" ? (params.readout ?? "") : ""}/${method}`, async () => {
    const live = fits ? await subject.live(layer) : null;
    if (!live) return null;
    const sequence = integer(params.sequence, 0);
    const methods = [...new Set(["gradient_attention", "head_importance", method])];
    if (loss === "readout") return { gradients: null, attributed: await attributionOf(live, { methods, ...readoutOf(params.readout) }, sequence) };
    const more: Body = {};
    const whole = loss === "sum" ? null : await forwardOf(live, { return: ["output"] }, sequence);
    if (whole && subject.sequences === 1) more.upstream = upstream(whole.tensors.output, loss, queries.length);
    const [gradients, attributed] = await Promise.all([gradientsOf(live, { wrt: ["weights"], ...more }, sequence), attributionOf(live, { methods, ...more }, sequence)]);
    return { gradients, attributed };
  });
  const tensors: Partial<Record<string, Tensor>> = value?.attributed.tensors ?? {};
  const slopes = value?.gradients ? headOf(value.gradients.tensors["gradients.weights"], head) : null;
  const products = tensors.gradient_attention && headOf(tensors.gradient_attention, head);
  const attributed = tensors[chosen] && headOf(tensors[chosen], together ? 0 : head);
  const importance = Array.from(tensors.head_importance?.data ?? []);
  const gap = chosen === "integrated" ? tensors["completeness.gap"]?.data[0] : undefined;
  const label = `${name}, ${heads[head]}`;
  const options: [string, string][] = [["sum", "the sum of the output"]];
  if (subject.sequences === 1) options.push(["square", "½ ‖output‖²"], ["readout", "the log-likelihood of classes"], ...queries.slice(0, 64).map((each, i): [string, string] => [`token:${i}`, `the sum of the output of ${i} ${each}`]));
  const title = together ? `${kind}, ${name}` : `${kind} of ${label}`;
  const shared = { queries, keys, facts: { loss, layer: name, head, importance } };
  return (
    <>
      <div class="fields">
        <Choice wide label="L is" value={loss} set={(each) => go({ loss: each === "sum" ? "" : each })} options={options} />
        <Choice wide label="Attribution" value={chosen} set={(each) => go({ attribution: each === "gradient_attention" ? "" : each })} options={Object.entries(ATTRIBUTIONS).map(([each, { label: text }]) => [each, text])} />
      </div>
      {loss === "readout" && <Faulty problem={problem}><Area label="Readout" hint="a linear classifier of each query's output: weight [classes, width], bias, and the class of each query as targets (−1: not counted)" param="readout" rows={3} value={params.readout ?? ""} placeholder={READOUT} set={(readout) => go({ readout })} /></Faulty>}
      <ProblemBox problem={problem} />
      {!value && !problem && !busy && <p>This attention cannot be computed again: {fits ? "the recording holds no q, k and v." : `it has more than ${MOST_TOKENS} tokens.`}</p>}
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
          <RanTable rans={{ ...(value.gradients ? { gradients: value.gradients.ran } : {}), attribution: value.attributed.ran }} />
          <Commands calls={[value.gradients?.asked ?? null, value.attributed.asked]} />
        </div>
      )}
    </>
  );
}
