/** Which parts of a prompt made each sentence of an answer: by attention, by gradient, and by leaving each out. */

import { useEffect, useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { clip, precise, real } from "../../numbers/format";
import { largest, matrix, matrixRows } from "../../numbers/matrix";
import { integer } from "../../page/state";
import { chatOf } from "../../subjects/chat";
import { ChatLine } from "../../parts/texts";
import { ModelChoice } from "../../parts/model_choice";
import { Opening } from "../../parts/sentence";
import { paint } from "../../parts/shaded_tokens";
import type { ContextReply, ModelInfo } from "../../server/types";
import { Area, Choice, Commands, Export, FactList, Field, ProblemBox, Table } from "../../parts/ui";

const FIRST_PROMPT = "Kate met Tamiro in the park. Tom has a red kite. The cat sat on the mat. Then Tam";
const MOST_NEW = 24; // tokens of an answer that is generated

interface Measure {
  label: string;
  about: string;
  signed: boolean;
  /** True for layers that have it; all have one without this. */
  able?: (layers: ModelInfo["layers"]) => boolean;
  /** Numbers of sources × sentences. */
  of: (reply: ContextReply) => number[][];
}

const less = (of: number[][] | undefined) => (of ?? []).map((row) => row.map((each) => -each));
const attends = ({ kind = "attention" }: ModelInfo["layers"][number]) => kind === "attention";
const MEASURES: Record<string, Measure> = {
  hidden: { label: "loss without it", about: "What log p of the sentence loses where no layer sees the source. Orange: the sentence needs it; blue: it would be likelier without.", able: (layers) => layers.every(attends), signed: true, of: ({ ablation }) => less(ablation?.hidden) },
  removed: { label: "loss if left out", about: "What log p of the sentence loses where the source is left out of the prompt, and what follows it moves up.", signed: true, of: ({ ablation }) => less(ablation?.removed) },
  attention: { label: "attention", about: "The share of attention on the source, over all heads and the tokens of the sentence.", able: (layers) => layers.some(attends), signed: false, of: ({ attention = [] }) => attention },
  gradient: { label: "gradient · embedding", about: "Gradient · embedding of log p of the sentence, summed over the tokens of the source. Orange makes the sentence likelier.", signed: true, of: ({ gradient = [] }) => gradient },
};
/** The measures of a model: those that its layers have, once they are known. */
const measuresOf = ({ layers }: ModelInfo) => Object.keys(MEASURES).filter((name) => !layers.length || MEASURES[name].able?.(layers) !== false);

const writes = ({ takes, generates }: ModelInfo) => takes.includes("text") && generates;

export const Context = () => <ModelChoice able={writes} none="The server has no whole model that continues a text.">{(model) => <Asked key={model.id} model={model} />}</ModelChoice>;

function Asked({ model }: { model: ModelInfo }) {
  const { params, go, refreshModels } = usePage();
  const prompt = params.prompt ?? FIRST_PROMPT;
  const [draft, write] = useState(prompt);
  const [answer, writeAnswer] = useState(params.answer ?? "");
  useEffect(() => write(prompt), [prompt]);
  useEffect(() => writeAnswer(params.answer ?? ""), [params.answer]);
  const chat = model.takes.includes("messages") ? chatOf(params) : null;
  const answered = chat?.at(-1)?.role === "assistant"; // the chat ends with its answer
  const body = { ...(chat ? { messages: chat } : { text: prompt }), return: measuresOf(model), heads: 0, ...(answered ? {} : params.answer ? { answer: params.answer } : { max_tokens: MOST_NEW }) };
  const request: ApiRequest & { body: object } = { method: "POST", path: `v1/models/${encodeURIComponent(model.id)}/context`, body };
  const { value, problem, busy } = useLoaded(JSON.stringify(request), async (signal) => {
    // Its layers are known once it is loaded, and what can be asked with them.
    const ended = () => { if (model.state !== "resident") void refreshModels(); };
    const reply = await call<ContextReply>(request.method, request.path, request.body, signal).finally(ended);
    return { reply, request };
  });
  return (
    <>
      <form onSubmit={(event) => { event.preventDefault(); if (chat || draft.trim()) go({ ...(chat ? {} : { prompt: draft }), answer, part: "" }); }}>
        {chat ? <ChatLine turns={chat} hint="its sentences are the sources" /> : <Area label="Prompt" hint="its sentences are the sources" param="text" rows={4} wrap live value={draft} set={write} />}
        {!answered && <div class="fields grow">
          <Field wide label="Answer" hint="empty: what the model writes" param="answer" value={answer} live set={writeAnswer} />
          <button type="submit" class="primary" disabled={!chat && !draft.trim()}>Ask</button>
        </div>}
      </form>
      <ProblemBox problem={problem} />
      {!value && !problem && <Opening id={model.id} cancel={() => undefined} />}
      {value && <div class="answer" aria-busy={busy}><Highlights of={value.reply} request={value.request} /></div>}
    </>
  );
}

/** A text cut at the sources: each piece with the number of its source, or null. */
function pieces({ prompt, sources }: ContextReply): { text: string; source: number | null }[] {
  let at = 0;
  const found = sources.flatMap(({ span: [from, to] }, source) => {
    const before = prompt.slice(at, from);
    at = to;
    return [...(before ? [{ text: before, source: null }] : []), { text: prompt.slice(from, to), source }];
  });
  return at < prompt.length ? [...found, { text: prompt.slice(at), source: null }] : found;
}

function Highlights({ of, request }: { of: ContextReply; request: ApiRequest }) {
  const { params, go, theme } = usePage();
  const measures = Object.entries(MEASURES).filter(([, each]) => each.of(of).length);
  const first = measures[0][0];
  const chosen = measures.some(([each]) => each === params.measure) ? (params.measure ?? first) : first;
  const { label, about, signed, of: numbers } = MEASURES[chosen];
  const part = integer(params.part, 0, 0, Math.max(0, of.answer.length - 1));
  if (!of.answer.length) return <p>The answer has no sentence.</p>;
  const values = numbers(of).map((row) => row[part]);
  const most = largest(values);
  const best = values.indexOf(Math.max(...values));
  const sources = of.sources.map(({ name, text }) => `${name}: ${clip(text.trim(), 40)}`);
  const sentences = of.answer.map(({ text }) => clip(text.trim(), 40));
  const all = matrix(sources.length, sentences.length, Float32Array.from(numbers(of).flat()));
  return (
    <>
      <div class="fields"><Choice label="Highlight by" value={chosen} set={(each) => go({ measure: each === first ? "" : each })} options={measures.map(([each, measure]) => [each, measure.label] as const)} /></div>
      <p class="highlights">{pieces(of).map(({ text, source }, i) => (source === null ? text : <mark key={i} style={paint(theme, values[source], most, signed)} title={`${of.sources[source].name}: ${precise(values[source])}`} class={source === best ? "best" : undefined}>{text}</mark>))}</p>
      <p class="highlights sentences" role="group" aria-label={of.generated ? "The answer that the model wrote" : "The answer"}>
        {of.answer.map(({ text }, i) => <button key={i} type="button" aria-pressed={i === part} onClick={() => go({ part: i || "" })}>{text.trim() || "␣"}</button>)}
      </p>
      <p class="small">{about}{of.answer.length > 1 ? " Choose a sentence of the answer." : ""}</p>
      <FactList facts={[["most", sources[best]], [label, precise(values[best])], ["log p of the sentence", real(of.answer[part].logprob)], ["computed in", `${of.ran.compute_ms.toFixed(0)} ms`]]} />
      <Export of={{
        name: "context",
        scene: () => heatScene(all, { theme, title: `${label}: sources and sentences`, queries: sources, keys: sentences, axes: ["sources", "sentences"], signed }),
        rows: () => [["source", ...sentences], ...matrixRows(all, sources, sentences).slice(1)],
        json: () => of,
      }} />
      <Table caption={`The sources of “${sentences[part]}”`} rows={of.sources} columns={[
        { head: "source", header: true, cell: ({ name }) => name },
        { head: "text", cell: ({ text }) => <span class="wrap">{clip(text.trim(), 90)}</span> },
        ...measures.map(([, measure]) => ({ head: measure.label, title: measure.about, number: true, cell: (_: unknown, i: number) => precise(measure.of(of)[i]?.[part] ?? NaN) })),
      ]} />
      <Commands calls={[request]} />
    </>
  );
}
