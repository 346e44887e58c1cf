/** Two heads side by side, of one subject or of two, and their difference. */

import { useCorrected, useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { endsOf, heatScene } from "../drawings";
import { clip, precise, real } from "../format";
import { HeatMap } from "../heatmap";
import { difference, divergence, largest, statistics, statisticsOf } from "../matrix";
import { integer } from "../state";
import { subjectKey } from "../subject";
import { Choice, Commands, Export, FactList, ProblemBox, Table } from "../ui";
import { openBeside, useSources } from "../with_subject";
import { matrixRows } from "./head";
import { SimilarHeads } from "./similar_heads";

export function Compare({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const sources = useSources();
  const source = params.b_source ?? "";
  const beside = { ...params, ...(source ? { source } : {}) };
  const second = useLoaded(subjectKey(beside), () => openBeside(beside));
  const other = second.value;
  const otherLayer = integer(params.b_layer, layer, 0, other ? other.layers.length - 1 : layer);
  const heads = other?.layers[otherLayer].heads ?? [];
  const otherHead = integer(params.b_head, source ? head : head + 1 < heads.length ? head + 1 : 0, 0, Math.max(0, heads.length - 1));
  useCorrected(other ? { b_layer: otherLayer, b_head: otherHead } : {});
  const { queries, keys, name } = subject.layers[layer];
  const { value, problem } = useLoaded(`${subjectKey(params)}/${layer}/${head}/${subjectKey(beside)}/${otherLayer}/${otherHead}/${other ? 1 : 0}`, async () => {
    if (!other) return null;
    const [one, two] = await Promise.all([subject.weights(layer, head), other.weights(otherLayer, otherHead)]);
    return {
      one,
      two,
      less: difference(one, two),
      apart: divergence(one, two),
      calls: [await subject.asked(layer, head), await other.asked(otherLayer, otherHead)],
    };
  });
  const label = `${name}, ${subject.layers[layer].heads[head]}`;
  const otherLabel = other ? `${source ? `${clip(other.title, 24)}: ` : ""}${other.layers[otherLayer].name}, ${heads[otherHead]}` : "";
  return (
    <>
      <div class="fields" role="group" aria-label="Compared with">
        <Choice wide label="Compare with" value={source} set={(each) => go({ b_source: each, b_layer: "", b_head: "" })} options={[["", "the same attention"], ...sources.map(([each, text]): [string, string] => [each, clip(text, 60)])]} />
        {other && other.layers.length > 1 && <Choice label="Its layer" value={String(otherLayer)} set={(each) => go({ b_layer: each })} options={other.layers.map((each, i) => [String(i), each.name])} />}
        {heads.length > 1 && <Choice label="Its head" value={String(otherHead)} set={(each) => go({ b_head: each })} options={heads.map((each, i) => [String(i), each])} />}
      </div>
      <ProblemBox problem={second.problem ?? problem} />
      {value && (
        <>
          <FactList facts={[["Jensen-Shannon divergence, nats", real(value.apart.mean, 4)], ["largest difference", precise(largest(value.less.data))]]} />
          <Export of={{ name: "difference", label: "the difference", scene: () => heatScene(value.less, { theme, title: `${label} less ${otherLabel}`, queries, keys, signed: true }), rows: () => matrixRows(value.less, queries, keys), json: () => ({ one: label, other: otherLabel, queries, keys, divergence: Array.from(value.apart.rows), difference: Array.from(value.less.data) }) }} />
          <div class="side">
            <figure><figcaption>{label}</figcaption><HeatMap of={value.one} queries={queries} keys={keys} title={label} /></figure>
            <figure><figcaption>{otherLabel}</figcaption><HeatMap of={value.two} queries={queries} keys={keys} title={otherLabel} /></figure>
            <figure><figcaption>the first less the second: {endsOf(value.less)}</figcaption><HeatMap of={value.less} queries={queries} keys={keys} title="the difference" signed /></figure>
          </div>
          <Table caption="Statistics of both" rows={statisticsOf(subject.counting)} columns={[
            { head: "statistic", header: true, cell: ([, text]) => text },
            { head: label, number: true, cell: ([each]) => real(statistics(value.one, subject.layers[layer], subject.counting)[each]) },
            { head: otherLabel, number: true, cell: ([each]) => real(statistics(value.two, other?.layers[otherLayer], subject.counting)[each]) },
          ]} />
          <Commands calls={value.calls} />
          {other && <SimilarHeads one={subject} other={other} layer={layer} otherLayer={otherLayer} beside={beside} />}
        </>
      )}
    </>
  );
}
