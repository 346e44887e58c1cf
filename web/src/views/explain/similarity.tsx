/** How alike two texts are to a whole model, and which words make them so. */

import { useEffect, useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { placed, precise } from "../../numbers/format";
import { largest, matrix } from "../../numbers/matrix";
import { ModelChoice } from "../../parts/model_choice";
import { Opening } from "../../parts/sentence";
import { ShadedTokens } from "../../parts/shaded_tokens";
import { shownToken } from "../../subjects/model_subject";
import type { ModelInfo, ModelRan } from "../../server/types";
import { Choice, Commands, Export, FactList, Field, ProblemBox, Table } from "../../parts/ui";

const FIRST_PAIR = ["Kate met Tamiro in the park.", "Tamiro saw Kate near the river."] as const;
const POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"];
const NAMES = ["the first text", "the second text"];

interface SimilarityReply {
  similarity: number[];
  /** Of each pair and each of its texts, the share of every token. */
  tokens: number[][][];
  labels: { tokens: string[] }[][];
  ran: ModelRan;
}

const cosine = ({ takes }: ModelInfo) => takes.includes("text");

export const Similarity = () => <ModelChoice able={cosine} none="The server has no whole model that reads text, or no transformers.">{(model) => <Pair key={model.id} model={model} />}</ModelChoice>;

function Pair({ model }: { model: ModelInfo }) {
  const { params, go, refreshModels } = usePage();
  const texts = [params.text ?? FIRST_PAIR[0], params.pair ?? FIRST_PAIR[1]];
  const [drafts, write] = useState(texts);
  useEffect(() => write(texts), texts);
  const request: ApiRequest & { body: object } = { method: "POST", path: `v1/models/${encodeURIComponent(model.id)}/similarity`, body: { pairs: [texts], ...(params.pooling ? { pooling: params.pooling } : {}) } };
  const { value, problem, busy } = useLoaded(JSON.stringify(request), async (signal) => {
    const reply = await call<SimilarityReply>(request.method, request.path, request.body, signal);
    if (model.state !== "resident") void refreshModels();
    return { reply, texts, request };
  });
  const ready = drafts.every((each) => each.trim());
  return (
    <>
      <form class="fields grow" onSubmit={(event) => { event.preventDefault(); if (ready) go({ text: drafts[0].trim(), pair: drafts[1].trim() }); }}>
        {NAMES.map((name, i) => <Field key={name} wide label={name[0].toUpperCase() + name.slice(1)} value={drafts[i]} live set={(text) => write(drafts.map((each, at) => (at === i ? text : each)))} />)}
        <Choice label="Pooling" value={params.pooling ?? ""} set={(pooling) => go({ pooling })} options={[["", "the model's own"], ...POOLINGS.map((each) => [each, each] as const)]} />
        <button type="submit" class="primary" disabled={!ready}>Compare</button>
      </form>
      <ProblemBox problem={problem} />
      {!value && !problem && <Opening id={model.id} cancel={() => undefined} />}
      {value && <div aria-busy={busy}><Shown of={value.reply} texts={value.texts} request={value.request} /></div>}
    </>
  );
}

/** The tokens without those that fill up the shorter text, at one of its ends: their shares are exactly 0. */
function unpadded<T extends { value: number }>(tokens: T[]): T[] {
  const shares = tokens.map(({ value }) => value !== 0);
  return tokens.slice(Math.max(0, shares.indexOf(true)), shares.lastIndexOf(true) + 1 || tokens.length);
}

function Shown({ of, texts, request }: { of: SimilarityReply; texts: string[]; request: ApiRequest }) {
  const { theme } = usePage();
  const sides = of.labels[0].map(({ tokens }, side) => unpadded(tokens.map((token, i) => ({ name: shownToken(token), value: of.tokens[0][side][i], side }))));
  const all = sides.flat();
  const most = largest(all.map(({ value }) => value));
  const strongest = [...all].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 24);
  return (
    <>
      <FactList facts={[["similarity: the cosine of both", precise(of.similarity[0])], ["computed in", `${of.ran.compute_ms.toFixed(1)} ms`]]} />
      {sides.map((tokens, side) => <ShadedTokens key={side} tokens={tokens} most={most} signed />)}
      <p class="small">The share of each token in the cosine, gradient · embedding: to first order, orange brings the texts nearer to each other, and blue moves them apart.</p>
      <Export of={{
        name: "similarity",
        scene: () => heatScene(matrix(1, all.length, Float32Array.from(all, ({ value }) => value)), { theme, title: `similarity ${precise(of.similarity[0])}`, queries: ["share"], keys: placed(all.map(({ name }) => name)), signed: true }),
        rows: () => [["text", "token", "share"], ...all.map(({ name, value, side }) => [String(side + 1), name, value])],
        json: () => ({ texts, similarity: of.similarity[0], tokens: sides }),
      }} />
      <Table caption="The tokens with the largest shares" rows={strongest} columns={[
        { head: "token", header: true, cell: ({ name }) => name },
        { head: "of", cell: ({ side }) => NAMES[side] },
        { head: "share", number: true, cell: ({ value }) => precise(value) },
      ]} />
      <Commands calls={[request]} />
    </>
  );
}
