/** ∂L/∂weights, and gradient × attention. */

import { useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { barScene, endsOf, heatScene } from "../drawings";
import { precise } from "../format";
import { HeatMap } from "../heatmap";
import { forwardOf, gradientsOf, headOf } from "../live";
import { matrix } from "../matrix";
import type { Matrix } from "../matrix";
import { integer } from "../state";
import { subjectKey } from "../subject";
import type { Body, Tensor } from "../tensors";
import { Choice, Commands, Drawing, Export, FactList, ProblemBox, RanTable, Table } from "../ui";
import { matrixRows } from "./head";

const MOST_TOKENS = 512;

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

const times = (one: Matrix, other: Matrix) => matrix(one.rows, one.columns, one.data.map((value, i) => value * other.data[i]));

export function Gradient({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const { name, heads, queries, keys } = subject.layers[layer];
  const loss = params.loss ?? "sum";
  const fits = Math.max(queries.length, keys.length) <= MOST_TOKENS;
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${loss}`, async () => {
    const live = fits ? await subject.live(layer) : null;
    if (!live) return null;
    const sequence = integer(params.sequence, 0);
    const more: Body = { wrt: ["weights"], return: ["weights", "output"] };
    const whole = loss === "sum" ? null : await forwardOf(live, { return: ["output"] }, sequence);
    if (whole && subject.sequences === 1) more.upstream = upstream(whole.tensors.output, loss, queries.length);
    const made = await gradientsOf(live, more, sequence);
    const slopes = heads.map((_, i) => headOf(made.tensors["gradients.weights"], i));
    const weights = heads.map((_, i) => headOf(made.tensors.weights, i));
    const products = slopes.map((each, i) => times(each, weights[i]));
    return { made, slopes, products, importance: products.map(({ data }) => Math.abs(data.reduce((a, b) => a + b, 0))) };
  });
  const label = `${name}, ${heads[head]}`;
  const options: [string, string][] = [["sum", "the sum of the output"]];
  if (subject.sequences === 1) options.push(["square", "½ ‖output‖²"], ...queries.slice(0, 64).map((each, i): [string, string] => [`token:${i}`, `the sum of the output of ${i} ${each}`]));
  return (
    <>
      <div class="fields"><Choice wide label="L is" value={loss} set={(each) => go({ loss: each === "sum" ? "" : each })} options={options} /></div>
      <ProblemBox problem={problem} />
      {!value && !problem && !busy && <p>This attention cannot be computed again: {fits ? "the recording holds no q, k and v." : `it has more than ${MOST_TOKENS} tokens.`}</p>}
      {value && (
        <div aria-busy={busy}>
          <FactList facts={[["Σ w · ∂L/∂w of this head", precise(value.products[head].data.reduce((a, b) => a + b, 0))], ["most important head", heads[value.importance.indexOf(Math.max(...value.importance))]]]} />
          <Export of={{ name: "gradient", scene: () => heatScene(value.slopes[head], { theme, title: `∂L/∂weights of ${label}`, queries, keys, signed: true }), rows: () => matrixRows(value.slopes[head], queries, keys), json: () => ({ loss, layer: name, head, gradient: Array.from(value.slopes[head].data), importance: value.importance }) }} />
          <div class="side">
            <figure><figcaption>∂L/∂weights of {label}: {endsOf(value.slopes[head])}</figcaption><HeatMap of={value.slopes[head]} queries={queries} keys={keys} title={`∂L/∂weights of ${label}`} signed /></figure>
            <figure><figcaption>gradient × attention: {endsOf(value.products[head])}</figcaption><HeatMap of={value.products[head]} queries={queries} keys={keys} title={`gradient × attention of ${label}`} signed /></figure>
            {heads.length > 1 && <Drawing fit scene={barScene({ theme, title: "importance of each head: |Σ w · ∂L/∂w|", labels: heads, values: value.importance })} />}
          </div>
          {heads.length > 1 && <Table caption="Importance of the heads, |Σ w · ∂L/∂w| (after Michel et al. 2019)" rows={heads} columns={[{ head: "head", header: true, cell: (each) => each }, { head: "importance", number: true, cell: (_, i) => precise(value.importance[i]) }]} />}
          <RanTable rans={{ gradients: value.made.ran }} />
          <Commands calls={[value.made.asked]} />
        </div>
      )}
    </>
  );
}
