/** A whole model that continues a typed text: its next token, the tokens as they come, and what each head looked at. */

import { useEffect, useRef, useState } from "preact/hooks";
import { callTensors, events, problemOf } from "../api";
import type { Asked, ProblemDocument } from "../api";
import { colour, onColour } from "../colour";
import { useLoaded, usePage } from "../context";
import { barScene, heatScene } from "../drawings";
import { noHead } from "../edits";
import type { Edit } from "../edits";
import { precise } from "../format";
import { FIRST_TEXT, shownToken } from "../model_subject";
import { matrix } from "../matrix";
import { Opening } from "../sentence";
import { integer } from "../state";
import type { CompletionChunk, GeneratedToken, ModelInfo, ModelLabels, Predictions } from "../types";
import { Button, Choice, Commands, Drawing, Export, Field, Faulty, ProblemBox, Table } from "../ui";

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
  came: Came[];
  /** The tokens of the prompt. */
  prompt: string[];
  asked: Asked;
}

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

const headName = (ref: string, head: number | string) => (/^\d+$/.test(ref) ? `L${ref}H${head}` : `${ref} H${head}`);

export function Generation({ model }: { model: ModelInfo }) {
  const { params, go, theme, announce, refreshModels } = usePage();
  const [run, setRun] = useState<Run | null>(null);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [stop, setStop] = useState<AbortController | null>(null);
  const [at, choose] = useState<number | null>(null); // the chosen token, of those that came; null: the last
  const opening = useRef<AbortController>(undefined);
  useEffect(() => () => stop?.abort(), [stop]);
  const text = params.text ?? FIRST_TEXT;
  const [draft, setDraft] = useState(text);
  useEffect(() => setDraft(text), [text]);
  const temperature = Number(params.heat ?? 0);
  const tokens = integer(params.length, 24, 1, MOST_TOKENS);
  const knocked = readKnocked(params.knocked);
  const edits = editsOf(knocked);
  const path = `v1/models/${encodeURIComponent(model.id)}/forward`;
  const key = JSON.stringify([model.id, text, edits]);
  // The next token: the logits of the whole vocabulary give its probabilities at any temperature.
  const next = useLoaded(key, async () => {
    opening.current = new AbortController();
    const body = { text, edits, top_k: LIKELIEST, return: ["logits"] };
    const { reply, tensors } = await callTensors<Predictions & { labels: ModelLabels }>(path, body, opening.current.signal);
    if (!model.layers.length) void refreshModels();
    return { key, reply, logits: tensors.logits.data, asked: { method: "POST", path, body } satisfies Asked };
  });
  const here = next.value?.key === key ? next.value : null;
  const layer = integer(params.layer, 0, 0, Math.max(0, model.layers.length - 1));
  const heads = model.layers.length ? model.layers[layer].heads : 0;
  const head = integer(params.head, 0, 0, Math.max(0, heads - 1));
  const toggle = (each: string) => go({ knocked: (knocked.includes(each) ? knocked.filter((one) => one !== each) : [...knocked, each]).join(",") });
  const generate = async () => {
    const ending = new AbortController();
    const written = draft.trim() ? draft : text;
    const body = { model: model.id, prompt: written, max_tokens: tokens, temperature, ...(temperature ? { seed: integer(params.seed, 0) } : {}), logprobs: 5, attention: { statistics: [], top_k: TOP_KEYS, edits } };
    const asked: Asked = { method: "POST", path: "v1/completions", body };
    setStop(ending);
    setProblem(null);
    choose(null);
    try {
      const prompt = here && written === text ? here.reply.labels.tokens : (await callTensors<{ labels: ModelLabels }>(path, { text: written, top_k: 0 })).reply.labels.tokens;
      let made: Run = { came: [], prompt, asked };
      setRun(made);
      for await (const { choices: [choice] } of events<CompletionChunk>("v1/completions", body, ending.signal)) {
        const { logprobs } = choice;
        const came = (choice.attention ?? []).map((of, i): Came => ({ of, logprob: logprobs?.token_logprobs[i] ?? NaN, likeliest: Object.entries(logprobs?.top_logprobs[i] ?? {}) }));
        made = { ...made, came: [...made.came, ...came] };
        setRun(made);
      }
      announce(`${made.came.length} tokens came.`);
    } catch (fault) {
      if (!ending.signal.aborted) setProblem(problemOf(fault));
    } finally {
      setStop(null);
    }
  };
  const submit = () => {
    if (draft.trim() && draft !== text) go({ text: draft === FIRST_TEXT ? "" : draft });
    void generate();
  };
  const predicted = here?.reply.predictions[0];
  const limit = model.max_length;
  return (
    <>
      <Faulty problem={problem ?? next.problem}>
        <form class="sentence" onSubmit={(event) => { event.preventDefault(); submit(); }}>
          <label class="wide"><span>Text <span class="hint">{here ? `${here.reply.labels.tokens.length} tokens` : ""}{limit ? `; at most ${limit} with those that come` : ""}</span></span>
            <input type="text" value={draft} autocomplete="off" spellcheck={false} onInput={(event) => setDraft(event.currentTarget.value)} onChange={() => draft.trim() && go({ text: draft === FIRST_TEXT ? "" : draft })} /></label>
          {stop ? <Button class="primary" onClick={() => stop.abort()}>Stop</Button> : <button type="submit" class="primary" disabled={!draft.trim()}>Generate</button>}
        </form>
        <div class="fields">
          <Field label="Temperature" hint={temperature ? temperature.toFixed(2) : "0: the likeliest token"} param="temperature" type="range" min={0} max={2} step={0.05} value={temperature} live set={(each) => go({ heat: Number(each) ? each : "" }, "slide")} />
          <Field label="Tokens" type="number" param="max_tokens" min={1} max={MOST_TOKENS} value={tokens} set={(each) => go({ length: each })} />
          {temperature > 0 && <Field label="Seed" type="number" min={0} value={integer(params.seed, 0)} set={(seed) => go({ seed })} />}
        </div>
      </Faulty>
      {model.layers.length > 0 && (
        <>
          <div class="fields">
            <Choice label="Layer" value={String(layer)} set={(each) => go({ layer: each, head: "" })} options={model.layers.map((each, i) => [String(i), String(each.layer)])} />
            <Choice label="Head" value={String(head)} set={(each) => go({ head: each })} options={Array.from({ length: heads }, (_, i) => [String(i), headName(String(model.layers[layer].layer), i)])} />
          </div>
          <fieldset class="chips"><legend>Knocked out in every pass</legend>
            {[...new Set([...knocked, ...Array.from({ length: heads }, (_, i) => `${model.layers[layer].layer}.${i}`)])].map((each) => {
              const cut = each.lastIndexOf(".");
              const name = headName(each.slice(0, cut), each.slice(cut + 1));
              return <button key={each} type="button" aria-pressed={knocked.includes(each)} aria-label={`Knock out ${name}`} onClick={() => toggle(each)}>{name}</button>;
            })}
          </fieldset>
        </>
      )}
      <ProblemBox problem={problem ?? next.problem} />
      {!here && !next.problem && <Opening id={model.id} cancel={() => opening.current?.abort()} />}
      {run && <Came run={run} layerRef={String(model.layers[layer]?.layer ?? 0)} layer={layer} head={head} at={at} choose={choose} busy={Boolean(stop)} />}
      {here && predicted && (
        <>
          <h3>The next token after <code>{shownToken(here.reply.labels.tokens.at(-1) ?? "")}</code></h3>
          <Drawing fit scene={nextScene(here.logits, predicted.top, temperature, theme)} />
        </>
      )}
      <Commands calls={[run?.asked ?? null, here?.asked ?? null]} />
    </>
  );
}

/** Probabilities of the likeliest tokens at a temperature; at 0 the likeliest is taken. */
function nextScene(logits: Float32Array, top: Predictions["predictions"][number]["top"], temperature: number, theme: "light" | "dark") {
  const heat = temperature || 1;
  const most = logits.reduce((best, each) => Math.max(best, each), -Infinity);
  const total = logits.reduce((sum, each) => sum + Math.exp((each - most) / heat), 0);
  const values = top.map(({ logit }) => Math.exp((logit - most) / heat) / total);
  return barScene({ theme, title: temperature ? `probability at temperature ${temperature}` : "probability; the likeliest is taken", labels: top.map(({ token }) => shownToken(token)), values });
}

interface CameProps {
  run: Run;
  layerRef: string;
  layer: number;
  head: number;
  at: number | null;
  choose: (at: number | null) => void;
  busy: boolean;
}

/** The text with the tokens that came; those before the chosen one are as dark as the head looked at them. */
function Came({ run, layerRef, layer, head, at, choose, busy }: CameProps) {
  const { go, theme } = usePage();
  const { came, prompt } = run;
  const all = [...prompt, ...came.map(({ of }) => of.token)].map(shownToken);
  const chosen = at !== null && at < came.length ? came[at] : came.at(-1);
  const looked = chosen?.of.layers[layer]?.top_keys;
  const weights = new Map((looked?.keys[head] ?? []).map((position, i) => [position, looked?.weights[head]?.[i] ?? 0]));
  const name = headName(layerRef, head);
  const drawn = () => {
    const of = matrix(came.length, all.length);
    came.forEach(({ of: { layers } }, i) => layers[layer].top_keys.keys[head].forEach((position, j) => (of.data[i * all.length + position] = layers[layer].top_keys.weights[head][j])));
    return of;
  };
  const queries = came.map(({ of }) => shownToken(of.token));
  return (
    <section aria-label="Generated text">
      <p class="generated">
        {all.map((token, i) => {
          const weight = weights.get(i) ?? 0;
          const own = i - prompt.length;
          const style = weight > 0.005 ? { background: colour(theme, weight), color: onColour(theme, weight) } : {};
          return own < 0
            ? <span key={i} style={style} title={weight ? precise(weight, 3) : undefined}>{token}</span>
            : <button key={i} type="button" style={style} title={weight ? precise(weight, 3) : undefined} aria-pressed={came[own] === chosen} onClick={() => choose(own)} onPointerEnter={(event) => event.pointerType === "mouse" && choose(own)} onFocus={() => choose(own)}>{token}</button>;
        })}
        {busy && <span class="hint"> …</span>}
      </p>
      {chosen && (
        <>
          <p class="small">To choose <code>{shownToken(chosen.of.token)}</code>, with probability {precise(Math.exp(chosen.logprob), 3)} at temperature 1, {name} looked from the token before it at those that are marked. Point at another token that came to see what chose it; each head's {TOP_KEYS} largest weights are kept.</p>
          <Table caption={`The strongest key of each head for ${shownToken(chosen.of.token)}`} rows={chosen.of.layers} columns={[
            { head: "layer", header: true, cell: (each) => String(each.layer) },
            ...chosen.of.layers.reduce<number[]>((longest, { top_keys: { keys } }) => (keys.length > longest.length ? keys.map((_, i) => i) : longest), []).map((i) => ({
              head: `H${i}`,
              cell: ({ layer: each, top_keys: { keys, weights: shares } }: GeneratedToken["layers"][number], row: number) => i < keys.length && <Button class="quiet" aria-label={`${headName(String(each), i)}: ${all[keys[i][0]]} ${shares[i][0].toFixed(2)}`} aria-pressed={row === layer && i === head} onClick={() => go({ layer: row, head: i }, "replace")}>{all[keys[i][0]]} {shares[i][0].toFixed(2)}</Button>,
            })),
          ]} />
          <Table caption={`The likeliest tokens in the place of ${shownToken(chosen.of.token)}, at temperature 1`} rows={chosen.likeliest} columns={[{ head: "token", header: true, cell: ([token]) => shownToken(token) }, { head: "probability", number: true, cell: ([, logprob]) => precise(Math.exp(logprob), 3) }]} />
          {!busy && <Export of={{ name: "generation", scene: () => heatScene(drawn(), { theme, title: `${name}: what chose each token`, queries, keys: all }), rows: () => [["token", ...all], ...queries.map((each, i) => [each, ...Array.from(drawn().data.subarray(i * all.length, (i + 1) * all.length))])], json: () => ({ request: run.asked.body, prompt, tokens: came }) }} />}
        </>
      )}
    </section>
  );
}
