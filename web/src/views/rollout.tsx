/** Attention rollout over the layers of a recording. */

import { useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { barScene, heatScene } from "../drawings";
import { HeatMap } from "../heatmap";
import { rollout, row } from "../matrix";
import { integer } from "../state";
import { subjectKey } from "../subject";
import { Choice, Drawing, Export, FactList } from "../ui";
import { matrixRows } from "./head";

const MOST_TOKENS = 1024;

export function Rollout({ subject }: SubjectProps) {
  const { params, go, theme } = usePage();
  const first = subject.layers[0];
  const [stack] = first.name.split(".");
  const usable = subject.layers.map((each, i) => ({ each, i })).filter(({ each }) => each.name.split(".")[0] === stack && !each.name.endsWith(".cross") && each.queries.length === each.keys.length && each.queries.length === first.queries.length);
  const upto = integer(params.upto, usable.length, 1, usable.length);
  const fits = first.queries.length <= MOST_TOKENS && usable.length > 0;
  const { value } = useLoaded(`${subjectKey(params)}/${upto}`, async () => {
    if (!fits) return null;
    const layers = await Promise.all(usable.slice(0, upto).map(({ each, i }) => Promise.all(each.heads.map((_, head) => subject.weights(i, head)))));
    return rollout(layers);
  });
  const query = integer(params.query, 0, 0, first.queries.length - 1);
  const { queries } = first;
  if (!fits) return <p>Rollout needs self-attention of at most {MOST_TOKENS} tokens.</p>;
  const title = `rollout over ${upto} of ${usable.length} layers`;
  return (
    <>
      <div class="fields">
        <Choice label="Layers" value={String(upto)} set={(each) => go({ upto: each })} options={usable.map((_, i) => [String(i + 1), `the first ${i + 1}`])} />
        <Choice label="Query" value={String(query)} set={(each) => go({ query: each })} options={queries.map((each, i) => [String(i), `${i} ${each}`])} />
      </div>
      <p class="small">The product over the layers of ½A + ½I, where A is the mean of the heads (Abnar &amp; Zuidema 2020). A row tells from which tokens a query's state comes, if every layer mixes as its attention says.</p>
      {value?.rows === queries.length && (
        <>
          <FactList facts={[["layers", String(upto)], ["heads averaged", String(first.heads.length)]]} />
          <Export of={{ name: "rollout", scene: () => heatScene(value, { theme, title, queries, keys: queries }), rows: () => matrixRows(value, queries, queries), json: () => ({ layers: upto, tokens: queries, rollout: queries.map((_, i) => Array.from(row(value, i))) }) }} />
          <div class="side">
            <HeatMap of={value} queries={queries} keys={queries} title={title} pick={(cell) => go({ query: cell.query })} />
            <Drawing fit scene={barScene({ theme, title: `${queries[query]} comes from`, labels: queries.slice(0, 60), values: Array.from(row(value, query)).slice(0, 60) })} />
          </div>
        </>
      )}
    </>
  );
}
