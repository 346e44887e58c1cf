/** Layers × heads as small multiples, with the statistics of every head. */

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import type { ComponentChildren, TargetedPointerEvent } from "preact";
import { INKS, SCALES, step } from "../colour";
import { follow, useLoaded, usePage } from "../context";
import type { SubjectProps } from "../context";
import { RANGES, endsOf, heatScene, legendShapes, ranged } from "../drawings";
import type { Range } from "../drawings";
import { clip, real } from "../format";
import { largest, matrix, pooled, statistics, statisticsOf } from "../matrix";
import type { Matrix, Statistics } from "../matrix";
import type { Scene } from "../scene";
import { MOST_HEAD_CELLS, headTitle, subjectKey } from "../subject";
import type { Subject } from "../subject";
import { Choice, Commands, Export, FactList, NumberTable, ProblemBox, RanTable, Table } from "../ui";
import { Legend } from "../heatmap";
import { LinkedHead } from "../linked_head";
import { Patches } from "../patches";
import { NOWHERE, usePointed, usePointing } from "../pointed";
import { format, integer } from "../state";
import { forwardOf } from "../live";
import { TokenRow } from "../token_row";

interface Head {
  layer: number;
  head: number;
  name: string;
  of: Matrix;
  statistics: Statistics;
}

const MOST_HEADS = 1024;
const MOST_SIDE = 192; // cells of a small multiple

async function read(subject: Subject): Promise<Head[]> {
  const places = subject.layers.flatMap(({ heads }, layer) => heads.map((_, head) => [layer, head])).slice(0, MOST_HEADS);
  const served = Promise.all(subject.layers.map((_, layer) => subject.statistics(layer)));
  return Promise.all(places.map(async ([layer, head]): Promise<Head> => {
    const { heads, queries, keys } = subject.layers[layer];
    const strips = subject.strips(layer, head);
    const halvings = Math.max(1, Math.ceil(Math.log2(Math.max(queries.length, keys.length) / MOST_SIDE)));
    // Of very many weights the page shows the statistics alone.
    const few = queries.length * keys.length <= MOST_HEAD_CELLS;
    const [shown, counted] = await Promise.all([strips ? (few ? strips(2 ** halvings, 0, queries.length) : matrix(0, 0)) : subject.weights(layer, head), served]);
    const whole = strips ? matrix(0, 0) : shown;
    let of = shown;
    while (Math.max(of.rows, of.columns) > MOST_SIDE) of = pooled(of);
    const own = statistics(whole, subject.layers[layer], subject.counting);
    const told = counted[layer] ?? {};
    for (const each in own) own[each] = told[each]?.[head] ?? own[each];
    return { layer, head, name: subject.layers.length > 1 ? heads[head] : headTitle(subject, layer, head), of, statistics: own };
  }));
}

const placeOf = ({ layer, head }: Head) => `${layer}/${head}`;
const plainName = (name: string, i: number) => name || `head ${i}`;

export function Overview({ subject }: SubjectProps) {
  const { params, go, theme, announce } = usePage();
  const pointing = usePointing();
  const pointedHead = usePointed(pointing, ({ head }) => head);
  const panel = useRef<HTMLElement>(null);
  const sort = params.sort ?? "place";
  const range = (params.range ?? "own") as Range;
  const { value: heads, problem } = useLoaded(subjectKey(params), async () => {
    const made = await read(subject);
    const { queries, keys } = subject.layers[0];
    announce(`Weights of ${made.length} heads, ${queries.length} queries by ${keys.length} keys.`);
    return { subject, made };
  });
  if (problem) return <ProblemBox problem={problem} />;
  if (heads?.subject !== subject) return <p class="empty">Reading the weights…</p>;
  const shared = heads.made.reduce((most, each) => Math.max(most, largest(each.of.data)), 0);
  const counted = statisticsOf(subject.counting);
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
    if (matchMedia("(max-width: 60rem)").matches) panel.current?.scrollIntoView({ block: "nearest" }); // it is below the heads
  };
  const linked = (each: Head) => format({ view: "head", params: { ...params, layer: String(each.layer), head: String(each.head) } });
  const rows = () => [["layer", "head", ...counted.map(([name]) => name)], ...sorted.map((each) => [subject.layers[each.layer].name, each.name, ...counted.map(([name]) => each.statistics[name])])];
  return (
    <>
      <div class="fields">
        <Choice label="Sort by" value={sort} set={(value) => go({ sort: value === "place" ? "" : value })} options={[["place", "layer and head"], ...counted.map(([name, label]): [string, string] => [name, label])]} />
        {statistic && <Choice label="Order" value={params.rising ?? ""} set={(rising) => go({ rising })} options={[["", "largest first"], ["1", "smallest first"]]} />}
        <Choice label="Colour range" value={range} set={(value) => go({ range: value })} options={Object.entries(RANGES)} />
        <Legend range={range} shared={shared} />
      </div>
      {large.of.rows > 0 && <TokenRow of={large.of} queries={subject.layers[large.layer].queries} keys={subject.layers[large.layer].keys} />}
      <div class="beside">
        <Multiples class={["multiples", subject.layers.length > 1 && !statistic ? "by-layer" : "", sorted.length <= 16 ? "few" : ""].join(" ")} heads={Math.max(...subject.layers.map((each) => each.heads.length))}>
        {sorted.map((each) => (
          <li key={`${each.layer}/${each.head}`}>
            <a href={linked(each)} aria-current={each === chosen ? "true" : undefined} onPointerEnter={(event) => event.pointerType === "mouse" && point(each)} onFocus={() => pointing.set(NOWHERE)}
              onClick={follow(() => choose(each))} aria-label={`Open ${plainName(each.name, each.head)}${statistic ? `, ${statistic[1]} ${real(each.statistics[statistic[0]])}` : ""}`}>
              {each.of.rows > 0 && <Map of={each.of} queries={subject.layers[each.layer].queries.length} keys={subject.layers[each.layer].keys.length} point={(cell) => point(each, cell)} range={range} shared={shared} />}
              <span aria-hidden="true">{clip(each.name, 18)}{statistic ? <b> {real(each.statistics[statistic[0]], 2)}</b> : null}</span>
            </a>
          </li>
        ))}
      </Multiples>
      <section ref={panel} aria-label="The chosen head" class="large">
        <h3>{plainName(large.name, large.head)} <a href={linked(large)} onClick={follow(() => go(open(large)))}>Open</a></h3>
        <p class="small">{counted.slice(0, 4).map(([name, label]) => `${label} ${real(large.statistics[name], 2)}`).join(" · ")}</p>
        {large.of.rows > 0 && <LargeHead subject={subject} of={large} range={range} shared={shared} />}
      </section>
      </div>
      <FactList facts={subject.facts} />
      <Export of={{ name: "overview", scene: () => gridScene(sorted, range, shared, theme, subject.title), rows, json: () => ({ heads: sorted.map(({ layer, name, statistics: own }) => ({ layer: subject.layers[layer].name, head: name, ...own })) }) }} />
      <h3>Statistics</h3>
      <Table caption={`Statistics of ${sorted.length} heads, means over the queries`} rows={sorted} columns={[
        { head: "head", header: true, cell: (each) => <a href={linked(each)} onClick={follow(() => go(open(each)))}>{plainName(each.name, each.head)}</a> },
        ...counted.map(([name, label, title]) => ({ head: label, title, number: true, cell: (each: Head) => real(each.statistics[name]) })),
      ]} />
      <Output subject={subject} />
    </>
  );
}

const MOST_LARGE = 2_000_000; // cells of a head that is read whole to stand beside the small ones
const RESTS_MS = 150; // that the pointer rests on a small head before its weights are asked for

/** A head beside the small ones: its weights are read where the small one has pooled cells, unless they are very many. */
function LargeHead({ subject, of, range, shared }: { subject: Subject; of: Head; range: Range; shared: number }) {
  const { params, go } = usePage();
  const { queries: rows, keys: columns } = subject.layers[of.layer];
  const coarse = of.of.rows !== rows.length || of.of.columns !== columns.length;
  const { value } = useLoaded(`${subjectKey(params)}/${placeOf(of)}`, async (signal) => {
    if (!coarse || rows.length * columns.length > MOST_LARGE) return of;
    await new Promise((rested) => setTimeout(rested, RESTS_MS));
    return signal.aborted ? of : { ...of, of: await subject.weights(of.layer, of.head) };
  });
  const shown = coarse && value ? value : of; // until the next head is there, the one before with its own tokens and name
  const { layer, head, name } = shown;
  const { queries, keys, places } = subject.layers[layer];
  const title = plainName(name, head);
  if (shown.of.rows !== queries.length || shown.of.columns !== keys.length) return <Thumbnail of={shown.of} range={range} shared={shared} />;
  return (
    <div aria-busy={placeOf(shown) !== placeOf(of)}>
      {subject.picture && places && <Patches of={shown.of} layer={subject.layers[layer]} picture={subject.picture} title={title} />}
      <LinkedHead of={shown.of} queries={queries} keys={keys} title={title} range={range} shared={shared} pick={({ query, key }) => go({ view: "query", layer, head, query, key })} />
    </div>
  );
}

/** The output of a subject that the server computes, and how the requests ran. */
function Output({ subject }: { subject: Subject }) {
  const { params } = usePage();
  const { value } = useLoaded(subjectKey(params), async () => {
    const told = await subject.told(0);
    const asked = await subject.asked(0, 0);
    const live = told && (await subject.live(0));
    if (!live) return { asked, told, made: null, live: null };
    return { asked, told, live, made: await forwardOf(live, { return: ["output"] }, integer(params.sequence, 0)) };
  });
  if (!value) return null;
  const { told, made, asked } = value;
  const output = made?.taps.output;
  return (
    <>
      {output && output.length > 0 && <h3>Output</h3>}
      {output && Array.from({ length: made.heads }, (_, head) => {
        const rows = output.slice((head * output.length) / made.heads, (head * output.length) / made.heads + 64);
        const caption = `Output${made.heads > 1 ? ` of head ${head}` : ""}: ${output.length / made.heads} × ${rows[0].length}`;
        return <NumberTable key={head} caption={caption} labels={subject.layers[0].queries} width={rows[0].length} data={Float32Array.from(rows.flatMap((each) => Array.from(each)))} />;
      })}
      {told && made && <RanTable rans={{ weights: told.ran, forward: made.ran }} />}
      <Commands calls={[asked, made?.asked ?? null]} />
    </>
  );
}

/** The list of small maps. Each marks the tokens that are pointed at, by the style of the list: nothing is drawn again. */
function Multiples({ class: kind, heads, children }: { class: string; heads: number; children: ComponentChildren }) {
  const list = useRef<HTMLUListElement>(null);
  const pointing = usePointing();
  useLayoutEffect(() => {
    const mark = () => {
      const { query, key } = pointing.now;
      const element = list.current;
      if (!element) return;
      element.dataset.pointed = query === null ? (key === null ? "" : "key") : key === null ? "query" : "pair";
      element.style.setProperty("--query", String(query ?? 0));
      element.style.setProperty("--key", String(key ?? 0));
    };
    mark();
    return pointing.heard(mark);
  }, [pointing]);
  return <ul ref={list} onPointerLeave={() => pointing.set(NOWHERE)} class={kind} style={{ "--heads": String(heads) }}>{children}</ul>;
}

interface MapProps {
  of: Matrix;
  queries: number;
  keys: number;
  point: (cell: { query: number; key: number }) => void;
  range: Range;
  shared: number;
}

/** A small map of a head, whose cells can be pointed at where none of them are pooled. */
function Map({ of, queries, keys, point, range, shared }: MapProps) {
  const move = ({ currentTarget, offsetX, offsetY, pointerType }: TargetedPointerEvent<HTMLDivElement>) => {
    if (pointerType !== "mouse" || of.rows !== queries || of.columns !== keys) return;
    const at = (offset: number, size: number, many: number) => Math.min(many - 1, Math.max(0, Math.floor((offset / size) * many)));
    point({ query: at(offsetY, currentTarget.clientHeight, queries), key: at(offsetX, currentTarget.clientWidth, keys) });
  };
  return <div class="map" style={{ "--queries": String(queries), "--keys": String(keys) }} onPointerMove={move}><Thumbnail of={of} range={range} shared={shared} /></div>;
}

function Thumbnail({ of, range, shared }: { of: Matrix; range: Range; shared: number }) {
  const { theme } = usePage();
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!canvas.current || !pen) return;
    canvas.current.width = of.columns;
    canvas.current.height = of.rows;
    const image = new ImageData(of.columns, of.rows);
    const words = new Uint32Array(image.data.buffer);
    const place = ranged(of, range, range === "shared" ? shared : largest(of.data), false);
    const { words: colours } = SCALES.weights[theme];
    for (let i = 0; i < of.rows; i += 1) for (let j = 0; j < of.columns; j += 1) words[i * of.columns + j] = colours[step(place(of.data[i * of.columns + j], i))];
    pen.putImageData(image, 0, 0);
  }, [of, range, shared, theme]);
  return <canvas ref={canvas} aria-hidden="true" />;
}

/** All heads as one drawing. */
function gridScene(heads: Head[], range: Range, shared: number, theme: "light" | "dark", title: string): Scene {
  const [side, across] = [96, Math.min(12, heads.length)];
  const scene: Scene = { width: across * (side + 10) + 14, height: 66 + Math.ceil(heads.length / across) * (side + 26), title, shapes: [{ kind: "text", x: 12, y: 20, text: clip(title, 90), size: 13, bold: true, fill: INKS[theme].ink }] };
  heads.forEach(({ of: whole, name }, i) => {
    if (!whole.rows) return;
    let of = whole;
    while (Math.max(of.rows, of.columns) > 32) of = pooled(of);
    const cells = heatScene(of, { theme, title: "", queries: [], keys: [], range, shared });
    const [x, y] = [12 + (i % across) * (side + 10), 34 + Math.floor(i / across) * (side + 26)];
    const size = side / Math.max(of.rows, of.columns);
    cells.shapes.filter((shape) => shape.kind === "rect").slice(0, of.data.length).forEach((shape, at) => scene.shapes.push({ kind: "rect", x: x + (at % of.columns) * size, y: y + Math.floor(at / of.columns) * size, w: size, h: size, fill: shape.fill ?? "none" }));
    scene.shapes.push({ kind: "text", x, y: y + side + 13, text: clip(name, 14), fill: INKS[theme].soft });
  });
  scene.shapes.push(...legendShapes(12, scene.height - 14, endsOf(undefined, range, shared, false), "rows queries, columns keys", theme));
  scene.width = Math.max(scene.width, 430);
  return scene;
}

