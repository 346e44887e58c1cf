/** Rollout, flow and accumulated relevance over the layers of a subject. */

import { Problem, callTensors } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { barScene, heatScene } from "../../drawing/drawings";
import { placed, whole } from "../../numbers/format";
import { MOST_TOKENS, mostOfRollout } from "../../page/limits";
import { HeatMap } from "../../parts/heatmap";
import { allWeights, attributionOf } from "../../subjects/live";
import { matrix, matrixRows, row } from "../../numbers/matrix";
import { Patches, firstLooking } from "../../parts/patches";
import { decimal, integer } from "../../page/state";
import { IMPLICIT, notComputed, subjectKey } from "../../subjects/subject";
import type { Layer, Subject, SubjectProps } from "../../subjects/subject";
import { stacked } from "../../server/tensors";
import type { Body, Tensor } from "../../server/tensors";
import type { Ran } from "../../server/types";
import { Choice, Commands, Drawing, Export, Field, ProblemBox, RanTable, Waiting } from "../../parts/ui";

const MOST_FLOWS = 64; // tokens whose flows are all asked for

const METHODS: Record<string, { label: string; about: string }> = {
  rollout: { label: "rollout", about: "The product over the layers of (1 − r)A + rI, where A is the weights of the heads in one and r the share of the residual connection (Abnar & Zuidema 2020). A row tells from which tokens a query's state comes, if every layer mixes as its attention says." },
  flow: { label: "maximum flow", about: "The largest flow from a token of the last layer to each input, where an edge carries at most its entry of (1 − r)A + rI (Abnar & Zuidema 2020)." },
  relevance: { label: "relevance", about: "R ← R + relevance · R over the layers, from R = I (Chefer et al. 2021). For each layer, L is the sum of that layer's attention output, because this view has no gradient of the whole model." },
};
const STACKS: Partial<Record<string, string>> = { layers: "the text", vision: "the image" };
const stackOf = ({ name }: Layer) => name.split(".")[0];
const COMBINED: [string, string][] = [["mean", "mean"], ["max", "largest"], ["min", "smallest"]];

/** The weights of the layers, or what is accumulated of them: `[layer, head, query, key]` or `[layer, query, key]`. */
async function inputs(subject: Subject, layers: number[], method: string, sequence: number): Promise<Tensor> {
  if (method !== "relevance") {
    return stacked(await Promise.all(layers.map((i) => allWeights(subject, [i]))));
  }
  const made = await Promise.all(layers.map(async (i) => {
    const live = await subject.live(i);
    if (!live) throw new Problem({ title: "There is no gradient", detail: `${subject.layers[i].name} ${notComputed(subject)}` });
    return (await attributionOf(live, { methods: ["relevance"] }, sequence)).tensors.relevance;
  }));
  return stacked(made);
}

export function Rollout({ subject }: SubjectProps) {
  const { params, go, theme } = usePage();
  const stacks = [...new Set(subject.layers.map(stackOf))].filter((each) => each !== "cross");
  const stack = stacks.find((each) => each === params.stack) ?? stackOf(subject.layers[0]);
  const first = subject.layers.find((each) => stackOf(each) === stack) ?? subject.layers[0];
  const usable = subject.layers.map((each, i) => ({ each, i })).filter(({ each }) => stackOf(each) === stack && !each.name.endsWith(".cross") && each.queries.length === each.keys.length && each.queries.length === first.queries.length && each.heads.length === first.heads.length);
  const upto = integer(params.upto, usable.length, 1, usable.length);
  const { queries } = first;
  const method = params.method && params.method in METHODS ? params.method : "rollout";
  const relevant = method === "relevance"; // the server sums over the heads of each layer
  // Else a stored recording stays at the server, which has its weights.
  const most = subject.recording && !relevant ? MOST_TOKENS.rollout : mostOfRollout(relevant ? upto : usable.slice(0, upto).reduce((sum, { each }) => sum + each.heads.length, 0));
  const fits = first.queries.length <= most && usable.length > 0;
  const query = integer(params.query, firstLooking(first), 0, queries.length - 1);
  const asks = method === "flow" && queries.length > MOST_FLOWS ? { queries: [query] } : {};
  const shared: Body = { combine: params.combine ?? "mean", residual: decimal(params.residual, 0.5, 0, 1), discard: decimal(params.discard, 0, 0, 0.95) };
  const body: Body = { method, ...(method === "relevance" ? {} : shared), ...asks };
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${stack}/${upto}/${JSON.stringify(body)}`, async () => {
    if (!fits || subject.layers.some(({ implicit }) => implicit)) return null;
    const layers = usable.slice(0, upto);
    const request: ApiRequest = subject.recording && method !== "relevance"
      ? { method: "POST", path: `${subject.recording}/rollout`, body: { ...body, layers: layers.map(({ each }) => each.name) } }
      : { method: "POST", path: "v1/attention/rollout", body: { ...body, weights: await inputs(subject, layers.map(({ i }) => i), method, integer(params.sequence, 0)) } };
    const { reply, tensors: { values } } = await callTensors<{ ran: Ran }>(request.path, request.body ?? {});
    return { of: matrix(values.shape[0], values.shape[1], values.data), ran: reply.ran, request };
  });
  const implicit = subject.layers.filter((each) => each.implicit && (stackOf(each) === stack || stack === "layers"));
  if (implicit.length) return <p>{METHODS[method].label[0].toUpperCase() + METHODS[method].label.slice(1)} follows the shares of attention through every layer. {implicit.map(({ name }) => name).join(", ")} {implicit.length > 1 ? "have none" : "has none"}: {IMPLICIT[0].toLowerCase() + IMPLICIT.slice(1)}</p>;
  if (!usable.length) return <p>Rollout needs layers whose queries and keys are the same tokens.</p>;
  const title = `${METHODS[method].label} over ${upto} of ${usable.length} layers`;
  const of = value?.of;
  const rows = of?.rows === 1 ? [queries[query]] : queries;
  const share = (name: "residual" | "discard", otherwise: number, max: number, label: string) => {
    const now = decimal(params[name], otherwise, 0, max);
    return <Field label={label} hint={now.toFixed(2)} param={name} type="range" min={0} max={max} step={0.05} value={now} set={(each) => go({ [name]: Number(each) === otherwise ? "" : each })} />;
  };
  return (
    <>
      <Controls summary={`${title}, query ${query} ${queries[query]}`}>
        <Choice label="Method" value={method} set={(each) => go({ method: each === "rollout" ? "" : each })} options={Object.entries(METHODS).map(([each, { label }]) => [each, label])} />
        {stacks.length > 1 && <Choice label="Layers of" value={stack} set={(each) => go({ stack: each, upto: "", query: "" })} options={stacks.map((each) => [each, STACKS[each] ?? `the ${each}`])} />}
        <Choice label="Layers" value={String(upto)} set={(each) => go({ upto: each })} options={usable.map((_, i) => [String(i + 1), `the first ${i + 1}`])} />
        <Choice label="Query" value={String(query)} set={(each) => go({ query: each })} options={queries.map((each, i) => [String(i), `${i} ${each}`])} />
        {method !== "relevance" && <Choice label="Heads in one" value={String(shared.combine)} set={(each) => go({ combine: each === "mean" ? "" : each })} options={COMBINED} />}
        {method !== "relevance" && share("residual", 0.5, 1, "Residual share r")}
        {method !== "relevance" && share("discard", 0, 0.95, "Leave out the smallest")}
      </Controls>
      <ProblemBox problem={problem} />
      {!fits && <p>The text has {queries.length} tokens. The page can send the weights of {upto === usable.length ? "these" : `the first ${upto}`} layers for at most {most} tokens: take fewer layers, or a shorter text. Longer texts, of up to {whole(MOST_TOKENS.rollout)} tokens: store a recording first (<code>attention record … --post</code>), then choose it here.</p>}
      {!value && busy && fits && <Waiting what={`Asking the server for the ${METHODS[method].label} over ${upto} layers`} />}
      {value && of?.columns === queries.length && (
        <div aria-busy={busy}>
          <Export of={{ name: method, scene: () => heatScene(of, { theme, title, queries: rows, keys: queries }), rows: () => matrixRows(of, rows, queries), json: () => ({ ...body, layers: upto, tokens: queries, values: rows.map((_, i) => Array.from(row(of, i))) }) }} />
          {subject.picture && first.places && of.rows > 1 && <Patches of={of} layer={first} picture={subject.picture} title={title} />}
          <div class="side">
            <HeatMap of={of} queries={rows} keys={queries} title={title} alone={of.rows === 1} pick={(cell) => of.rows > 1 && go({ query: cell.query })} />
            <Drawing fit scene={barScene({ theme, title: `${queries[query]} comes from`, labels: placed(queries), values: Array.from(row(of, of.rows > 1 ? query : 0)) })} />
          </div>
          <p class="small">{METHODS[method].about}</p>
          {subject.unseen?.length ? <p class="small">Without what passes through {subject.unseen.join(", ")}: such layers mix tokens too, but have no weights of pairs of tokens.</p> : null}
          <RanTable rans={{ [method]: value.ran }} />
          <Commands calls={[value.request]} />
        </div>
      )}
    </>
  );
}
