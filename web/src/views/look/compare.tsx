/** Two heads side by side, of one subject or of two, and their difference. */

import { useCorrected, useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { RANGES, heatScene, usualRange } from "../../drawing/drawings";
import type { Range } from "../../drawing/drawings";
import { clip, precise, real } from "../../numbers/format";
import { whole } from "../../numbers/cells";
import { HeatMap } from "../../parts/heatmap";
import { joined, matrixRows, statistics, statisticsOf } from "../../numbers/matrix";
import { pairOf } from "../../numbers/pair";
import type { Pair } from "../../numbers/pair";
import { integer } from "../../page/state";
import { headTitle, subjectKey } from "../../subjects/subject";
import type { Subject, SubjectProps } from "../../subjects/subject";
import { Choice, Commands, Export, FactList, Field, ProblemBox, Table, Waiting } from "../../parts/ui";
import { openBeside, useSources } from "../../parts/with_subject";
import { AdapterChanges } from "./adapter_changes";
import { SimilarHeads } from "./similar_heads";

/** The statistics of a head: the server's, where it computes those of long texts, else the page's own. */
async function statisticsAt(subject: Subject, layer: number, head: number): Promise<Record<string, number>> {
  const served = await subject.statistics(layer);
  const own = served ? {} : statistics(await subject.weights(layer, head), subject.layers[layer], subject.counting);
  return { ...own, ...Object.fromEntries(Object.entries(served ?? {}).map(([name, heads]) => [name, heads?.[head] ?? NaN])) };
}

/** What a subject is called beside another: by its sentence alone, if both are of one model. */
const nameOf = ({ whole, title }: Subject, source: string) => (whole && !source ? `“${clip(whole.text, 90)}”` : clip(title, 90));

/** The value of the choice of the subject itself, where that is not the first. */
const SAME = "same";
const SAME_ATTENTION = "the same attention";

export function Compare({ subject, layer, head }: SubjectProps) {
  const { params, go, models } = usePage();
  const sources = useSources();
  const model = models?.find(({ id }) => params.source === `model:${id}`);
  const base = model?.base ? `model:${model.base}` : "";
  const chosen = params.b_source ?? "";
  const source = chosen === SAME ? "" : chosen || base; // an adapter is compared with its base first
  const text = params.b_text ?? "";
  const beside = { ...params, ...(source ? { source } : {}), ...(text ? { text, messages: "" } : {}) };
  const reads = (source || (params.source ?? "")).startsWith("model:");
  const otherKey = subjectKey(beside);
  const second = useLoaded(otherKey, async () => ({ key: otherKey, subject: await openBeside(beside) }));
  const other = second.value?.key === otherKey ? second.value.subject : null; // not the one before
  const otherLayer = integer(params.b_layer, layer, 0, other ? other.layers.length - 1 : layer);
  const heads = other?.layers[otherLayer].heads ?? [];
  const otherHead = integer(params.b_head, source || text ? head : head + 1 < heads.length ? head + 1 : 0, 0, Math.max(0, heads.length - 1));
  useCorrected(other ? { b_layer: otherLayer, b_head: otherHead } : {});
  const { queries, keys } = subject.layers[layer];
  const place = `${subjectKey(params)}/${layer}/${head}/${subjectKey(beside)}/${otherLayer}/${otherHead}/${other ? 1 : 0}`;
  const { value, problem } = useLoaded(place, async () => {
    if (!other) return null;
    const [one, two] = await Promise.all([subject.weights(layer, head), other.weights(otherLayer, otherHead)]);
    const alike = one.rows === two.rows && one.columns === two.columns;
    const pair = alike ? pairOf(one, two) : null;
    const drawn = pair ?? { one: whole(one), other: whole(two) };
    return {
      place,
      one: drawn.one,
      two: drawn.other,
      of: other.layers[otherLayer],
      shared: joined([drawn.one.spread, drawn.other.spread]),
      pair,
      calls: [await subject.requestFor(layer, head), await other.requestFor(otherLayer, otherHead)],
    };
  });
  const summaries = useLoaded(place, async () => (other ? { place, both: await Promise.all([statisticsAt(subject, layer, head), statisticsAt(other, otherLayer, otherHead)]) } : null));
  const range = (params.range ?? (usualRange(queries.length) === "log" ? "log" : "shared")) as Range;
  const label = headTitle(subject, layer, head);
  const here = value?.place === place ? value : null; // tokens and weights of one and the same pair
  const otherLabel = other ? headTitle(other, otherLayer, otherHead) : "";
  const [title, otherTitle] = source || text ? [`${label}: ${nameOf(subject, source)}`, other ? `${otherLabel}: ${nameOf(other, source)}` : ""] : [label, otherLabel];
  const merged = (mine: string[], theirs: string[]) => mine.map((each, i) => (theirs[i] === each ? each : `${each} / ${theirs[i]}`));
  const both: [string[], string[]] = here?.pair ? [merged(queries, here.of.queries), merged(keys, here.of.keys)] : [queries, keys];
  return (
    <>
      <div role="group" aria-label="Compared with"><Controls summary={`with ${otherLabel || "another head"}`}>
        <Choice wide label="Compare with" value={chosen} set={(each) => go({ b_source: each, b_text: "", b_layer: "", b_head: "" })} options={[...(base ? [["", `its base: ${model?.base}`], [SAME, SAME_ATTENTION]] as const : [["", SAME_ATTENTION]] as const), ...sources.map(([each, name, group]): [string, string, string] => [each, clip(name, 80), group])]} />
        {reads && <Field wide label="Its sentence" hint="empty: the same" value={text} set={(each) => go({ b_text: each.trim(), b_layer: "", b_head: "" })} />}
        {other && other.layers.length > 1 && <Choice label="Its layer" value={String(otherLayer)} set={(each) => go({ b_layer: each })} options={other.layers.map((each, i) => [String(i), each.name])} />}
        {heads.length > 1 && <Choice label="Its head" value={String(otherHead)} set={(each) => go({ b_head: each })} options={heads.map((each, i) => [String(i), each])} />}
        <Choice label="Colour range" value={range} set={(each) => go({ range: each })} options={Object.entries(RANGES)} />
      </Controls></div>
      {model && base && source === base && !text && <AdapterChanges subject={subject} model={model} />}
      <ProblemBox problem={second.problem ?? problem} />
      {!here && !problem && !second.problem && <Waiting what="Reading the weights of both heads" />}
      {here && (
        <>
          {here.pair
            ? <FactList facts={[["Jensen-Shannon divergence, nats", real(here.pair.divergence.mean, 4)], ["largest difference", precise(here.pair.less.most)]]} />
            : <p class="small">The texts have {queries.length} and {here.of.queries.length} tokens, so their weights cannot be compared cell by cell.</p>}
          {here.pair && <Difference of={here.pair} title={`${label} less ${otherLabel}`} one={title} other={otherTitle} queries={both[0]} keys={both[1]} />}
          <div class="side">
            <figure><figcaption>{title}</figcaption><HeatMap of={here.one} queries={queries} keys={keys} title={label} range={range} shared={here.shared} alone={!here.pair} /></figure>
            <figure><figcaption>{otherTitle}</figcaption><HeatMap of={here.two} queries={here.of.queries} keys={here.of.keys} title={otherLabel} range={range} shared={here.shared} alone={!here.pair} /></figure>
            {here.pair && <figure><figcaption>the first less the second</figcaption><HeatMap of={here.pair.less} queries={both[0]} keys={both[1]} title="the difference" signed /></figure>}
          </div>
          {summaries.value?.place === place ? (
            <Table caption="Statistics of both" rows={statisticsOf(subject.counting)} columns={[
              { head: "statistic", header: true, cell: ([, name]) => name },
              ...[label, otherLabel].map((name, i) => ({ head: i && other && name === label ? (source ? clip(other.title, 40) : "the other sentence") : name, number: true, cell: ([each]: [string, string, string]) => real(summaries.value?.both[i][each]) })),
            ]} />
          ) : summaries.problem ? <ProblemBox problem={summaries.problem} /> : <Waiting what="Reading the statistics of both heads" />}
          <Commands calls={here.calls} />
          {other && here.pair && <SimilarHeads one={subject} other={other} layer={layer} otherLayer={otherLayer} beside={beside} />}
        </>
      )}
    </>
  );
}

interface DifferenceProps {
  of: Pair;
  title: string;
  one: string;
  other: string;
  queries: string[];
  keys: string[];
}

/** The difference as a file: all of its numbers, or of very many the picture alone. */
function Difference({ of: { shown, pool, divergence }, title, one, other, queries, keys }: DifferenceProps) {
  const { theme } = usePage();
  const numbers = { rows: () => matrixRows(shown, queries, keys), json: () => ({ one, other, queries, keys, divergence: Array.from(divergence.rows), difference: Array.from(shown.data) }) };
  return <Export of={{ name: "difference", label: "the difference", scene: () => heatScene(shown, { theme, title, queries, keys, signed: true, pool }), ...(pool === 1 ? numbers : {}) }} />;
}
