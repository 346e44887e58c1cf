/** Heads that link pairs of tokens: the share of weight at the pairs, and how often the key is first, of every head. */

import { useEffect, useState } from "preact/hooks";
import { call, callTensors } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useHeadKeys, useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { precise } from "../../numbers/format";
import { matrix } from "../../numbers/matrix";
import { integer } from "../../page/state";
import { promptOf } from "../../subjects/continuations";
import { FIRST_TEXT, shownToken } from "../../subjects/model_subject";
import { weightsPath } from "../../subjects/survey";
import { LINKS, linking, readPairs, textLayers, writePairs } from "../../subjects/token_pairs";
import type { LinkingHead, PairsReply, TokenPair } from "../../subjects/token_pairs";
import { refOf } from "../../subjects/subject";
import { LinkedHead } from "../../parts/linked_head";
import { ReadTokens } from "../../parts/model/read_tokens";
import { Opening } from "../../parts/sentence";
import { ChatLine, TextBox } from "../../parts/texts";
import type { ModelInfo, ModelLabels } from "../../server/types";
import { Button, Choice, Commands, Drawing, Export, Faulty, Field, ProblemBox, Table, Waiting } from "../../parts/ui";

const MOST_LINES = 256; // tokens of a head that is drawn with lines

interface Read {
  labels: ModelLabels;
  encoder_labels?: ModelLabels;
}

export function LinkedPairs({ model }: { model: ModelInfo }) {
  const { params, go, announce, refreshModels } = usePage();
  const { chat, text } = promptOf(params, model);
  const [draft, setDraft] = useState(text);
  const [query, chooseQuery] = useState<number | null>(null); // of the pair that is being made
  const [at, read] = useState<number | null>(null);
  useEffect(() => setDraft(text), [text]);
  const input = chat ? { messages: chat } : { text };
  const key = JSON.stringify(input);
  useEffect(() => chooseQuery(null), [key]);
  const { value, problem } = useLoaded(key, async () => {
    const reply = await call<Read>("POST", `v1/models/${encodeURIComponent(model.id)}/forward`, { ...input, top_k: 0 });
    if (!model.layers.length) void refreshModels(); // its layers are known now
    return { key, tokens: (reply.encoder_labels ?? reply.labels).tokens.map(shownToken) };
  });
  const tokens = value?.key === key ? value.tokens : null;
  const { pairs, fault } = readPairs(params.pairs ?? "", tokens?.length);
  const write = (next: TokenPair[]) => go({ pairs: writePairs(next), layer: "", head: "" });
  const pick = (token: number) => {
    if (query === null) {
      chooseQuery(token);
      announce(`Query ${token} ${tokens?.[token] ?? ""}. Choose its key.`);
    } else {
      chooseQuery(null);
      write(readPairs(writePairs([...pairs, [query, token]])).pairs);
      announce(`Pair ${query}-${token}.`);
    }
  };
  const said = (token: number) => [`token ${token}`, ...pairs.flatMap(([from, to]) => (from === token ? [`looks at ${to}`] : to === token ? [`is looked at by ${from}`] : []))].join(", ");
  const mark = (token: number) => (token === query ? "query" : pairs.some((pair) => pair.includes(token)) ? "key" : undefined);
  const submit = () => { if (chat || draft.trim()) go({ text: draft === FIRST_TEXT ? "" : draft, ...(draft === text ? {} : { pairs: "" }) }); };
  return (
    <>
      <form class="sentence" onSubmit={(event) => { event.preventDefault(); submit(); }}>
        {chat ? <ChatLine turns={chat} /> : <TextBox label="Text" value={draft} write={setDraft} />}
        {!chat && <button type="submit" class="primary" disabled={!draft.trim()}>Read</button>}
      </form>
      <ProblemBox problem={problem} />
      {!tokens && !problem && <Opening id={model.id} cancel={() => undefined} />}
      {tokens && (
        <>
          <ReadTokens label="The tokens of the text" tokens={tokens.map((name, i) => ({ name, value: NaN, said: said(i), mark: mark(i) }))} most={1} at={at} read={read} pick={pick} />
          <p role="status" class="small">{query === null ? "Click the query of a pair, then its key; or type the numbers of their tokens." : <>The query is {query} {tokens[query]}. Click its key. <Button class="quiet" onClick={() => chooseQuery(null)}>Another query</Button></>}</p>
          <div class="fields"><Field wide label="Pairs" hint="query-key, query-key" value={params.pairs ?? ""} placeholder="3-7, 10-12" set={(each) => go({ pairs: each.trim(), layer: "", head: "" })} /></div>
          {fault && <p role="status">{fault}</p>}
          {pairs.length > 0 && <p class="actions pairs">{pairs.map(([from, to], i) => <Button key={i} class="quiet" onClick={() => write(pairs.filter((_, other) => other !== i))}>{from} {tokens[from]} → {to} {tokens[to]}<span class="hidden">, remove</span><span aria-hidden="true"> ×</span></Button>)}</p>}
          {pairs.length > 0 && (model.layers.length ? <Linking key={key} model={model} input={input} pairs={pairs} tokens={tokens} /> : <Waiting what="Asking for the layers of the model" />)}
        </>
      )}
    </>
  );
}

interface LinkingProps {
  model: ModelInfo;
  input: Record<string, unknown>;
  pairs: TokenPair[];
  tokens: string[];
}

/** The heads, ranked by one of their numbers. */
function Linking({ model, input, pairs, tokens }: LinkingProps) {
  const { params, go, theme } = usePage();
  const [by, label] = LINKS.find(([name]) => name === params.rank) ?? LINKS[0];
  const layers = textLayers(model);
  const request: ApiRequest & { body: object } = { method: "POST", path: weightsPath(model.id), body: { ...input, ...(layers && { layers }), statistics: ["pairs"], return_weights: false, statistic_options: { pairs } } };
  const { value, problem, busy } = useLoaded(JSON.stringify(request.body), (signal) => call<PairsReply>(request.method, request.path, request.body, signal));
  const heads = value ? linking(value, by) : [];
  const placeOf = (ref: string) => model.layers.findIndex(({ layer }) => String(layer) === ref);
  const chosen = heads.find(({ ref, head }) => placeOf(ref) === integer(params.layer, -1) && head === integer(params.head, -1)) ?? heads.at(0);
  useHeadKeys(model.layers.map(({ heads: many }) => many), chosen ? placeOf(chosen.ref) : 0, chosen?.head ?? 0);
  if (problem) return <Faulty problem={problem}><ProblemBox problem={problem} /></Faulty>;
  if (!value || !chosen) return <Waiting what="Asking for the weights at the pairs" />;
  const wide = Math.max(...heads.map(({ head }) => head)) + 1;
  const cells = matrix(value.layers.length, wide);
  for (const { row, head, values } of heads) cells.data[row * wide + head] = values[by];
  const scene = heatScene(cells, { theme, title: `${label} at the pairs`, queries: value.layers.map(({ layer }) => String(layer)), keys: Array.from({ length: wide }, (_, i) => `H${i}`), axes: ["layers", "heads"], signed: cells.data.some((each) => each < 0) });
  return (
    <div class="beside found linking" aria-busy={busy}>
      <section aria-label="All heads">
        <div class="fields"><Choice label="Rank by" value={by} set={(name) => go({ rank: name === LINKS[0][0] ? "" : name })} options={LINKS.map(([name, title, about]) => [name, `${title}: ${about}`] as const)} /></div>
        <Drawing fit scene={scene} />
        <Export of={{ name: "pairs", label: "heads at the pairs", scene: () => scene, rows: () => [["head", ...LINKS.map(([name]) => name)], ...heads.map(({ name, values }) => [name, ...LINKS.map(([each]) => values[each])])], json: () => ({ request: request.body, heads }) }} />
        <Table caption={`Heads by ${label}, over ${pairs.length} ${pairs.length === 1 ? "pair" : "pairs"}`} rows={heads} columns={[
          { head: "head", header: true, cell: (each) => <Button class="quiet" aria-pressed={each === chosen} onClick={() => go({ layer: placeOf(each.ref), head: each.head })}>{each.name}</Button> },
          ...LINKS.map(([name, title, about]) => ({ head: title, title: about, number: true, cell: ({ values }: LinkingHead) => precise(values[name], 3) })),
        ]} />
        <Commands calls={[request]} />
      </section>
      <OneLinking key={chosen.name} model={model} input={input} pairs={pairs} tokens={tokens} head={chosen} layer={placeOf(chosen.ref)} />
    </div>
  );
}

interface OneLinkingProps extends LinkingProps {
  head: LinkingHead;
  /** The index of its layer among those of the model. */
  layer: number;
}

/** The weights of one head, with its numbers at each pair. */
function OneLinking({ model, input, pairs, tokens, head: { ref, head, name }, layer }: OneLinkingProps) {
  const { go } = usePage();
  const body = { ...input, layers: [refOf(ref)], select: { heads: [head] }, statistics: [] };
  const { value, problem } = useLoaded(JSON.stringify(body), async () => {
    const { shape, data } = (await callTensors(weightsPath(model.id), body)).tensors["layers.0.weights"];
    const [rows, columns] = shape.slice(-2);
    return { ...matrix(rows, columns, data.subarray(0, rows * columns)), ...(data.some((each) => each < 0) && { signed: true }) };
  });
  const weight = (query: number, key: number) => (value && query < value.rows && key < value.columns ? value.data[query * value.columns + key] : NaN);
  return (
    <section aria-label={name}>
      <h3>{name}</h3>
      {problem ? <ProblemBox problem={problem} /> : !value ? <Waiting what={`Asking for the weights of ${name}`} /> : <>
        <Table caption={`${name} at each pair`} rows={pairs} columns={[
          { head: "pair", header: true, cell: (pair) => pair.join("-") },
          { head: "query", cell: ([query]) => tokens[query] },
          { head: "key", cell: ([, key]) => tokens[key] },
          { head: "query → key", number: true, cell: ([query, key]) => precise(weight(query, key), 3) },
          { head: "key → query", number: true, cell: ([query, key]) => precise(weight(key, query), 3) },
        ]} />
        <LinkedHead of={value} queries={tokens} keys={tokens} title={name} range={value.signed ? "own" : "unit"} most={MOST_LINES} />
        <Button onClick={() => go({ view: "head", source: `model:${model.id}`, layer, head, query: pairs[0][0] })}>Open in Head</Button>
      </>}
    </section>
  );
}
