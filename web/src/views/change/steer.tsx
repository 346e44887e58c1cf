/** A text continued with a steering vector beside the same text without it, and log p of each token. */

import { useEffect, useState } from "preact/hooks";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { precise } from "../../numbers/format";
import { matrix } from "../../numbers/matrix";
import { decimal, integer } from "../../page/state";
import { continued, continuing, parting, promptOf } from "../../subjects/continuations";
import type { Continuation, ContinuedToken } from "../../subjects/continuations";
import { FIRST_TEXT, shownToken } from "../../subjects/model_subject";
import { refOf } from "../../subjects/subject";
import { useFits } from "../../parts/model/fits";
import { ModelChoice } from "../../parts/model_choice";
import { ReadTokens } from "../../parts/model/read_tokens";
import { Opening } from "../../parts/sentence";
import { ChatLine, TextBox } from "../../parts/texts";
import { Controls } from "../../parts/controls";
import type { ModelInfo } from "../../server/types";
import { Choice, Commands, Export, Faulty, Field, ProblemBox, Table, Waiting } from "../../parts/ui";
import { OF_VECTOR, Vectors } from "./vectors";
import type { VectorInfo } from "./vectors";

const FIRST_SCALE = 4;
const MOST_SCALE = 20; // of the slider; another number can be typed
const TOKENS = { first: 12, most: 64 };
const RESTS_MS = 200; // of a slider, after which its scale is asked for
const BEGINS: [string, string][] = [["", "the prompt on"], ["answer", "the first new token on"]];

const reads = ({ takes }: ModelInfo) => takes.includes("text");
const PREDICTS = { own: "the token in each place", class: "classes" } as const;

export const Steer = () => (
  <ModelChoice able={reads} none="The server has no whole model that reads text, or no transformers." own={[...OF_VECTOR, "scale"]}>
    {(model) => (model.generates ? <Steered key={model.id} model={model} />
      : <p class="empty">{model.id} does not continue a text{model.predicts === "own" || model.predicts === "class" ? `: it predicts ${PREDICTS[model.predicts]}` : ""}. Choose another model to steer.</p>)}
  </ModelChoice>
);

/** The layers of a vector behind which the model is steered while it writes; none until those of the model are known. */
function layersOf({ layers }: ModelInfo, vector: VectorInfo): { steered: string[]; others: string[] } {
  const steered: string[] = [];
  const others: string[] = [];
  for (const { layer } of vector.layers) {
    const known = layers.find((each) => String(each.layer) === String(layer));
    const able = (known?.kind ?? "attention") === "attention" && known?.edits?.includes("hidden");
    if (layers.length) (able ? steered : others).push(String(layer));
  }
  return { steered, others };
}

function Steered({ model }: { model: ModelInfo }) {
  const { params, go, refreshModels } = usePage();
  const { chat, text } = promptOf(params, model);
  const [draft, setDraft] = useState(text);
  useEffect(() => setDraft(text), [text]);
  const fits = useFits<VectorInfo>(model.id, "vectors", (id) => id === params.vector && go({ vector: "", behind: "" }));
  const vector = fits.ready.find(({ id }) => id === params.vector);
  const scale = decimal(params.scale, FIRST_SCALE, -Infinity, Infinity);
  const most = integer(params.length, TOKENS.first, 1, TOKENS.most);
  const begin = params.begin === "answer" ? "answer" : "";
  const { steered: able, others } = vector ? layersOf(model, vector) : { steered: [], others: [] };
  const named = (params.behind ?? "").split(",").filter((each) => able.includes(each));
  const behind = named.length ? named : able;
  const prompt = JSON.stringify([model.id, chat ?? text, most]);
  const plainRequest = continuing(model, params, most);
  const steeredRequest = vector && behind.length ? continuing(model, params, most, { statistics: [], steer: [{ vector: vector.id, scale, layers: behind.map(refOf) }], ...(begin && { from: begin }) }) : null;
  const plain = useLoaded(prompt, async (signal) => {
    const made = await continued(plainRequest, signal);
    if (model.state !== "resident" || !model.layers.length) void refreshModels();
    return made;
  });
  const key = steeredRequest ? JSON.stringify(steeredRequest.body) : "";
  const steered = useLoaded(key, async (signal) => {
    if (!steeredRequest) return null;
    await new Promise((rested) => setTimeout(rested, RESTS_MS));
    return signal.aborted ? null : { of: await continued(steeredRequest, signal), key };
  });
  const toggle = (layer: string) => {
    const next = behind.includes(layer) ? behind.filter((each) => each !== layer) : able.filter((each) => each === layer || behind.includes(each));
    if (next.length) go({ behind: next.length === able.length ? "" : next.join() });
  };
  const submit = () => { if (chat || draft.trim()) go({ text: draft === FIRST_TEXT ? "" : draft }); };
  const shown = steered.value?.key === key || steered.busy ? steered.value : null;
  return (
    <>
      <Faulty problem={steered.problem ?? plain.problem}>
        <form class="sentence" onSubmit={(event) => { event.preventDefault(); submit(); }}>
          {chat ? <ChatLine turns={chat} /> : <TextBox label="Text" value={draft} write={setDraft} />}
          {!chat && <button type="submit" class="primary" disabled={!draft.trim()}>Continue</button>}
        </form>
        <Vectors fits={fits} id={model.id} chosen={params.vector} />
        {vector && <Controls summary={`times ${scale} behind ${behind.join(", ")}`}>
          <Field label="Scale" hint={`times ${scale}`} param="scale" type="range" min={-Math.max(MOST_SCALE, Math.abs(scale))} max={Math.max(MOST_SCALE, Math.abs(scale))} step={0.5} value={scale} live set={(each) => go({ scale: each }, "slide")} />
          <Field label="or a number" param="scale" type="number" step={0.5} value={scale} set={(each) => go({ scale: each })} />
          <Choice label="Steered from" value={begin} set={(each) => go({ begin: each })} options={BEGINS} />
          <Field label="Tokens" param="max_tokens" type="number" min={1} max={TOKENS.most} value={most} set={(each) => go({ length: each })} />
        </Controls>}
        {vector && able.length > 1 && <fieldset class="chips chosen"><legend>Added behind layer</legend>
          {able.map((each) => <button key={each} type="button" aria-pressed={behind.includes(each)} aria-label={`Layer ${each}`} onClick={() => toggle(each)}>{each}</button>)}
        </fieldset>}
        {others.length > 0 && <p class="small">Not behind {others.length > 1 ? "layers" : "layer"} {others.join(", ")}: {reasonOf(model, others[0])}.</p>}
      </Faulty>
      <ProblemBox problem={plain.problem ?? steered.problem} />
      {!plain.value && !plain.problem && <Opening id={model.id} cancel={() => undefined} />}
      {plain.value && <Both key={model.id} plain={plain.value} steered={shown?.of ?? null} busy={plain.busy || (steeredRequest !== null && steered.busy)} waits={vector !== undefined && (steeredRequest !== null || !model.layers.length) && !steered.problem} scale={scale} requests={[plainRequest, steeredRequest]} />}
    </>
  );
}

/** Why a layer is not steered while tokens come. */
function reasonOf({ layers }: ModelInfo, ref: string): string {
  const layer = layers.find((each) => String(each.layer) === ref);
  return layer?.refused?.hidden ?? (layer && layer.kind !== "attention" ? "it mixes tokens by a running state, which is not edited while tokens come" : "the model does not read the text there");
}

const saidOf = ({ logprob, likeliest }: ContinuedToken) => `log p ${precise(logprob, 3)}, p ${precise(Math.exp(logprob), 2)}; likeliest ${likeliest.map(([token, each]) => `${shownToken(token)} ${precise(Math.exp(each), 2)}`).join(", ")}`;

interface BothProps {
  plain: Continuation;
  steered: Continuation | null;
  busy: boolean;
  /** The steered continuation is under way, or there. */
  waits: boolean;
  scale: number;
  requests: [ApiRequest, ApiRequest | null];
}

/** Both continuations side by side. */
function Both({ plain, steered, busy, waits, scale, requests }: BothProps) {
  const { theme } = usePage();
  const [at, read] = useState<number | null>(null);
  const sides: { name: string; of: Continuation }[] = [{ name: "without", of: plain }, ...(steered ? [{ name: `with the vector times ${scale}`, of: steered }] : [])];
  const rows = Array.from({ length: Math.max(...sides.map(({ of }) => of.tokens.length)) }, (_, i) => i);
  const surprise = ({ logprob }: ContinuedToken) => (logprob === 0 ? 0 : -logprob);
  const most = Math.max(1, ...sides.flatMap(({ of }) => of.tokens.map(surprise)));
  const parts = steered ? parting(plain, steered) : null;
  const numbers = matrix(sides.length, rows.length, Float32Array.from(sides.flatMap(({ of }) => rows.map((i) => { const each = of.tokens.at(i); return each ? surprise(each) : 0; }))));
  const cell = (of: Continuation, i: number) => (i < of.tokens.length ? shownToken(of.tokens[i].token) : "");
  const number = (of: Continuation, i: number) => (i < of.tokens.length ? precise(of.tokens[i].logprob, 3) : "");
  return (
    <div aria-busy={busy}>
      <div class="side">
        {sides.map(({ name, of }) => (
          <section key={name.split(" ")[0]} aria-label={`The continuation ${name}`}>
            <h3>{name[0].toUpperCase()}{name.slice(1)}</h3>
            <ReadTokens label={`The continuation ${name}`} tokens={of.tokens.map((each) => ({ name: shownToken(each.token), value: surprise(each), said: saidOf(each) }))} most={most} at={at} read={read} />
          </section>
        ))}
        {!steered && waits && <Waiting what="Asking for the steered continuation" />}
      </div>
      <p class="small">Both take the likeliest token each time. The darker a token, the less likely it was, with its own tokens before it.{steered ? (parts === null ? " Both are the same." : ` They part at token ${parts + 1}.`) : waits ? "" : " Choose or fit a steering vector to see the text continued with it."}</p>
      <Export of={{
        name: "steer",
        scene: () => heatScene(numbers, { theme, title: "−log p of each token", queries: sides.map(({ name }) => name), keys: rows.map((i) => String(i + 1)), axes: ["continuations", "tokens"] }),
        rows: () => [["token", ...sides.flatMap(({ name }) => [name, `log p ${name}`])], ...rows.map((i) => [i + 1, ...sides.flatMap(({ of }) => [cell(of, i), of.tokens.at(i)?.logprob ?? ""])])],
        json: () => ({ requests: requests.flatMap((each) => (each ? [each.body] : [])), continuations: Object.fromEntries(sides.map(({ name, of }) => [name, of])) }),
      }} />
      <Table caption="Token by token" rows={rows} columns={[
        { head: "token", header: true, number: true, cell: (i) => i + 1 },
        ...sides.flatMap(({ name, of }) => [
          { head: name, cell: (i: number) => (parts === i ? <b>{cell(of, i)}</b> : cell(of, i)) },
          { head: "log p", number: true, title: `log p of the token ${name}`, cell: (i: number) => number(of, i) },
        ]),
      ]} />
      <Commands calls={requests} />
    </div>
  );
}
