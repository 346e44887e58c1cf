/** An adapter beside its base: the change of each head of all layers, and of the prediction. */

import { call, callTensors } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { precise, real } from "../../numbers/format";
import { divergence, matrix, matrixRows } from "../../numbers/matrix";
import { shownToken } from "../../subjects/model_subject";
import { headName, subjectKey } from "../../subjects/subject";
import { MOST_CELLS } from "../../page/limits";
import type { Subject } from "../../subjects/subject";
import type { Tensor } from "../../server/tensors";
import type { ModelInfo, Predictions } from "../../server/types";
import { HeatMap } from "../../parts/heatmap";
import { Commands, Export, FactList, ProblemBox, Table, Waiting } from "../../parts/ui";

const LIKELIEST = 5; // tokens of each of the two
const TITLE = "Jensen-Shannon divergence of each head from the base's, nats";
const AXES: [string, string] = ["layers", "heads"];

/** The mean over queries of the divergence of each head; heads lie one after the other in tensors `[H, Lq, Lk]`. */
function divergences(one: Tensor, other: Tensor): number[] {
  const [rows, columns] = one.shape.slice(-2);
  const head = ({ data }: Tensor, at: number) => matrix(rows, columns, data.subarray(at * rows * columns, (at + 1) * rows * columns));
  return Array.from({ length: one.data.length / (rows * columns) }, (_, at) => divergence(head(one, at), head(other, at)).mean);
}

export function AdapterChanges({ subject, model }: { subject: Subject; model: ModelInfo }) {
  const { params, go, theme } = usePage();
  const { layers, whole } = subject;
  const few = 3 * layers.reduce((sum, { heads, queries, keys }) => sum + heads.length * queries.length * keys.length, 0) <= MOST_CELLS;
  const { value, problem } = useLoaded(subjectKey(params), async (signal) => {
    const asks = (question: string, more: object): ApiRequest & { body: Record<string, unknown> } =>
      ({ method: "POST", path: `v1/models/${encodeURIComponent(model.id)}/${question}`, body: { ...whole?.input, compare: "base", ...more } });
    const [weights, forward] = [asks("weights", { statistics: [] }), asks("forward", { top_k: LIKELIEST })];
    const [seen, predicted] = await Promise.all([
      few ? callTensors(weights.path, weights.body, signal) : null,
      model.predicts ? call<Predictions>("POST", forward.path, forward.body, signal) : null,
    ]);
    const of = matrix(layers.length, Math.max(...layers.map(({ heads }) => heads.length)));
    if (seen) layers.forEach((_, i) => of.data.set(divergences(seen.tensors[`layers.${i}.weights`], seen.tensors[`layers.${i}.base.weights`]), i * of.columns));
    return { subject, of, predicted, calls: [seen && weights, predicted && forward] };
  });
  if (problem) return <ProblemBox problem={problem} />;
  if (value?.subject !== subject) return <Waiting what={`Asking the server for the changes from ${model.base}`} />;
  const { of, predicted, calls } = value;
  const rows = layers.map(({ ref, name }) => (ref !== undefined && /^\d+$/.test(ref) ? `L${ref}` : name));
  const columns = Array.from({ length: of.columns }, (_, i) => headName("", i));
  const best = of.data.indexOf(Math.max(...of.data));
  const prediction = predicted?.predictions.at(-1);
  const shown = (token: string) => (predicted?.predicts === "class" ? token : shownToken(token));
  return (
    <section aria-label="Changes by the adapter">
      <h3>Changes by the adapter {model.adapter}</h3>
      <FactList facts={[
        ...(few ? [["changed most", layers[Math.floor(best / of.columns)].heads[best % of.columns]] as const] : []),
        ...(prediction?.divergence == null ? [] : [["divergence of the prediction, nats", real(prediction.divergence)] as const]),
      ]} />
      <div class="side">
        {few && (
          <figure>
            <figcaption>{TITLE}</figcaption>
            <HeatMap of={of} queries={rows} keys={columns} title={TITLE} axes={AXES} pick={({ query, key }) => go({ layer: query, head: key, b_layer: "", b_head: "" })} />
            <p class="small">0 for equal weights, at most ln 2. Click a cell (or press Enter on it) to see the head beside the base's.</p>
            <Export of={{ name: "adapter", label: "changes by the adapter", scene: () => heatScene(of, { theme, title: TITLE, queries: rows, keys: columns, axes: AXES }), rows: () => [["layer", ...columns], ...matrixRows(of, rows, columns).slice(1)], json: () => ({ base: model.base, adapter: model.adapter, layers: rows, heads: columns, divergence: layers.map((_, i) => Array.from(of.data.subarray(i * of.columns, (i + 1) * of.columns))) }) }} />
          </figure>
        )}
        {prediction && (
          <Table caption={`Likeliest ${predicted?.predicts === "class" ? "classes" : "tokens"} of both`} rows={prediction.top} columns={[
            { head: predicted?.predicts === "class" ? "class" : "token", header: true, cell: ({ token }) => shown(token) },
            { head: model.base, number: true, cell: (each) => precise(each.base_probability ?? NaN, 3) },
            { head: model.adapter, number: true, cell: (each) => precise(each.probability, 3) },
          ]} />
        )}
      </div>
      {!few && <p class="small">The weights of all heads of both are too many for one reply: choose a head.</p>}
      <Commands calls={calls} />
      <h3>One head of both</h3>
    </section>
  );
}
