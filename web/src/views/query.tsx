/** One query step by step: its scores, the mask, the weights, and the weighted sum of the values. */

import { useCorrected, useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { barScene } from "../drawings";
import { precise, real } from "../format";
import { forwardOf, headOf } from "../live";
import type { Made } from "../live";
import { integer } from "../state";
import { row } from "../matrix";
import { headTitle, subjectKey } from "../subject";
import { Choice, Commands, Drawing, Export, NumberTable, ProblemBox, RanTable, Table } from "../ui";

const TAPS = ["q", "k", "v", "scores", "masked_scores", "weights", "context", "output"];
const FALLBACK = ["q", "k", "v", "scores", "weights", "context", "output"];

/** The rows of one head of a tap; key/value heads may be fewer than query heads. */
function tapRows(made: Made, tap: string, head: number, heads: number): Float32Array[] {
  const tensor = made.tensors[tap];
  const of = tensor.shape.length < 3 ? 0 : Math.floor((head * tensor.shape[0]) / heads);
  const { rows, columns, data } = headOf(tensor, of);
  return Array.from({ length: rows }, (_, i) => data.subarray(i * columns, (i + 1) * columns));
}

const norm = (of: Float32Array) => Math.hypot(...of);

export function Query({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const { name, heads, queries, keys } = subject.layers[layer];
  const query = integer(params.query, 0, 0, queries.length - 1);
  useCorrected({ query });
  const { value, problem } = useLoaded(`${subjectKey(params)}/${layer}/${head}/${query}`, async () => {
    const strips = subject.strips(layer, head);
    const ofQuery = strips ? await strips(1, query, query + 1) : await subject.weights(layer, head);
    const live = await subject.live(layer);
    const select = { heads: [head], queries: [query] };
    const sequence = integer(params.sequence, 0);
    const ask = (taps: string[]): Promise<Made> | null => (live ? forwardOf(live, { return: taps, ...(heads.length > 1 ? { select } : { select: { queries: [query] } }) }, sequence) : null);
    // Methods without scores have no steps.
    const made = await (ask(TAPS)?.catch(() => ask(FALLBACK)).catch(() => null) ?? null);
    return { weights: Float32Array.from(row(ofQuery, strips ? 0 : query)), made, asked: await subject.asked(layer, head), query };
  });
  if (problem) return <ProblemBox problem={problem} />;
  if (!value || value.query >= queries.length || value.weights.length !== keys.length) return <p class="empty">Reading the weights…</p>;
  const { weights, made, asked } = value;
  const scores = made?.tensors.scores ? Array.from(made.tensors.scores.data) : null;
  const masked = made?.tensors.masked_scores ? Array.from(made.tensors.masked_scores.data) : scores;
  const shown = made?.tensors.weights ? made.tensors.weights.data : weights;
  const values = made?.tensors.v ? tapRows(made, "v", 0, 1) : null;
  const context = made?.tensors.context ? made.tensors.context.data : null;
  const q = made?.tensors.q ? made.tensors.q.data : null;
  const output = made?.taps.output ? (made.heads > 1 ? made.taps.output[head * queries.length + query] : made.taps.output[query]) : null;
  const drift = made ? Math.max(...Array.from(shown, (each, j) => Math.abs(each - weights[j]))) : 0;
  const title = `${queries[query]} attends to`;
  const most = Math.max(...shown);
  const rows = keys.map((key, j) => ({ key, j }));
  const csv = () => [["key", "score", "masked score", "weight"], ...rows.map(({ key, j }) => [key, scores?.[j] ?? "", masked?.[j] ?? "", shown[j]])];
  return (
    <>
      <div class="fields">
        <Choice label="Query" value={String(query)} set={(each) => go({ query: each })} options={queries.map((each, i) => [String(i), `${i} ${each}`])} />
      </div>
      <Export of={{ name: `query-${query}`, scene: () => barScene({ theme, title, labels: keys, values: Array.from(shown) }), rows: csv, json: () => ({ layer: name, head, query: queries[query], keys, scores, weights: Array.from(shown), context: context && Array.from(context), output: output && Array.from(output) }) }} />
      <div class="side">
        <Drawing scene={barScene({ theme, title, labels: keys, values: Array.from(shown) })} fit />
        <div>
          {made ? (
            <ol class="steps">
              {q && <li><b>The query.</b> {queries[query]} has q of length {precise(norm(q))} in {q.length} dimensions.</li>}
              {scores && <li><b>Scores.</b> q · k of each key, times the scale: from {precise(Math.min(...scores))} to {precise(Math.max(...scores))}.</li>}
              {masked && <li><b>Mask.</b> {masked.filter((each) => each === -Infinity).length} of {keys.length} keys are hidden.</li>}
              <li><b>Weights.</b> The normalizer makes shares of the scores; they add up to {precise(shown.reduce((a, b) => a + b, 0))}. The largest is {precise(most)}, on {keys[shown.indexOf(most)]}.</li>
              {context && <li><b>Context.</b> Σ w · v, of length {precise(norm(context))}.</li>}
              {output && subject.layers.length === 1 && <li><b>Output.</b> {heads.length > 1 ? "The contexts of all heads, projected" : "The context"}: length {precise(norm(output))}.</li>}
            </ol>
          ) : <p class="small">This recording holds no q, k and v (or the method has no scores), so the steps before the weights cannot be shown.</p>}
          {drift > 1e-4 && <p class="small">Computed again from the recorded q, k and v. The recorded weights differ by at most {precise(drift, 2)}: they were stored with fewer digits.</p>}
        </div>
      </div>
      <Table caption={`${headTitle(subject, layer, head)}, query ${queries[query]}`} rows={rows} columns={[
        { head: "key", header: true, cell: ({ key }) => key },
        ...(scores ? [{ head: "score", number: true, cell: ({ j }: { j: number }) => real(scores[j]) }] : []),
        ...(masked ? [{ head: "masked score", number: true, cell: ({ j }: { j: number }) => real(masked[j]) }] : []),
        { head: "weight", number: true, cell: ({ j }) => real(shown[j], 5) },
        ...(values?.length === keys.length ? [{ head: "‖v‖", number: true, title: "length of the value", cell: ({ j }: { j: number }) => real(norm(values[j])) }, { head: "‖w·v‖", number: true, title: "length of the key's part of the context", cell: ({ j }: { j: number }) => real(shown[j] * norm(values[j]), 4) }] : []),
        { head: <span class="hidden">share of the largest</span>, cell: ({ j }) => <span class="share" style={{ width: `${(6 * shown[j]) / (most || 1)}rem` }} /> },
      ]} />
      {context && <NumberTable caption={`Context of head ${heads[head]}: Σ w · v`} labels={[queries[query]]} width={context.length} data={context} />}
      {output && <NumberTable caption="Output" labels={[queries[query]]} width={output.length} data={output} />}
      {made && <RanTable rans={{ forward: made.ran }} />}
      <Commands calls={[made?.asked ?? asked]} />
    </>
  );
}
