/** One query step by step: its scores, the mask, the weights, and the weighted sum of the values. */

import { useCorrected, useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { barScene } from "../../drawing/drawings";
import type { ApiRequest } from "../../server/api";
import { placed, precise, real } from "../../numbers/format";
import { forwardOf, headOf } from "../../subjects/live";
import type { Made } from "../../subjects/live";
import { firstLooking } from "../../parts/patches";
import { productsOf } from "../../drawing/products";
import { integer } from "../../page/state";
import { largest, largestPlaces, row } from "../../numbers/matrix";
import type { Matrix } from "../../numbers/matrix";
import { NOWHERE, usePointed, usePointing } from "../../drawing/pointed";
import { IMPLICIT, headTitle, subjectKey } from "../../subjects/subject";
import type { Subject, SubjectProps, Tapped } from "../../subjects/subject";
import { TokenRow } from "../../parts/token_row";
import type { ModuleInfo } from "../../server/types";
import { Choice, Commands, Drawing, Export, NumberTable, ProblemBox, RanTable, Table } from "../../parts/ui";
import { Dimensions } from "./dimensions";

const TAPS = ["q", "k", "v", "scores", "masked_scores", "weights", "context", "output"];
const FALLBACK = ["q", "k", "v", "scores", "weights", "context", "output"];

/** The rows of one head of a tap; key/value heads may be fewer than query heads. */
function tapRows({ tensors }: Tapped, tap: string, head: number, heads: number): Float32Array[] {
  const tensor = tensors[tap];
  const of = tensor.shape.length < 3 ? 0 : Math.floor((head * tensor.shape[0]) / heads);
  const { rows, columns, data } = headOf(tensor, of);
  return Array.from({ length: rows }, (_, i) => data.subarray(i * columns, (i + 1) * columns));
}

const MOST_KEYS = 64; // of the drawing by dimension
const MOST_DIMENSIONS = 512;

/** The parts of the scores of the keys with the largest weights, in their order; null where the scores have none. */
function partsOf(steps: Tapped | null) {
  const tensors: Partial<Tapped["tensors"]> = steps?.tensors ?? {};
  const [q, k, scores, weights] = [tensors.q, tensors.k, tensors.scores, tensors.weights];
  if (!steps || !q || !k || !scores || !weights || q.data.length > MOST_DIMENSIONS) return null;
  const places = largestPlaces(weights.data, MOST_KEYS);
  const vectors = tapRows(steps, "k", 0, 1);
  const products = productsOf(q.data, places.map((j) => vectors[j]), Float32Array.from(places, (j) => scores.data[j]), Float32Array.from(places, (j) => weights.data[j]));
  return products && { products, places };
}

/** What q and k are, of a source. */
function vectorsOf(source: string, modules: ModuleInfo[]): string {
  const [kind, id] = source.split(/:(.*)/s);
  if (kind === "raw") return "These are your q and k, as the score reads them.";
  if (kind === "model") return "These are q and k as the score reads them: after the projections, and where the model has them after norms and the rotation by positions (RoPE).";
  if (kind !== "module") return "These are q and k as they were recorded; they give the recorded weights.";
  const position = modules.find(({ name }) => name === id)?.config.spec?.position?.name ?? "none";
  return `These are q and k as the score reads them: projected${position === "rope" ? " and rotated by position (rope)" : ""}.`;
}

/** How many keys a mask leaves to a query. */
function looksAt(masked: number[], keys: number): string {
  const many = masked.filter((each) => each !== -Infinity).length;
  return many === keys ? `This token may look at all ${keys} keys.` : `This token may look at ${many} of ${keys} keys.`;
}

const norm = (of: Float32Array) => Math.hypot(...of);

export function Query({ subject, layer, head }: SubjectProps) {
  const { params, go } = usePage();
  const attention = subject.layers[layer];
  const query = integer(params.query, firstLooking(attention), 0, attention.queries.length - 1);
  useCorrected({ query });
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${head}/${query}`, async (): Promise<Stepped> => {
    const strips = subject.strips(layer, head);
    const ofQuery = strips ? await strips(1, query, query + 1) : await subject.weights(layer, head);
    const live = await subject.live(layer);
    const select = { heads: [head], queries: [query] };
    const sequence = integer(params.sequence, 0);
    const ask = (taps: string[]): Promise<Made> | null => (live ? forwardOf(live, { return: taps, ...(attention.heads.length > 1 ? { select } : { select: { queries: [query] } }) }, sequence) : null);
    // Methods without scores have no steps.
    const made = await (ask(TAPS)?.catch(() => ask(FALLBACK)).catch(() => null) ?? null);
    // A whole model whose attention cannot be computed apart from it has steps too.
    const steps = made ?? (await subject.taps?.(layer, head, query).catch(() => null)) ?? null;
    return { of: strips ? null : ofQuery, weights: Float32Array.from(row(ofQuery, strips ? 0 : query)), made, steps, parts: partsOf(steps), call: await subject.requestFor(layer, head), layer, head, query };
  });
  if (problem) return <ProblemBox problem={problem} />;
  if (!value) return <p class="empty">Reading the weights…</p>;
  const choice = (
    <Controls summary={`query ${query} ${attention.queries[query]}`}>
      <Choice label="Query" value={String(query)} set={(each) => go({ query: each })} options={attention.queries.map((each, i) => [String(i), `${i} ${each}`])} />
    </Controls>
  );
  // Until the next query's are there, the steps of the one before with its own tokens and names.
  return <>{choice}<div aria-busy={busy}><Steps subject={subject} of={value} /></div></>;
}

/** What one query of a head goes through. */
interface Stepped {
  layer: number;
  head: number;
  query: number;
  /** All weights of the head, unless they are read in strips. */
  of: Matrix | null;
  weights: Float32Array;
  made: Made | null;
  steps: Tapped | null;
  parts: ReturnType<typeof partsOf>;
  call: ApiRequest | null;
}

function Steps({ subject, of: { layer, head, query, of, weights, made, steps, parts, call } }: { subject: Subject; of: Stepped }) {
  const { params, go, theme, modules } = usePage();
  const { name, heads, queries, keys, implicit: signed = false } = subject.layers[layer];
  const pointing = usePointing();
  const { key: marked } = usePointed(pointing);
  const tensors: Partial<Tapped["tensors"]> = steps?.tensors ?? {};
  const scores = tensors.scores ? Array.from(tensors.scores.data) : null;
  const masked = tensors.masked_scores ? Array.from(tensors.masked_scores.data) : scores;
  const shown = tensors.weights?.data ?? weights;
  const values = steps && tensors.v ? tapRows(steps, "v", 0, 1) : null;
  const context = tensors.context?.data ?? null;
  const q = tensors.q?.data ?? null;
  const biased = scores && masked?.some((each, j) => Number.isFinite(each) && Math.abs(each - scores[j]) > 1e-5);
  const output = made?.taps.output ? (made.heads > 1 ? made.taps.output[head * queries.length + query] : made.taps.output[query]) : null;
  const drift = steps ? Math.max(...Array.from(shown, (each, j) => Math.abs(each - weights[j]))) : 0;
  const title = `${queries[query]} attends to`;
  const most = largest(shown);
  const rows = placed(keys).map((key, j) => ({ key, j }));
  const bars = (bar: number | null = null) => barScene({ theme, title, labels: placed(keys), values: Array.from(shown), signed, marked: bar });
  /** The bar at a point of the drawing. */
  const point = (_: number, y: number) => {
    const { top, high, places } = bars();
    const key = places.at(Math.max(0, Math.floor((y - top) / high)));
    pointing.set(y >= top && key !== undefined ? { query, key } : NOWHERE);
  };
  const csv = () => [["key", "score", "masked score", "weight"], ...keys.map((key, j) => [key, scores?.[j] ?? "", masked?.[j] ?? "", shown[j]])];
  return (
    <>
      <Export of={{ name: `query-${query}`, label: "weights of the query", scene: () => bars(), rows: csv, json: () => ({ layer: name, head, query: queries[query], keys, scores, weights: Array.from(shown), context: context && Array.from(context), output: output && Array.from(output) }) }} />
      {of && <TokenRow say of={of} queries={queries} keys={keys} at={{ query, key: null }} pick={(each) => go({ query: each, key: "" })} />}
      <div class="side">
        <Drawing scene={bars(marked)} fit point={point} leave={() => pointing.set(NOWHERE)} />
        <div>
          {steps ? (
            <ol class="steps">
              {q && <li><b>The query.</b> {queries[query]} has q of length {precise(norm(q))} in {q.length} dimensions.</li>}
              {scores && <li><b>Scores.</b> {parts ? "q · k of each key, times the scale" : "One for each key"}: from {precise(Math.min(...scores))} to {precise(Math.max(...scores))}.</li>}
              {masked && <li><b>Mask.</b> {looksAt(masked, keys.length)}</li>}
              <li><b>Weights.</b> The normalizer makes shares of the scores; they add up to {precise(shown.reduce((a, b) => a + b, 0))}. The largest is {precise(most)}, on {keys[shown.findIndex((each) => Math.abs(each) === most)]}.</li>
              {context && <li><b>Context.</b> Σ w · v, of length {precise(norm(context))}.</li>}
              {output && subject.layers.length === 1 && <li><b>Output.</b> {heads.length > 1 ? "The contexts of all heads, projected" : "The context"}: length {precise(norm(output))}.</li>}
            </ol>
          ) : <p class="small">{signed ? IMPLICIT : "This recording holds no q, k and v (or the method has no scores), so the steps before the weights cannot be shown."}</p>}
          {drift > 1e-4 && made && <p class="small">Computed again from the recorded q, k and v. The recorded weights differ by at most {precise(drift, 2)}: they were stored with fewer digits.</p>}
        </div>
      </div>
      {parts && (
        <Dimensions of={parts.products} query={query} name={queries[query]} places={parts.places} keys={parts.places.map((j) => keys[j])} title={`q · k of ${queries[query]}, ${headTitle(subject, layer, head)}`}
          about={[`${vectorsOf(params.source ?? "", modules)}${parts.places.length < keys.length ? ` Of ${keys.length} keys these are the ${parts.places.length} with the largest weights.` : ""}`,
            biased ? "Softcap, position bias and masks then change the scores, and the normalizer makes the weights of them." : "The normalizer makes the weights of the scores that no mask hides."]} />
      )}
      {scores && !parts && <p class="small">{q && q.length > MOST_DIMENSIONS ? `Vectors of more than ${MOST_DIMENSIONS} numbers are not drawn by dimension.` : "The score of this attention is no sum of products q × k, so that it has no parts by dimension."}</p>}
      <Table caption={`${headTitle(subject, layer, head)}, query ${queries[query]}`} rows={rows} columns={[
        { head: "key", header: true, cell: ({ key }) => key },
        ...(scores ? [{ head: "score", number: true, cell: ({ j }: { j: number }) => real(scores[j]) }] : []),
        ...(masked?.some((each, j) => each !== scores?.[j]) ? [{ head: "masked score", number: true, cell: ({ j }: { j: number }) => real(masked[j]) }] : []),
        { head: "weight", number: true, cell: ({ j }) => (signed ? precise(shown[j]) : real(shown[j], 5)) },
        ...(values?.length === keys.length ? [{ head: "‖v‖", number: true, title: "length of the value", cell: ({ j }: { j: number }) => real(norm(values[j])) }, { head: "‖w·v‖", number: true, title: "length of the key's part of the context", cell: ({ j }: { j: number }) => real(shown[j] * norm(values[j]), 4) }] : []),
        { head: <span class="hidden">share of the largest</span>, cell: ({ j }) => <span class="share" style={{ width: `${(6 * Math.abs(shown[j])) / (most || 1)}rem` }} /> },
      ]} />
      {context && <NumberTable caption={`Context of ${heads[head]}: Σ w · v`} labels={[queries[query]]} width={context.length} data={context} />}
      {output && <NumberTable caption="Output" labels={[queries[query]]} width={output.length} data={output} />}
      {made && <RanTable rans={{ forward: made.ran }} />}
      <Commands calls={[steps?.request ?? call]} />
    </>
  );
}
