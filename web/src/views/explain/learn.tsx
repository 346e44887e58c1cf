/** The formulas of the attention at hand, with its numbers. */

import type { ComponentChildren } from "preact";
import { call } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { barScene } from "../../drawing/drawings";
import { placed, precise, real } from "../../numbers/format";
import { row } from "../../numbers/matrix";
import { forwardOf } from "../../subjects/live";
import { firstLooking } from "../../parts/patches";
import { decimal, integer } from "../../page/state";
import { notComputed, subjectKey } from "../../subjects/subject";
import type { SubjectProps } from "../../subjects/subject";
import type { ModuleInfo, Named, Spec, VariantInfo } from "../../server/types";
import { Choice, Commands, Drawing, Field, ProblemBox, Table } from "../../parts/ui";

/** Shares of scores at a temperature: exp(s/τ) / Σ exp(s/τ), without overflow. */
export function softmax(scores: number[], temperature: number): number[] {
  const most = Math.max(...scores);
  if (most === -Infinity) return scores.map(() => 0);
  const powers = scores.map((each) => Math.exp((each - most) / temperature));
  const total = powers.reduce((a, b) => a + b, 0);
  return powers.map((each) => each / total);
}

const Sub = ({ of, at }: { of: string; at: string }) => <msub><mi>{of}</mi><mi>{at}</mi></msub>;
const Formula = ({ label, children }: { label: string; children: ComponentChildren }) => <math aria-label={label}><mrow>{children}</mrow></math>;

function partsOf(spec: Spec | undefined): [string, Named][] {
  const parts: [string, Named][] = [["score", spec?.score ?? { name: "scaled_dot" }]];
  for (const mask of spec?.masks ?? []) parts.push(["mask", mask]);
  if (spec?.position && spec.position.name !== "none") parts.push(["position", spec.position]);
  parts.push(["normalizer", spec?.normalizer ?? { name: "softmax" }]);
  if (spec?.method && spec.method.name !== "exact") parts.push(["method", spec.method]);
  return parts;
}

export const Learn = (props: SubjectProps) => (props.subject.layers[props.layer].implicit ? <RunningState {...props} /> : <Softmax {...props} />);

/** A layer without a softmax: its state, its implicit weights, and those of one query. */
function RunningState({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const { queries, keys, heads } = subject.layers[layer];
  const query = integer(params.query, firstLooking(subject.layers[layer]), 0, queries.length - 1);
  const { value, problem } = useLoaded(`${subjectKey(params)}/${layer}/${head}`, () => subject.weights(layer, head));
  return (
    <>
      <Controls summary={`query ${query} ${queries[query]}`}>
        <Choice label="Query" value={String(query)} set={(each) => go({ query: each })} options={queries.map((each, i) => [String(i), `${i} ${each}`])} />
      </Controls>
      <div class="learn">
        <ol class="steps">
          <li>The layer keeps a state S that stands for all tokens so far. There is no score of each pair of tokens, and no softmax.</li>
          <li>Each token changes the state: a gate A fades or corrects what is there, and the token writes its value v under its key k. <Formula label="S of t is A of t times S of t minus 1, plus k of t times v of t"><Sub of="S" at="t" /><mo>=</mo><Sub of="A" at="t" /><msub><mi>S</mi><mrow><mi>t</mi><mo>−</mo><mn>1</mn></mrow></msub><mo>+</mo><Sub of="k" at="t" /><msup><Sub of="v" at="t" /><mi>T</mi></msup></Formula> A state-space layer calls k and q B and C.</li>
          <li>A query reads the state. <Formula label="o of t is q of t times S of t"><Sub of="o" at="t" /><mo>=</mo><msup><Sub of="q" at="t" /><mi>T</mi></msup><Sub of="S" at="t" /></Formula></li>
          <li>Written out, the output is a sum of the values again, with implicit weights. <Formula label="o of i is the sum over j up to i of M of i j times v of j"><Sub of="o" at="i" /><mo>=</mo><munder><mo>∑</mo><mrow><mi>j</mi><mo>≤</mo><mi>i</mi></mrow></munder><Sub of="M" at="ij" /><Sub of="v" at="j" /></Formula> with <Formula label="M of i j is q of i times A of i to A of j plus 1 times k of j"><Sub of="M" at="ij" /><mo>=</mo><msup><Sub of="q" at="i" /><mi>T</mi></msup><Sub of="A" at="i" /><mo>⋯</mo><Sub of="A" at="j+1" /><Sub of="k" at="j" /></Formula> They may be negative, and do not sum to one.</li>
        </ol>
        <ProblemBox problem={problem} />
        {value && <Drawing fit scene={barScene({ theme, title: `implicit weights of ${queries[query]}, ${heads[head]}`, labels: placed(keys), values: Array.from(row(value, query)), signed: true })} />}
      </div>
    </>
  );
}

function Softmax({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const attention = subject.layers[layer];
  const wanted = integer(params.query, firstLooking(attention), 0, attention.queries.length - 1);
  const temperature = decimal(params.tau, 1, 0.125, 8);
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${head}/${wanted}`, async () => {
    const [live, { variants }] = await Promise.all([subject.live(layer), call<{ variants: VariantInfo[] }>("GET", "v1/variants")]);
    const select = { queries: [wanted], ...(attention.heads.length > 1 ? { heads: [head] } : {}) };
    const made = live && (await forwardOf(live, { return: ["q", "masked_scores", "weights"], select }, integer(params.sequence, 0)));
    const spec = live?.module ? (await call<ModuleInfo>("GET", `v1/modules/${encodeURIComponent(live.module)}`)).config.spec : (live?.body.spec as Spec | undefined);
    return { variants, made, spec, width: made?.tensors.q.shape.at(-1) ?? 0, layer, name: attention.heads[head], query: wanted };
  });
  if (!value) return problem ? <ProblemBox problem={problem} /> : <p class="empty">Asking the server…</p>;
  const { made, variants, spec, width, name, query } = value;
  // Until the next query's are there, the numbers of the one before with its own tokens and names.
  const { queries, keys } = subject.layers[value.layer];
  const scores = made ? Array.from(made.tensors.masked_scores.data) : null;
  const weights = made ? Array.from(made.tensors.weights.data) : null;
  const shares = scores && softmax(scores, temperature);
  const parts = partsOf(spec);
  const formulaOf = (kind: string) => {
    const name = parts.find(([each]) => each === kind)?.[1].name;
    return <><code>{variants.find((each) => each.kind === kind && each.name === name)?.formula}</code>.</>;
  };
  const scaled = (spec?.score?.name ?? "scaled_dot") === "scaled_dot" && (spec?.score?.scale ?? null) === null;
  const normalizer = spec?.normalizer ?? { name: "softmax" };
  const plain = normalizer.name === "softmax" && !normalizer.sinks && (normalizer.temperature ?? 1) === 1;
  const finite = scores?.filter(Number.isFinite) ?? [];
  return (
    <>
      <Controls summary={`query ${wanted} ${attention.queries[wanted]}, τ = ${temperature.toFixed(2)}`}>
        <Choice label="Query" value={String(wanted)} set={(each) => go({ query: each })} options={attention.queries.map((each, i) => [String(i), `${i} ${each}`])} />
        {plain && <Field label="Temperature τ" hint={temperature.toFixed(2)} type="range" min={-3} max={3} step={0.1} value={Math.log2(temperature)} live set={(each) => go({ tau: Math.abs(Number(each)) < 0.05 ? "" : (2 ** Number(each)).toFixed(3) }, "slide")} />}
      </Controls>
      <div aria-busy={busy} class="learn">
        <ol class="steps">
          <li>Each query is compared with each key. {scaled ? <><Formula label="s of j is q dot k of j over the square root of d"><Sub of="s" at="j" /><mo>=</mo><mfrac><mrow><mi>q</mi><mo>·</mo><Sub of="k" at="j" /></mrow><msqrt><mi>d</mi></msqrt></mfrac></Formula>{width > 0 && <> with d = {width}, so √d = {real(Math.sqrt(width), 3)}.</>}</> : formulaOf("score")}{finite.length > 0 && <> The scores of {queries[query]} lie between {precise(Math.min(...finite))} and {precise(Math.max(...finite))}.</>}</li>
          <li>A mask sets the score of a hidden key to −∞. {scores && <>Here {scores.filter((each) => each === -Infinity).length} of {keys.length} are hidden.</>}</li>
          <li>Scores become shares. {plain ? <><Formula label="w of j is e to the s of j over tau, over the sum of the same over all keys"><Sub of="w" at="j" /><mo>=</mo><mfrac><msup><mi>e</mi><mrow><Sub of="s" at="j" /><mo>/</mo><mi>τ</mi></mrow></msup><mrow><munder><mo>∑</mo><mi>i</mi></munder><msup><mi>e</mi><mrow><Sub of="s" at="i" /><mo>/</mo><mi>τ</mi></mrow></msup></mrow></mfrac></Formula> A small τ picks the largest score, a large τ makes all shares equal. Move the slider.</> : formulaOf("normalizer")}</li>
          <li>The output is the sum of the values with these shares. <Formula label="o is the sum over j of w of j times v of j"><mi>o</mi><mo>=</mo><munder><mo>∑</mo><mi>j</mi></munder><Sub of="w" at="j" /><Sub of="v" at="j" /></Formula></li>
        </ol>
        {shares && weights && plain && (
          <div class="shares">
            <Drawing fit scene={barScene({ theme, title: `${queries[query]} at τ = ${temperature.toFixed(2)}`, labels: placed(keys), values: shares, whole: 1 })} />
            <Table caption={`Scores and shares of ${queries[query]}, ${name}`} rows={placed(keys)} columns={[
              { head: "key", header: true, cell: (each) => each },
              { head: "score s", number: true, cell: (_, j) => real(scores[j]) },
              { head: "share at τ", number: true, cell: (_, j) => real(shares[j], 5) },
              { head: "weight of the server", number: true, cell: (_, j) => real(weights[j], 5) },
            ]} />
          </div>
        )}
        {!made && <p>The scores are not known: this attention {notComputed(subject, layer)}</p>}
      </div>
      {made && (
        <>
          <h3>The parts of this attention</h3>
          <Table caption="Formula and source of each part" rows={parts} columns={[
            { head: "part", header: true, cell: ([kind]) => kind },
            { head: "name", cell: ([, part]) => part.name },
            ...(["formula", "gradient", "cost", "source"] as const).map((fact) => ({ head: fact, cell: ([kind, part]: [string, Named]) => <span class="wrap">{variants.find((each) => each.kind === kind && each.name === part.name)?.[fact] ?? "—"}</span> })),
          ]} />
        </>
      )}
      <Commands calls={[made?.request ?? null, { method: "GET", path: "v1/variants" }]} />
    </>
  );
}
