/** The similarity of every head with every other: heads × heads, by the divergence of their weights. */

import { callTensors } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { HeatMap } from "../../parts/heatmap";
import { allWeights } from "../../subjects/live";
import { matrix, matrixRows } from "../../numbers/matrix";
import { IMPLICIT, subjectKey } from "../../subjects/subject";
import { MOST_CELLS } from "../../page/limits";
import type { Subject } from "../../subjects/subject";
import { Check, Commands, Export, ProblemBox } from "../../parts/ui";
import type { Params } from "../../page/state";

/** A subject, the parameters it was opened by, and the layers whose heads are compared. */
interface Side {
  subject: Subject;
  params: Params;
  layers: number[];
}

const placesOf = ({ subject, layers }: Side) => layers.flatMap((layer) => subject.layers[layer].heads.map((name, head) => ({ layer, head, name })));
const namesOf = ({ subject, layers }: Side) => layers.map((layer) => subject.layers[layer].name);

/** The request: it names the recordings if the server has both, else it sends the weights. */
async function request(one: Side, other: Side): Promise<ApiRequest> {
  const [here, there] = [one.subject.recording, other.subject.recording];
  if (here && there) return { method: "POST", path: `${here}/similarity`, body: { layers: namesOf(one), with: there.split("/").at(-1), with_layers: namesOf(other) } };
  const [a, b] = await Promise.all([allWeights(one.subject, one.layers), allWeights(other.subject, other.layers)]);
  return { method: "POST", path: "v1/attention/similarity", body: { a, b } };
}

interface SimilarHeadsProps {
  one: Subject;
  other: Subject;
  layer: number;
  otherLayer: number;
  beside: Params;
}

export function SimilarHeads({ one, other, layer, otherLayer, beside }: SimilarHeadsProps) {
  const { params, go, theme } = usePage();
  const all = Boolean(params.pairs);
  const { queries, keys } = one.layers[layer];
  /** All layers with the same queries and keys, or one layer; of those with a softmax. */
  const layersOf = ({ layers }: Subject, at: number) => (all ? layers.flatMap((each, i) => (each.queries.length === queries.length && each.keys.length === keys.length ? [i] : [])) : [at]).filter((i) => !layers[i].implicit);
  const sides: [Side, Side] = [{ subject: one, params, layers: layersOf(one, layer) }, { subject: other, params: beside, layers: layersOf(other, otherLayer) }];
  const [rows, columns] = sides.map(placesOf);
  const sent = one.recording && other.recording ? 0 : (rows.length + columns.length) * queries.length * keys.length;
  const { value, problem, busy } = useLoaded(sides.map((side) => `${subjectKey(side.params)}/${side.layers.join()}`).join("/"), async () => {
    if (sent > MOST_CELLS || !rows.length || !columns.length) return null;
    const comparison = await request(...sides);
    const { tensors: { values } } = await callTensors(comparison.path, comparison.body ?? {});
    return { of: matrix(values.shape[0], values.shape[1], values.data), request: comparison };
  });
  if (!rows.length || !columns.length) return <p class="small">The similarity of heads compares their shares of attention. {IMPLICIT}</p>;
  if (rows.length < 2 && columns.length < 2) return null;
  const title = "Jensen-Shannon divergence of the heads, nats";
  const names = [rows, columns].map((places) => places.map(({ name }) => name));
  const shown = value && value.of.rows === rows.length && value.of.columns === columns.length ? value : null;
  return (
    <section aria-busy={busy}>
      <h3>Similarity of the heads</h3>
      {one.layers.length > 1 && <Check label="Heads of all layers" value={all} set={(each) => go({ pairs: each ? "all" : "" })} />}
      <ProblemBox problem={problem} />
      {sent > MOST_CELLS && <p class="small">These are too many weights to send. Store both recordings first, and the server compares them.</p>}
      {shown && (
        <>
          <p class="small">The mean over the queries of the Jensen-Shannon divergence of two heads' weights: 0 for equal weights, at most ln 2. Click a cell (or press Enter on it) to compare its heads.</p>
          <Export of={{ name: "similarity", label: "similarity of the heads", scene: () => heatScene(shown.of, { theme, title, queries: names[0], keys: names[1], axes: ["heads", "other heads"] }), rows: () => [["head", ...names[1]], ...matrixRows(shown.of, names[0], names[1]).slice(1)], json: () => ({ measure: "jensen_shannon", rows, columns, values: rows.map((_, i) => Array.from(shown.of.data.subarray(i * columns.length, (i + 1) * columns.length))) }) }} />
          <HeatMap of={shown.of} queries={names[0]} keys={names[1]} title={title} axes={["heads", "other heads"]}
            pick={({ query, key }) => go({ layer: rows[query].layer, head: rows[query].head, b_layer: columns[key].layer, b_head: columns[key].head })} />
          <Commands calls={[shown.request]} />
        </>
      )}
    </section>
  );
}
