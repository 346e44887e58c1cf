/** A linear probe: how well each layer tells labelled texts apart, and its score at each token of a text and of what follows. */

import { useEffect, useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { intervalScene } from "../../drawing/intervals";
import { placed, precise } from "../../numbers/format";
import { largest, matrix } from "../../numbers/matrix";
import { decimal, integer } from "../../page/state";
import { continued, continuing, promptOf } from "../../subjects/continuations";
import type { Continuation } from "../../subjects/continuations";
import { FIRST_TEXT, shownToken } from "../../subjects/model_subject";
import { useFits } from "../../parts/model/fits";
import { ModelChoice } from "../../parts/model_choice";
import { Pictured } from "../../parts/pictured";
import { ReadTokens } from "../../parts/model/read_tokens";
import { Opening } from "../../parts/sentence";
import { ChatLine, TextBox } from "../../parts/texts";
import type { ModelInfo, ModelLabels } from "../../server/types";
import { Check, Commands, Drawing, Export, Faulty, Field, ProblemBox, Table } from "../../parts/ui";
import { Probes, featureOf, scoring, watches } from "./probes";
import type { ProbeInfo } from "./probes";

const TOKENS = { first: 16, most: 64 };

const reads = ({ takes }: ModelInfo) => takes.includes("text");

export const Probe = () => (
  <ModelChoice able={reads} none="The server has no whole model that reads text, or no transformers." own={["probe", "above", "after"]}>
    {(model) => <Probed key={model.id} model={model} />}
  </ModelChoice>
);

function Probed({ model }: { model: ModelInfo }) {
  const { params, go, refreshModels } = usePage();
  const fits = useFits<ProbeInfo>(model.id, "probes", (id) => id === params.probe && go({ probe: "" }));
  const probe = fits.ready.find(({ id }) => id === params.probe);
  const fitted = Boolean(fits.done) && !model.layers.length;
  useEffect(() => {
    if (fitted) void refreshModels(); // its layers are known now
  }, [fitted]);
  return (
    <>
      <Probes fits={fits} model={model} chosen={params.probe} />
      {probe && <>
        <Layers probe={probe} />
        {watches(probe) ? <Scored key={probe.id} model={model} probe={probe} />
          : <p>This is a probe of {featureOf(probe)}. Probes of hidden, output and mlp score tokens.</p>}
      </>}
    </>
  );
}

/** The AUC of each layer, and the threshold. */
function Layers({ probe }: { probe: ProbeInfo }) {
  const { theme } = usePage();
  const rows = probe.layers.map((each) => ({ name: each.layer === null || each.layer === undefined ? "all layers" : String(each.layer), chosen: each.layer === probe.layer, value: each.auc ?? NaN, low: each.auc_low ?? NaN, high: each.auc_high ?? NaN, threshold: each.threshold ?? NaN }));
  const known = rows.filter(({ value }) => Number.isFinite(value));
  const scene = intervalScene(known.map(({ name, value, low, high }) => ({ label: name, value, low, high })), { theme, title: `AUC of ${featureOf(probe)}`, across: "layer", reference: { value: 0.5, label: "chance" }, marked: known.findIndex(({ chosen }) => chosen) });
  const table = (
    <Table caption="By layer" rows={rows} columns={[
      { head: "layer", header: true, cell: ({ name, chosen }) => (chosen ? <b title="it scores at this layer">{name} ←</b> : name) },
      { head: "AUC", number: true, cell: ({ value }) => precise(value, 3) },
      { head: "95 % interval", number: true, cell: ({ low, high }) => (Number.isFinite(low) ? `${precise(low, 3)} to ${precise(high, 3)}` : "—") },
      { head: "threshold", number: true, title: "the score above which at most the given share of the texts with label 0 lies", cell: ({ threshold }) => precise(threshold, 3) },
    ]} />
  );
  if (!known.length) return table;
  return (
    <>
      <Export of={{ name: "probe", label: "AUC by layer", scene: () => scene, rows: () => [["layer", "auc", "auc_low", "auc_high", "threshold"], ...rows.map(({ name, value, low, high, threshold }) => [name, value, low, high, threshold])], json: () => probe }} />
      <Pictured picture={<Drawing fit scene={scene} />}>{table}</Pictured>
      <p class="small">The chance that a text with label 1 scores above one with label 0, measured on texts that the probe was not fitted to, with its interval of 95 %. The arrow is at the layer that scores tokens.{probe.false_positive_rate ? ` At most ${Number((100 * probe.false_positive_rate).toPrecision(3))} % of the samples with label 0 score above the threshold.` : ""}</p>
    </>
  );
}

interface ForwardReply {
  labels: ModelLabels;
  encoder_labels?: ModelLabels;
  watched: { scores: number[] }[];
}

/** The scores of the tokens of a text, and of those that follow it. */
function Scored({ model, probe }: { model: ModelInfo; probe: ProbeInfo }) {
  const { params, go } = usePage();
  const { chat, text } = promptOf(params, model);
  const [draft, setDraft] = useState(text);
  useEffect(() => setDraft(text), [text]);
  const encodes = String(probe.layer).startsWith("encoder.");
  const threshold = scoring(probe)?.threshold ?? 0;
  const writes = model.generates && !encodes;
  const follows = writes && params.follow === "yes";
  const most = integer(params.length, TOKENS.first, 1, TOKENS.most);
  const stops = params.above !== undefined;
  const above = decimal(params.above, threshold, -Infinity, Infinity);
  const after = integer(params.after, 0);
  const read: ApiRequest & { body: object } = { method: "POST", path: `v1/models/${encodeURIComponent(model.id)}/forward`, body: { ...(chat ? { messages: chat } : { text }), top_k: 0, watch: [{ probe: probe.id }] } };
  const write = follows ? continuing(model, params, most, { statistics: [], watch: [{ probe: probe.id, ...(stops && { stop: { above, after } }) }] }) : null;
  const { value: own, problem, busy } = useLoaded(JSON.stringify(read.body), (signal) => call<ForwardReply>(read.method, read.path, read.body, signal));
  const key = write ? JSON.stringify(write.body) : "";
  const came = useLoaded(key, async (signal) => (write ? { of: await continued(write, signal), key } : null));
  const submit = () => { if (chat || draft.trim()) go({ text: draft === FIRST_TEXT ? "" : draft }); };
  return (
    <>
      <h3>Scores of tokens</h3>
      <Faulty problem={came.problem ?? problem}>
        <form class="sentence" onSubmit={(event) => { event.preventDefault(); submit(); }}>
          {chat ? <ChatLine turns={chat} /> : <TextBox label="Text" value={draft} write={setDraft} />}
          {!chat && <button type="submit" class="primary" disabled={!draft.trim()}>Score</button>}
        </form>
        {writes ? (
          <div class="fields">
            <Check label="Score what follows too" value={follows} set={(on) => go({ follow: on ? "yes" : "" })} />
            {follows && <>
              <Field label="Tokens" param="max_tokens" type="number" min={1} max={TOKENS.most} value={most} set={(each) => go({ length: each })} />
              <Check label="End the text by the score" value={stops} set={(on) => go(on ? { above: Number(threshold.toPrecision(3)) } : { above: "", after: "" })} />
              {stops && <>
                <Field label="Above" param="attention.watch.0.stop.above" type="number" step={0.1} value={above} set={(each) => go({ above: each || 0 })} />
                <Field label="After" hint="tokens" param="attention.watch.0.stop.after" type="number" min={0} value={after} set={(each) => go({ after: each })} />
              </>}
            </>}
          </div>
        ) : <p class="small">{model.generates ? `Layer ${probe.layer} reads the text, and not the tokens that are generated.` : `${model.id} does not continue a text.`}</p>}
      </Faulty>
      <ProblemBox problem={problem ?? came.problem} />
      {!own && !problem && <Opening id={model.id} cancel={() => undefined} />}
      {own && <Scores busy={busy || (follows && came.busy)} probe={probe} threshold={threshold} tokens={(encodes ? own.encoder_labels : undefined)?.tokens ?? own.labels.tokens} scores={own.watched[0].scores} came={follows ? (came.value?.of ?? null) : null} requests={[read, write]} />}
    </>
  );
}

interface ScoresProps {
  busy: boolean;
  probe: ProbeInfo;
  threshold: number;
  tokens: string[];
  scores: number[];
  came: Continuation | null;
  requests: (ApiRequest | null)[];
}

const ENDS: Partial<Record<string, string>> = { length: "As many tokens came as were asked for.", stop: "The model ended the text." };

function Scores({ busy, probe, threshold, tokens, scores, came, requests }: ScoresProps) {
  const { theme } = usePage();
  const [at, read] = useState<number | null>(null);
  const [later, readLater] = useState<number | null>(null);
  const own = tokens.map((token, i) => ({ name: shownToken(token), value: scores[i], new: false }));
  const next = (came?.tokens ?? []).map(({ token, scores: of }) => ({ name: shownToken(token), value: of?.[probe.id] ?? NaN, new: true }));
  const all = [...own, ...next];
  // The state of the first token is often far from all others.
  const most = largest(all.slice(all.length > 2 ? 1 : 0).map(({ value }) => value)) || 1;
  const said = (value: number) => `score ${precise(value, 3)}${value > threshold ? ", above the threshold" : ""}`;
  const row = (of: typeof all) => of.map(({ name, value }) => ({ name, value, said: said(value) }));
  const stopped = came?.stopped;
  return (
    <div aria-busy={busy}>
      <ReadTokens label="The tokens of the text" tokens={row(own)} most={most} signed at={at} read={read} />
      {came && <>
        <h4>What follows</h4>
        <ReadTokens label="The tokens that follow" tokens={row(next)} most={most} signed at={later} read={readLater} />
        <p role="status">{stopped ? `The probe ended the text: its score was ${precise(stopped.score, 3)} for ${next.at(stopped.token)?.name ?? ""}, token ${stopped.token + 1}.` : ENDS[came.finish ?? ""]}</p>
      </>}
      <p class="small">Orange is a score above 0, as texts with label 1 have, and blue one below.{came ? " A token of the text has the score of its own state, and one that follows that of the state before, which chose it." : ""} Colours end at the largest score after the first token.</p>
      <Export of={{
        name: "probe-scores",
        label: "scores of the tokens",
        scene: () => heatScene(matrix(1, all.length, Float32Array.from(all, ({ value }) => value)), { theme, title: `scores of ${featureOf(probe)} at layer ${probe.layer}`, queries: ["score"], keys: placed(all.map(({ name }) => name)), signed: true }),
        rows: () => [["token", "text", "score"], ...all.map(({ name, value, new: follows }, i) => [i, follows ? `${name} (follows)` : name, value])],
        json: () => ({ probe: probe.id, threshold, tokens: all, ...(stopped && { stop_reason: stopped }) }),
      }} />
      <Table caption="Scores of the tokens" rows={all} columns={[
        { head: "token", header: true, number: true, cell: (_, i) => i },
        { head: "text", cell: ({ name }) => name },
        { head: "score", number: true, cell: ({ value }) => precise(value, 3) },
        { head: "above the threshold", cell: ({ value }) => (value > threshold ? "yes" : "no") },
        ...(came ? [{ head: "from", cell: ({ new: follows }: (typeof all)[number]) => (follows ? "what follows" : "the text") }] : []),
      ]} />
      <Commands calls={requests} />
    </div>
  );
}
