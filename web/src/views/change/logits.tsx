/** Predictions of a whole model, unedited and with the edits of one of its attentions. */

import { useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { barScene } from "../../drawing/drawings";
import type { Edit } from "../../subjects/edits";
import { effect, placed, precise, settled } from "../../numbers/format";
import { MOST_TOKENS } from "../../page/limits";
import { shownToken } from "../../subjects/model_subject";
import { integer } from "../../page/state";
import type { Whole } from "../../subjects/subject";
import type { ModelInfo, Predictions } from "../../server/types";
import { Choice, Commands, Drawing, FactList, ProblemBox, Table, Waiting } from "../../parts/ui";

/** The model of a recording: its name is the last part of the checkpoint's path. */
const named = (model: string, all: ModelInfo[]) =>
  all.find(({ checkpoint, refused }) => !refused && (checkpoint === model || checkpoint.endsWith(`/${model}`)))?.id;

/** The key of an attention of a recording in a request to its model: `3`, `decoder.3` or `cross.3`. */
export const layerKey = (layer: string) => {
  const [stack, number, cross] = layer.split(".");
  return cross ? `cross.${number}` : stack === "layers" ? number : layer;
};

type Prediction = Predictions["predictions"][number];

/** The likeliest token of the unedited run with its probability in both, and the one that is likeliest now, if it is another. */
function turned({ top }: Prediction, named: (token: string) => string): [string, string][] {
  const likeliest = (probability: (each: Prediction["top"][number]) => number) => top.reduce((best, each) => (probability(each) > probability(best) ? each : best));
  const [before, now] = [likeliest((each) => each.unedited_probability), likeliest((each) => each.probability)];
  const fact = (each: Prediction["top"][number]) => `${precise(each.unedited_probability, 3)} → ${precise(each.probability, 3)}`;
  return [[`probability of ${named(before.token)}`, fact(before)], ...(now.id !== before.id ? [[`now likeliest: ${named(now.token)}`, fact(now)] as [string, string]] : [])];
}

export function Logits({ of, layer, layerRef, edits }: { of: Whole; layer: string; layerRef: string; edits: Edit[] }) {
  const { params, go, theme } = usePage();
  const { tokens } = of;
  const [asked, ask] = useState("");
  const { value: model } = useLoaded(of.model, async () => ({ id: of.id ?? named(of.model, (await call<{ data: ModelInfo[] }>("GET", "v1/models")).data) }));
  const positions = Array.from({ length: tokens }, (_, at) => at);
  const body = { ...(of.input ?? { text: of.text, ...(of.target ? { target: of.target } : {}) }), edits: { [layerRef]: edits }, compare: "unedited", ...(of.predicts === null || of.predicts === "class" ? {} : { positions }) };
  const request: ApiRequest = { method: "POST", path: `v1/models/${encodeURIComponent(model?.id ?? "")}/forward`, body };
  const key = JSON.stringify(request);
  const fits = tokens <= MOST_TOKENS.logits;
  const wanted = fits && Boolean(model?.id) && (of.id !== undefined || asked === key); // a model that is not resident is loaded when somebody asks
  const { value, problem, busy } = useLoaded(wanted ? key : "", async (signal) => (wanted ? { key, reply: await call<Predictions>(request.method, request.path, body, signal) } : null));
  if (!model) return null;
  if (!model.id || !fits) {
    return <p class="small">The change of the model's logits is not known here: {model.id ? `the text has more than ${MOST_TOKENS.logits} tokens.` : `the server has no checkpoint ${of.model} in its model repository, or no transformers.`}</p>;
  }
  const shown = wanted ? value?.reply ?? null : null; // until the next is there, the prediction before
  const at = integer(params.at, tokens - 1, 0, tokens - 1);
  const several = shown !== null && shown.predictions.length > 1;
  const one = shown?.predictions.find(({ position }) => position === at) ?? shown?.predictions[0];
  const diverging = shown?.predictions.filter(({ divergence }) => divergence != null) ?? [];
  const place = (position: number) => shownToken(shown?.labels.tokens[position] ?? "");
  return (
    <section aria-busy={busy}>
      <h3>Prediction</h3>
      <div class="fields">
        {!wanted && <button type="button" class="primary" onClick={() => ask(key)}>Ask the whole model</button>}
        {several && one && <Choice label="Prediction of" value={String(one.position)} options={shown.predictions.map(({ position }): [string, string] => [String(position), `${position} ${place(position)}`])} set={(chosen) => go({ at: chosen })} />}
      </div>
      <ProblemBox problem={problem} />
      {busy && !shown && <Waiting what="Asking the whole model with and without the edits" />}
      {!wanted && <p class="small">The server runs {model.id} twice, without and with these edits of {layer}. If the model is not resident, it is loaded first.</p>}
      {shown && one && (
        <>
          {shown.predicts === "class" ? <p>The classes of {several ? <code>{place(one.position)}</code> : "the text"}:</p> : <p>{shown.predicts === "next" ? "The token that follows" : "The token in the place of"} <code>{place(one.position)}</code>:</p>}
          <FactList facts={turned(one, shown.predicts === "class" ? (token) => token : shownToken)} />
          <div class="side">
            <Table caption={`Likeliest ${shown.predicts === "class" ? "classes" : "tokens"}, unedited and edited`} rows={one.top} columns={[
              { head: shown.predicts === "class" ? "class" : "token", header: true, cell: ({ token }) => (shown.predicts === "class" ? token : shownToken(token)) },
              { head: "unedited", number: true, cell: (each) => precise(each.unedited_probability) },
              { head: "edited", number: true, cell: (each) => precise(each.probability) },
              { head: "logit", number: true, cell: (each) => precise(each.unedited_logit) },
              { head: "its change", number: true, cell: (each) => precise(each.logit - each.unedited_logit) },
            ]} />
            {diverging.length > 1 && <Drawing fit scene={barScene({ theme, title: "divergence of each token's prediction, nats", labels: placed(diverging.map(({ position }) => place(position))), values: diverging.map((each) => settled(each.divergence ?? 0)), written: effect })} />}
          </div>
          <Commands calls={[request]} />
        </>
      )}
    </section>
  );
}
