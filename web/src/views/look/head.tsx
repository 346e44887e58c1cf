/** One head: its heat map with marginals, or its token lines. */

import { Tiles } from "../../numbers/cells";
import { useCorrected, useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { RANGES, heatScene, usualRange } from "../../drawing/drawings";
import type { Range } from "../../drawing/drawings";
import { real } from "../../numbers/format";
import { HeatMap } from "../../parts/heatmap";
import { marginals, matrix, matrixRows, row, statistics, shownStatistics } from "../../numbers/matrix";
import type { Zoom } from "../../drawing/painter";
import { useNowhere } from "../../drawing/pointed";
import { decimal, integer } from "../../page/state";
import { IMPLICIT, headTitle, subjectKey } from "../../subjects/subject";
import type { SubjectProps } from "../../subjects/subject";
import { Pictured } from "../../parts/pictured";
import { TokenRow } from "../../parts/token_row";
import { Choice, Commands, Export, FactList, Field, ProblemBox } from "../../parts/ui";
import { HeadLines } from "./head_lines";

const MOST_LINES = 128; // tokens of the view with lines
const MOST_LABELLED = 20; // tokens of a map that needs less than its half of a wide screen
const MOST_SAVED = 2_000_000; // cells of a table

const zoomOf = (text: string | undefined): Zoom | null => {
  const [k, x, y] = (text ?? "").split(",").map(Number);
  return text && [k, x, y].every(Number.isFinite) ? { k, x, y } : null;
};
/** The token of an address, if it names one; `many`: those that are there. */
const tokenOf = (text: string | undefined, many: number): number | null => (text ? integer(text, 0, 0, many - 1) : null);

export function Head({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const attention = subject.layers[layer];
  const only = tokenOf(params.query, attention.queries.length);
  const key = tokenOf(params.key, attention.keys.length);
  useCorrected({ query: only ?? 0, key: key ?? 0 });
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${head}`, async () => {
    const read = subject.strips(layer, head);
    const of = read ? await Tiles.open(attention.queries.length, attention.keys.length, read) : await subject.weights(layer, head);
    const coarsest = of instanceof Tiles ? of.coarsest : of;
    const own = statistics(of instanceof Tiles ? matrix(0, 0) : of, subject.layers[layer], subject.counting);
    const served = (await subject.statistics(layer)) ?? {};
    for (const each in own) own[each] = served[each]?.[head] ?? own[each];
    const { keys: received } = marginals(coarsest);
    const most = received.reduce((best, each, key) => (each > received[best] ? key : best), 0);
    return { layer, head, of, coarsest, own, most, call: await subject.requestFor(layer, head) };
  });
  // Until the next head is there, the one before with its own tokens and name.
  const shown = value ?? { layer, head };
  const { name, queries, keys } = subject.layers[shown.layer];
  const small = Math.max(queries.length, keys.length) <= MOST_LINES;
  const lines = params.show === "lines" && small;
  useNowhere(lines);
  const large = queries.length * keys.length > MOST_SAVED;
  const range = (params.range ?? usualRange(Math.max(queries.length, keys.length))) as Range;
  if (problem) return <ProblemBox problem={problem} />;
  if (!value) return <p class="empty">Reading the weights…</p>;
  const { of, coarsest, own, most, call } = value;
  const tiled = of instanceof Tiles;
  const title = headTitle(subject, shown.layer, shown.head);
  const least = decimal(params.least, 0.05, 0, 0.5);
  const drawing = () => heatScene(coarsest, { theme, title, queries, keys, range: range === "shared" ? "own" : range, pool: tiled ? of.bars.every : 1 });
  return (
    <div aria-busy={busy}>
      <Controls summary={lines ? "token lines" : of.signed ? "weights of either sign" : RANGES[range]}>
        {small && <Choice label="Show as" value={params.show ?? "map"} set={(show) => go({ show: show === "map" ? "" : show })} options={[["map", "heat map"], ["lines", "token lines"]]} />}
        {!lines && !of.signed && <Choice label="Colour range" value={range} set={(each) => go({ range: each })} options={Object.entries(RANGES).filter(([each]) => each !== "shared")} />}
        {lines && <Field label="Weights of at least" type="range" min={0} max={0.5} step={0.01} value={least} live set={(each) => go({ least: each }, "slide")} hint={least.toFixed(2)} />}
        {lines && <Choice label="Query" value={params.query ?? ""} set={(query) => go({ query })} options={[["", "all"], ...queries.map((each, i): [string, string] => [String(i), `${i} ${each}`])]} />}
      </Controls>
      {!lines && <Export of={{ name: `weights-${name}-${shown.head}`, scene: drawing, ...(large || tiled ? {} : { rows: () => matrixRows(of, queries, keys), json: () => ({ layer: name, head: shown.head, queries, keys, statistics: own, weights: queries.map((_, i) => Array.from(row(of, i))) }) }) }} />}
      {!lines && !tiled && <TokenRow say of={of} queries={queries} keys={keys} at={{ query: only, key: only === null ? null : key }} pick={(query) => go({ view: "query", query, key: "" })} />}
      <Pictured {...(Math.max(queries.length, keys.length) <= MOST_LABELLED ? { columns: keys.length } : {})} picture={lines ? <HeadLines subject={subject} layer={layer} head={head} least={least} only={only} /> : (
        <HeatMap of={of} queries={queries} keys={keys} title={title} range={range === "shared" ? "own" : range} large at={only === null || key === null ? null : { query: only, key }}
          move={(cell) => go({ query: cell.query, key: cell.key }, "replace")} pick={(cell) => go({ view: "query", query: cell.query, key: cell.key })}
          zoom={zoomOf(params.zoom)} zoomed={({ k, x, y }) => go({ zoom: k === 1 ? "" : [k.toFixed(3), x.toFixed(1), y.toFixed(1)].join(",") }, "replace")} />
      )}>
      {!lines && !of.signed && <p class="small">The bars: on the right the largest weight of each query, below the {tiled ? "largest weight of each key" : `mean weight that each key receives. The most attended key is ${keys[most]}`}. Click a cell to follow its query step by step. A pixel shows the largest of the cells that it covers; Ctrl and the wheel, or the plus key, zoom in{tiled ? ": the server pools the cells, and sends those that come into view" : ""}.</p>}
      {of.signed && <p class="small">{IMPLICIT} The statistics count the shares |w| / Σ|w|.</p>}
      <h3>Statistics</h3>
      <FactList facts={shownStatistics(subject.counting).map(([each, label, about]) => [label, real(own[each]), about])} />
      </Pictured>
      <Commands calls={[call]} />
    </div>
  );
}
