/** A whole model that continues a typed text: the tokens as they come, what each head looked at, and what they depend on. */

import { useEffect, useRef, useState } from "preact/hooks";
import { callTensors, events, problemOf } from "../../server/api";
import type { ApiRequest, ProblemDocument } from "../../server/api";
import { colour, onColour } from "../../drawing/colour";
import { useHeadKeys, useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { DependsOn } from "../../parts/dependence";
import { barScene, heatScene } from "../../drawing/drawings";
import { noHead } from "../../subjects/edits";
import type { Edit } from "../../subjects/edits";
import { precise } from "../../numbers/format";
import { keep, keptOf } from "../../page/kept";
import { chatOf } from "../../subjects/chat";
import { FIRST_TEXT, shownToken } from "../../subjects/model_subject";
import { matrix, row } from "../../numbers/matrix";
import { Opening } from "../../parts/sentence";
import { ChatLine, TextBox } from "../../parts/texts";
import { decimal, integer } from "../../page/state";
import { headName } from "../../subjects/subject";
import { findingOf } from "../../page/tour";
import type { CompletionChunk, GeneratedToken, ModelInfo, ModelLabels, Predictions } from "../../server/types";
import { Button, Choice, Commands, Drawing, Export, Field, Faulty, ProblemBox, Table } from "../../parts/ui";
import { HeadEffects } from "./head_effects";

const LIKELIEST = 10;
const TOP_KEYS = 16; // of each head and token
const MOST_TOKENS = 256;

/** One token that came. `likeliest`: what stood beside it, with log-probabilities. */
interface Came {
  of: GeneratedToken;
  logprob: number;
  likeliest: [string, number][];
}

interface Run {
  /** What it was made of: two runs that agree in it have the same tokens, as far as they go. */
  key: string;
  came: Came[];
  prompt: ModelLabels;
  /** What the encoder read, of a model with one: the decoder's own text is the prompt then. */
  read?: ModelLabels | undefined;
  edits: Record<string, Edit[]>;
  request: ApiRequest;
}

const KEPT = "generation"; // the last run of this tab
/** What can be shown of a token that came. */
const SHOWN: [string, string][] = [["", "what each head looked at"], ["depends", "what it depends on"], ["heads", "the effect of each head"]];

/** The heads that are knocked out, from `1.0,1.3`: layer and head of each. */
const readKnocked = (text: string | undefined) => (text ?? "").split(",").filter((each) => /^.+\.\d+$/.test(each));

/** Edits by layer that take those heads' output away. */
function editsOf(knocked: string[]): Record<string, Edit[]> {
  const edits: Record<string, Edit[]> = {};
  for (const each of knocked) {
    const cut = each.lastIndexOf(".");
    (edits[each.slice(0, cut)] ??= []).push(noHead(Number(each.slice(cut + 1))));
  }
  return edits;
}

/** The tokens of a prompt. */
interface Prompted {
  labels: ModelLabels;
  encoder_labels?: ModelLabels;
}

/** The attentions that see each token that comes: encoders read before, and a running state has no weights by token. */
const decoding = ({ layers }: ModelInfo) => layers.filter(({ layer, kind = "attention" }) => kind === "attention" && !/^(encoder|vision)\./.test(String(layer)));

export function Generation({ model }: { model: ModelInfo }) {
  const { params, go, theme, announce, refreshModels } = usePage();
  const [run, setRun] = useState<Run | null>(() => lastRun);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [stop, setStop] = useState<AbortController | null>(null);
  const [pointed, point] = useState<number | null>(null); // the token under the pointer, of those that came
  const opening = useRef<AbortController>(undefined);
  useEffect(() => () => stop?.abort(), [stop]);
  const text = params.text ?? FIRST_TEXT;
  const [draft, setDraft] = useState(text);
  useEffect(() => setDraft(text), [text]);
  const temperature = decimal(params.heat, 0, 0, 2);
  const tokens = integer(params.length, 24, 1, MOST_TOKENS);
  const knocked = readKnocked(params.knocked);
  const edits = editsOf(knocked);
  const path = `v1/models/${encodeURIComponent(model.id)}/forward`;
  /** A chat is continued by the answer that follows its template; a model without one reads the text. */
  const chat = model.takes.includes("messages") ? chatOf(params) : null;
  const prompted = (written: string) => (chat ? { messages: chat } : { text: written });
  const key = JSON.stringify([model.id, prompted(text), edits]);
  const seed = integer(params.seed, 0);
  const runKey = JSON.stringify([key, temperature, temperature ? seed : 0]);
  atHand = runKey;
  const came = integer(params.came, 0, 0, MOST_TOKENS);
  // The next token: the logits of the whole vocabulary give its probabilities at any temperature.
  const next = useLoaded(key, async () => {
    opening.current = new AbortController();
    const body = { ...prompted(text), edits, top_k: LIKELIEST, return: ["logits"] };
    const { reply, tensors } = await callTensors<Predictions & Prompted>(path, body, opening.current.signal);
    if (!model.layers.length) void refreshModels();
    return { key, reply, logits: tensors.logits.data, request: { method: "POST", path, body } satisfies ApiRequest };
  });
  const here = next.value?.key === key ? next.value : null;
  const layers = decoding(model);
  const layer = integer(params.layer, 0, 0, Math.max(0, layers.length - 1));
  const heads = layers.length ? layers[layer].heads : 0;
  const head = integer(params.head, 0, 0, Math.max(0, heads - 1));
  useHeadKeys(layers.map((each) => each.heads), layer, head);
  const toggle = (each: string) => go({ came: "", knocked: (knocked.includes(each) ? knocked.filter((one) => one !== each) : [...knocked, each]).join(",") });
  const generate = async (most: number) => {
    const ending = new AbortController();
    const written = !chat && draft.trim() ? draft : text;
    setStop(ending);
    setProblem(null);
    point(null);
    try {
      const { labels: prompt, encoder_labels: read } = here && written === text ? here.reply : (await callTensors<Prompted>(path, { ...prompted(written), top_k: 0 })).reply;
      const known = model.layers.length ? model : (await refreshModels()).find(({ id }) => id === model.id);
      const attention = known && decoding(known).length ? { attention: { statistics: [], top_k: TOP_KEYS, edits } } : {};
      const body = { model: model.id, prompt: chat ? prompt.ids : written, max_tokens: most, temperature, ...(temperature ? { seed } : {}), logprobs: 5, ...attention };
      const request: ApiRequest = { method: "POST", path: "v1/completions", body };
      let made: Run = { key: JSON.stringify([JSON.stringify([model.id, prompted(written), edits]), temperature, temperature ? seed : 0]), came: [], prompt, read, edits, request };
      setRun((lastRun = made));
      try {
        for await (const { choices: [choice] } of events<CompletionChunk>("v1/completions", body, ending.signal)) {
          const { logprobs } = choice;
          const tokens: GeneratedToken[] = choice.attention ?? logprobs?.tokens.map((token, i) => ({ position: prompt.tokens.length + made.came.length + i, token, id: -1, layers: [] })) ?? [];
          const more = tokens.map((of, i): Came => ({ of, logprob: logprobs?.token_logprobs[i] ?? NaN, likeliest: Object.entries(logprobs?.top_logprobs[i] ?? {}) }));
          made = { ...made, came: [...made.came, ...more] };
          setRun((lastRun = made));
        }
      } finally {
        keep(KEPT, made);
        // Else the address would ask for as many tokens of what was chosen meanwhile.
        if (made.came.length && made.key === atHand) go({ came: made.came.length }, "replace");
      }
      announce(`${made.came.length} tokens came.`);
    } catch (fault) {
      if (!ending.signal.aborted) setProblem(problemOf(fault));
    } finally {
      setStop(null);
    }
  };
  // An address with tokens that came shows them again: those that this tab has, else generated anew.
  useEffect(() => {
    if (!came || stop || (run?.key === runKey && run.came.length >= came)) return;
    const kept = keptOf(KEPT) as Run | null;
    if (kept?.key === runKey && kept.came.length >= came) setRun((lastRun = kept));
    else void generate(came);
  }, [came, runKey]);
  const submit = () => {
    go({ came: "", token: "", ...(!chat && draft.trim() ? { text: draft === FIRST_TEXT ? "" : draft } : {}) });
    void generate(tokens);
  };
  const predicted = here?.reply.predictions[0];
  const limit = model.max_length;
  const counted = `${here ? `${(here.reply.encoder_labels ?? here.reply.labels).tokens.length} tokens` : ""}${limit ? `; at most ${limit} with those that come` : ""}`;
  return (
    <>
      <Faulty problem={problem ?? next.problem}>
        <form class="sentence" onSubmit={(event) => { event.preventDefault(); if (!stop && (chat || draft.trim())) submit(); }}>
          {chat ? <ChatLine turns={chat} hint={counted} />
            : <TextBox label="Text" hint={counted} value={draft} write={setDraft} done={() => draft.trim() && draft !== text && go({ came: "", token: "", text: draft === FIRST_TEXT ? "" : draft })} />}
          {stop ? <Button class="primary" onClick={() => stop.abort()}>Stop</Button> : <button type="submit" class="primary" disabled={!chat && !draft.trim()}>Generate</button>}
        </form>
        <Controls summary={`${temperature ? `temperature ${temperature.toFixed(2)}` : "the likeliest tokens"}, ${tokens} of them`}>
          <Field label="Temperature" hint={temperature ? temperature.toFixed(2) : "0: the likeliest token"} param="temperature" type="range" min={0} max={2} step={0.05} value={temperature} live set={(each) => go({ came: "", heat: Number(each) ? each : "" }, "slide")} />
          <Field label="Tokens" type="number" param="max_tokens" min={1} max={MOST_TOKENS} value={tokens} set={(each) => go({ came: "", length: each })} />
          {temperature > 0 && <Field label="Seed" type="number" min={0} value={seed} set={(each) => go({ came: "", seed: each })} />}
        </Controls>
      </Faulty>
      {layers.length > 0 && (
        <>
          <Controls summary={headName(String(layers[layer].layer), head)}>
            <Choice label="Layer" value={String(layer)} set={(each) => go({ layer: each, head: "" })} options={layers.map((each, i) => [String(i), String(each.layer)])} />
            <Choice label="Head" value={String(head)} set={(each) => go({ head: each })} options={Array.from({ length: heads }, (_, i) => [String(i), headName(String(layers[layer].layer), i)])} />
          </Controls>
          <fieldset class="chips"><legend>Knocked out in every pass</legend>
            {[...new Set([...knocked, ...Array.from({ length: heads }, (_, i) => `${layers[layer].layer}.${i}`)])].map((each) => {
              const cut = each.lastIndexOf(".");
              const name = headName(each.slice(0, cut), each.slice(cut + 1));
              return <button key={each} type="button" aria-pressed={knocked.includes(each)} aria-label={`Knock out ${name}`} onClick={() => toggle(each)}>{name}</button>;
            })}
          </fieldset>
        </>
      )}
      <ProblemBox problem={problem ?? next.problem} />
      {!here && !next.problem && <Opening id={model.id} cancel={() => opening.current?.abort()} />}
      {run && <Came run={run} refs={layers.map((each) => String(each.layer))} layer={layer} head={head} pointed={pointed} point={point} busy={Boolean(stop)} />}
      {here && predicted && (
        <>
          <h3>The next token after <code>{shownToken(here.reply.labels.tokens.at(-1) ?? "")}</code></h3>
          <Drawing fit scene={nextScene(here.logits, predicted.top, temperature, theme, findingOf(params)?.token)} />
        </>
      )}
      <Commands calls={[run?.request ?? null, here?.request ?? null]} />
    </>
  );
}

/** Probabilities of the likeliest tokens at a temperature; at 0 the likeliest is taken. */
function nextScene(logits: Float32Array, top: Predictions["predictions"][number]["top"], temperature: number, theme: "light" | "dark", ringed?: { id: number; token: string }) {
  const heat = temperature || 1;
  const most = logits.reduce((best, each) => Math.max(best, each), -Infinity);
  const total = logits.reduce((sum, each) => sum + Math.exp((each - most) / heat), 0);
  const shown = ringed && !top.some(({ id }) => id === ringed.id) ? [...top, { ...ringed, logit: logits[ringed.id] }] : top;
  const values = shown.map(({ logit }) => Math.exp((logit - most) / heat) / total);
  return barScene({ theme, title: temperature ? `probability at temperature ${temperature}` : "probability; the likeliest is taken", labels: shown.map(({ token }) => shownToken(token)), values, whole: 1, marked: shown.findIndex(({ id }) => id === ringed?.id) });
}

/** The last run, over changes of the view. */
let lastRun: Run | null = null;
/** What a run would be made of now: the key of the choices at hand. */
let atHand = "";

interface CameProps {
  run: Run;
  /** The names of the layers. */
  refs: string[];
  layer: number;
  head: number;
  pointed: number | null;
  point: (at: number | null) => void;
  busy: boolean;
}

/** The text with the tokens that came; those before the chosen one are as dark as the head looked at them. */
function Came({ run, refs, layer, head, pointed, point, busy }: CameProps) {
  const { params, go, theme } = usePage();
  const { came, edits, prompt: { tokens: prompt, ids } } = run;
  const all = [...prompt, ...came.map(({ of }) => of.token)].map(shownToken);
  const read = (run.read?.tokens ?? []).map(shownToken);
  const layerRef = refs[layer] ?? "0";
  const keysOf = (ref: string) => (ref.startsWith("cross.") ? read : all);
  const clicked = integer(params.token, came.length - 1, 0, Math.max(0, came.length - 1)); // the last at first
  // A request names no tokens of a decoder that follows an encoder.
  const shown = !run.read && refs.length && SHOWN.some(([each]) => each === params.show) ? (params.show ?? "") : "";
  // What is asked of the server waits for a click; what came with a token follows the pointer.
  const own = pointed !== null && pointed < came.length && !shown ? pointed : clicked;
  const chosen = came.at(own);
  const { model } = run.request.body as { model: string };
  const before = [...ids, ...came.slice(0, own).map(({ of }) => of.id)];
  const lookedOf = ({ of: { layers } }: Came) => layers.find((each) => String(each.layer) === layerRef)?.top_keys;
  const looked = chosen && lookedOf(chosen);
  const weights = new Map((looked?.keys[head] ?? []).map((position, i) => [position, looked?.weights[head]?.[i] ?? 0]));
  const name = headName(layerRef, head);
  const keys = keysOf(layerRef);
  const drawn = () => {
    const of = matrix(came.length, keys.length);
    came.map(lookedOf).forEach((top, i) => top?.keys[head].forEach((position, j) => (of.data[i * keys.length + position] = top.weights[head][j])));
    return of;
  };
  /** How a token is drawn that is a key of the chosen one. */
  const shaded = (i: number, of: string[]) => {
    const weight = of === keys ? (weights.get(i) ?? 0) : 0;
    return { style: weight > 0.005 ? { background: colour(theme, weight), color: onColour(theme, weight) } : {}, title: weight ? precise(weight, 3) : undefined };
  };
  const queries = came.map(({ of }) => shownToken(of.token));
  return (
    <section aria-label="Generated text">
      {read.length > 0 && <p class="generated" aria-label="What the encoder read">{read.map((token, i) => <span key={i} {...shaded(i, read)}>{token}</span>)}</p>}
      <p class="generated">
        {all.map((token, i) => {
          const at = i - prompt.length;
          return at < 0
            ? <span key={i} {...shaded(i, all)}>{token}</span>
            : <button key={i} type="button" {...shaded(i, all)} aria-pressed={came[at] === chosen} onClick={() => go({ token: at })} onPointerEnter={(event) => event.pointerType === "mouse" && point(at)} onPointerLeave={() => point(null)} onFocus={() => point(at)} onBlur={() => point(null)}>{token}</button>;
        })}
        {busy && <span class="hint"> …</span>}
      </p>
      {chosen && !busy && !run.read && refs.length > 0 && <div class="fields"><Choice wide label={`Of ${shownToken(chosen.of.token)} show`} value={shown} set={(each) => go({ show: each })} options={SHOWN} /></div>}
      {chosen && !busy && shown === "depends" && <DependsOn model={model} input={{ tokens: before, edits }} of={{ token: chosen.of.id }} at={all[prompt.length + own - 1]} named={(id) => (id === chosen.of.id ? shownToken(chosen.of.token) : undefined)} pick={(row, i) => go({ layer: row, head: i })} />}
      {chosen && !busy && shown === "heads" && <HeadEffects model={model} input={{ tokens: before, edits }} of={{ token: chosen.of.id }} layerRef={layerRef} pick={(ref, i) => go({ layer: refs.indexOf(ref), head: i })} about="Click a cell to see the heads of its layer." />}
      {chosen && (busy || !shown) && (
        <>
          {refs.length > 0 ? (
            <>
              <p class="small">The marked tokens are what {name} looked at, from the token before, when the model chose <code>{shownToken(chosen.of.token)}</code> with probability {precise(Math.exp(chosen.logprob), 3)} (at temperature 1). Point at another new token to see what chose it; click to keep it. The {TOP_KEYS} largest weights of each head are kept.</p>
              <Table caption={`The strongest key of each head for ${shownToken(chosen.of.token)}`} rows={chosen.of.layers} columns={[
                { head: "layer", header: true, cell: (each) => String(each.layer) },
                ...chosen.of.layers.reduce<number[]>((longest, { top_keys: { keys } }) => (keys.length > longest.length ? keys.map((_, i) => i) : longest), []).map((i) => ({
                  head: `H${i}`,
                  cell: ({ layer: each, top_keys: { keys, weights: shares } }: GeneratedToken["layers"][number]) => i < keys.length && <Button class="quiet" aria-label={`${headName(String(each), i)}: ${keysOf(String(each))[keys[i][0]]} ${shares[i][0].toFixed(2)}`} aria-pressed={String(each) === layerRef && i === head} onClick={() => go({ layer: refs.indexOf(String(each)), head: i }, "replace")}>{keysOf(String(each))[keys[i][0]]} {shares[i][0].toFixed(2)}</Button>,
                })),
              ]} />
            </>
          ) : <p class="small">The layers of this model mix tokens by a running state, so that no head looks at a token. Click a token to see the other likely tokens.</p>}
          <Table caption={`The likeliest tokens in the place of ${shownToken(chosen.of.token)}, at temperature 1`} rows={chosen.likeliest} columns={[{ head: "token", header: true, cell: ([token]) => shownToken(token) }, { head: "probability", number: true, cell: ([, logprob]) => precise(Math.exp(logprob), 3) }]} />
          {!busy && refs.length > 0 && <Export of={{ name: "generation", scene: () => heatScene(drawn(), { theme, title: `${name}: what chose each token`, queries, keys }), rows: () => [["token", ...keys], ...queries.map((each, i) => [each, ...Array.from(row(drawn(), i))])], json: () => ({ request: run.request.body, prompt, tokens: came }) }} />}
        </>
      )}
    </section>
  );
}
