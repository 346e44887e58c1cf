/** Layers × heads as small multiples, with the statistics of every head. */

import { useRef } from "preact/hooks";
import { Tiles } from "../../numbers/cells";
import { follow, useLoaded, usePage } from "../../page/context";
import { Controls, useNarrow } from "../../parts/controls";
import { RANGES, usualRange } from "../../drawing/drawings";
import type { Range } from "../../drawing/drawings";
import { clip, precise, real } from "../../numbers/format";
import { joined, matrix, pooled, shownStatistics, spreadOf, statistics } from "../../numbers/matrix";
import type { Matrix, Spread, Statistics } from "../../numbers/matrix";
import type { Cell } from "../../drawing/painter";
import { IMPLICIT, MOST_HEAD_CELLS, headName, headTitle, subjectKey } from "../../subjects/subject";
import type { Subject, SubjectProps } from "../../subjects/subject";
import { Choice, Commands, Export, FactList, NumberTable, ProblemBox, RanTable, Table } from "../../parts/ui";
import { HeatMap, Legend } from "../../parts/heatmap";
import { LinkedHead } from "../../parts/linked_head";
import { Patches } from "../../parts/patches";
import { NOWHERE, usePointed, usePointing } from "../../drawing/pointed";
import { format, integer } from "../../page/state";
import { forwardOf } from "../../subjects/live";
import { Multiples, SmallMap, Thumbnail, gridScene } from "../../parts/small_maps";
import { TokenRow } from "../../parts/token_row";

interface Head {
  layer: number;
  head: number;
  name: string;
  /** Its weights, pooled where they are many. */
  of: Matrix;
  /** What its scale of colours is made of. */
  spread: Spread;
  statistics: Statistics;
}

const MOST_HEADS = 1024;
const MOST_SIDE = 192; // cells of a small multiple
const MOST_READ = 2 ** 24; // cells of all heads, pooled as the large map of each needs them

/** The heads of all layers, but for those with very many; or those of one such layer. */
async function read(subject: Subject, alone: number | null): Promise<Head[]> {
  const shown = subject.layers.map(({ wide }, layer) => (alone === null ? !wide : layer === alone));
  const places = subject.layers.flatMap(({ heads }, layer) => (shown[layer] ? heads.map((_, head) => [layer, head]) : [])).slice(0, MOST_HEADS);
  const served = Promise.all(subject.layers.map((_, layer) => (shown[layer] ? subject.statistics(layer) : Promise.resolve(null))));
  return Promise.all(places.map(async ([layer, head]): Promise<Head> => {
    const { queries, keys } = subject.layers[layer];
    const strips = subject.strips(layer, head);
    const large = Tiles.halvings(queries.length, keys.length);
    const cells = places.length * Math.ceil(queries.length / 2 ** large) * Math.ceil(keys.length / 2 ** large);
    const halvings = cells <= MOST_READ ? large : Math.max(1, Math.ceil(Math.log2(Math.max(queries.length, keys.length) / MOST_SIDE)));
    // Of very many weights the page shows the statistics alone.
    const few = queries.length * keys.length <= MOST_HEAD_CELLS;
    const [shown, counted] = await Promise.all([strips ? (few ? strips(2 ** halvings, 0, queries.length) : matrix(0, 0)) : subject.weights(layer, head), served]);
    const whole = strips ? matrix(0, 0) : shown;
    let of = shown;
    while (Math.max(of.rows, of.columns) > MOST_SIDE) of = pooled(of);
    const own = statistics(whole, subject.layers[layer], subject.counting);
    const numbers = counted[layer] ?? {};
    for (const each in own) own[each] = numbers[each]?.[head] ?? own[each];
    return { layer, head, name: headTitle(subject, layer, head), of, spread: spreadOf(shown), statistics: own };
  }));
}

const placeOf = ({ layer, head }: Head) => `${layer}/${head}`;

export function Overview({ subject, layer: chosenLayer }: SubjectProps) {
  const { params, go, theme, announce } = usePage();
  const pointing = usePointing();
  const pointedHead = usePointed(pointing, ({ head }) => head);
  const panel = useRef<HTMLElement>(null);
  const sort = params.sort ?? "place";
  const range = (params.range ?? usualRange(Math.max(...subject.layers.map(({ keys }) => keys.length)))) as Range;
  const narrow = useNarrow();
  const alone = subject.layers[chosenLayer].wide ? chosenLayer : null;
  const { value: heads, problem } = useLoaded(`${subjectKey(params)}/${alone}`, async () => {
    const made = await read(subject, alone);
    const { queries, keys } = subject.layers[0];
    announce(`Weights of ${made.length} heads, ${queries.length} queries by ${keys.length} keys.`);
    return { subject, alone, made };
  });
  if (problem) return <ProblemBox problem={problem} />;
  if (heads?.subject !== subject || heads.alone !== alone) return <p class="empty">Reading the weights…</p>;
  /** The spread that heads share: heads with a softmax, and heads whose weights have either sign. */
  const sharedBy = ({ signed }: Matrix) => joined(heads.made.filter(({ of }) => of.signed === signed).map(({ spread }) => spread));
  const legendOf = (of: Matrix) => (range === "shared" ? sharedBy(of) : undefined);
  const implicit = heads.made.find(({ of }) => of.signed)?.of;
  const plain = heads.made.find(({ of }) => !of.signed)?.of;
  const across = Math.max(...heads.made.map(({ layer }) => subject.layers[layer].heads.length));
  const several = new Set(heads.made.map(({ layer }) => layer)).size > 1;
  const others = subject.layers.filter(({ wide }, layer) => wide && layer !== alone).map(({ name }) => name);
  const counted = shownStatistics(subject.counting);
  const statistic = counted.find(([name]) => name === sort);
  /** A head whose queries look at nothing has no statistics: it comes last. */
  const rank = ({ statistics: own }: Head, name: string) => (Number.isFinite(own[name]) ? own[name] * (params.rising ? 1 : -1) : Infinity);
  const sorted = statistic ? [...heads.made].sort((a, b) => rank(a, statistic[0]) - rank(b, statistic[0]) || 0) : heads.made;
  const open = (head: Head) => ({ view: "head", layer: head.layer, head: head.head });
  const chosen = sorted.find(({ layer, head }) => layer === integer(params.layer, -1, -1) && head === integer(params.head, 0)) ?? sorted[0];
  const large = sorted.find((each) => placeOf(each) === pointedHead) ?? chosen;
  const point = (each: Head, cell = NOWHERE) => pointing.set({ ...cell, head: placeOf(each) });
  const choose = ({ layer, head }: Head) => {
    go({ layer, head }, "replace");
    if (narrow) panel.current?.scrollIntoView({ block: "nearest" }); // it is below the heads
  };
  const linked = (each: Head) => format({ view: "head", params: { ...params, layer: String(each.layer), head: String(each.head) } });
  const rows = () => [["layer", "head", ...counted.map(([name]) => name)], ...sorted.map((each) => [subject.layers[each.layer].name, each.name, ...counted.map(([name]) => each.statistics[name])])];
  return (
    <>
      <Controls summary={statistic ? `sorted by ${statistic[1]}` : "sort and colours"}>
        <Choice label="Sort by" value={sort} set={(value) => go({ sort: value === "place" ? "" : value })} options={[["place", "layer and head"], ...counted.map(([name, label]): [string, string] => [name, label])]} />
        {statistic && <Choice label="Order" value={params.rising ?? ""} set={(rising) => go({ rising })} options={[["", "largest first"], ["1", "smallest first"]]} />}
        <Choice label="Colour range" value={range} set={(value) => go({ range: value })} options={Object.entries(RANGES)} />
        {plain && <Legend range={range} spread={legendOf(plain)} chooses={heads.made.some(({ of }) => of.chosen)} />}
        {implicit && <Legend signed range={range === "shared" ? range : "own"} spread={legendOf(implicit)} />}
      </Controls>
      {large.of.rows > 0 && <TokenRow of={large.of} queries={subject.layers[large.layer].queries} keys={subject.layers[large.layer].keys} />}
      <div class="beside" style={{ "--heads": String(across) }}>
        <Multiples class={["multiples", several && !statistic ? "by-layer" : "", sorted.length <= 16 ? "few" : ""].join(" ")}>
        {sorted.map((each) => (
          <li key={`${each.layer}/${each.head}`}>
            <a href={linked(each)} aria-current={each === chosen ? "true" : undefined} onPointerEnter={(event) => event.pointerType === "mouse" && point(each)} onFocus={() => pointing.set(NOWHERE)}
              onClick={follow(() => choose(each))} aria-label={`Open ${each.name}${statistic ? `, ${statistic[1]} ${real(each.statistics[statistic[0]])}` : ""}`}>
              {each.of.rows > 0 && <SmallMap of={each.of} spread={each.spread} queries={subject.layers[each.layer].queries.length} keys={subject.layers[each.layer].keys.length} point={(cell) => point(each, cell)} range={range} shared={sharedBy(each.of)} />}
              <span aria-hidden="true">{clip(each.name, 18)}{statistic ? <b> {real(each.statistics[statistic[0]], 2)}</b> : null}</span>
            </a>
          </li>
        ))}
      </Multiples>
      <section ref={panel} aria-label="The chosen head" class="large">
        <h3>{large.name} <a href={linked(large)} onClick={follow(() => go(open(large)))}>Open</a></h3>
        <p class="small">{counted.slice(0, 4).map(([name, label]) => `${label} ${Math.abs(large.statistics[name]) < 0.005 ? precise(large.statistics[name], 2) : real(large.statistics[name], 2)}`).join(" · ")}</p>
        {large.of.rows > 0 && <LargeHead subject={subject} of={large} range={range} shared={sharedBy(large.of)} />}
      </section>
      </div>
      {others.length > 0 && <p class="small">{others.join(", ")}: each channel has its own weights. Choose such a layer above to see it.</p>}
      <FactList facts={subject.facts} />
      <Export of={{ name: "overview", scene: () => gridScene(sorted, across, range, sharedBy, theme, subject.title), rows, json: () => ({ heads: sorted.map(({ layer, name, statistics: own }) => ({ layer: subject.layers[layer].name, head: name, ...own })) }) }} />
      <h3>Statistics</h3>
      {implicit && <p class="small">{IMPLICIT} Their statistics are of the shares |w| / Σ|w|.</p>}
      <Table many caption={`Statistics of ${sorted.length} heads, means over the queries`} rows={sorted} columns={[
        { head: "head", header: true, cell: (each) => <a href={linked(each)} onClick={follow(() => go(open(each)))}>{each.name}</a> },
        ...counted.map(([name, label, title]) => ({ head: label, title, number: true, cell: (each: Head) => real(each.statistics[name]) })),
      ]} />
      <Output subject={subject} />
    </>
  );
}

/** A head beside the small ones; `tiles`: its cells, where they are too many to be read whole. */
interface LargeOne extends Head {
  tiles?: Tiles;
}

const MOST_LARGE = 2_000_000; // cells of a head that is read whole to stand beside the small ones
const RESTS_MS = 150; // that the pointer rests on a small head before its weights are asked for

/** A head beside the small ones: its weights are read where the small one has pooled cells, unless they are very many. */
function LargeHead({ subject, of, range, shared }: { subject: Subject; of: Head; range: Range; shared: Spread }) {
  const { params, go } = usePage();
  const { queries: rows, keys: columns } = subject.layers[of.layer];
  const coarse = of.of.rows !== rows.length || of.of.columns !== columns.length;
  const { value } = useLoaded(`${subjectKey(params)}/${placeOf(of)}`, async (signal): Promise<LargeOne> => {
    const strips = subject.strips(of.layer, of.head);
    const few = rows.length * columns.length <= MOST_LARGE;
    if (!coarse || !(few || strips)) return of;
    await new Promise((rested) => setTimeout(rested, RESTS_MS));
    if (signal.aborted) return of;
    if (few || !strips) return { ...of, of: await subject.weights(of.layer, of.head) };
    return { ...of, tiles: await Tiles.open(rows.length, columns.length, strips) };
  });
  const shown: LargeOne = coarse && value ? value : of; // until the next head is there, the one before with its own tokens and name
  const { layer, head, name } = shown;
  const { queries, keys, places } = subject.layers[layer];
  const title = name;
  const busy = coarse && (!value || placeOf(value) !== placeOf(of));
  const pick = ({ query, key }: Cell) => go({ view: "query", layer, head, query, key });
  if (shown.tiles) return <div aria-busy={busy}><HeatMap of={shown.tiles} queries={queries} keys={keys} title={title} range={range} shared={shared} pick={pick} /></div>;
  if (shown.of.rows !== queries.length || shown.of.columns !== keys.length) return <div aria-busy={busy}><Thumbnail of={shown.of} spread={shown.spread} range={range} shared={shared} /></div>;
  return (
    <div aria-busy={busy}>
      {subject.picture && places && <Patches of={shown.of} layer={subject.layers[layer]} picture={subject.picture} title={title} />}
      <LinkedHead of={shown.of} queries={queries} keys={keys} title={title} range={range} shared={shared} pick={pick} />
    </div>
  );
}

/** The output of a subject that the server computes, and how the requests ran. */
function Output({ subject }: { subject: Subject }) {
  const { params } = usePage();
  const { value } = useLoaded(subjectKey(params), async () => {
    const run = await subject.runOf(0);
    const request = await subject.requestFor(0, 0);
    const live = run && (await subject.live(0));
    if (!live) return { request, run, made: null, live: null };
    return { request, run, live, made: await forwardOf(live, { return: ["output"] }, integer(params.sequence, 0)) };
  });
  if (!value) return null;
  const { run, made, request } = value;
  const output = made?.taps.output;
  return (
    <>
      {output && output.length > 0 && <h3>Output</h3>}
      {output && Array.from({ length: made.heads }, (_, head) => {
        const rows = output.slice((head * output.length) / made.heads, (head * output.length) / made.heads + 64);
        const caption = `Output${made.heads > 1 ? ` of ${headName("", head)}` : ""}: ${output.length / made.heads} × ${rows[0].length}`;
        return <NumberTable key={head} caption={caption} labels={subject.layers[0].queries} width={rows[0].length} data={Float32Array.from(rows.flatMap((each) => Array.from(each)))} />;
      })}
      {run && made && <RanTable rans={{ weights: run.ran, forward: made.ran }} />}
      <Commands calls={[request, made?.request ?? null]} />
    </>
  );
}
