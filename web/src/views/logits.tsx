/** Predictions of a whole model, unedited and with the edits of one of its attentions. */

import { useState } from "preact/hooks";
import { call, problemOf } from "../api";
import type { Asked, ProblemDocument } from "../api";
import { useLoaded, usePage } from "../context";
import { barScene } from "../drawings";
import type { Edit } from "../edits";
import { precise } from "../format";
import { integer } from "../state";
import type { Whole } from "../subject";
import type { CheckpointInfo, Predictions } from "../types";
import { Choice, Commands, Drawing, ProblemBox, Table } from "../ui";

const MOST_TEXT = 2000;

/** The checkpoint of a recording: its model's name is the last part of the checkpoint's path. */
const named = (model: string, all: CheckpointInfo[]) =>
  all.find(({ path, records_text }) => records_text && (path === model || path.endsWith(`/${model}`)))?.path;

export function Logits({ of, layer, edits }: { of: Whole; layer: string; edits: Edit[] }) {
  const { params, go, theme, announce } = usePage();
  const [busy, setBusy] = useState(false);
  const [made, setMade] = useState<{ key: string; value: Predictions; asked: Asked } | null>(null);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const { value: checkpoint } = useLoaded(of.model, async () => ({ path: named(of.model, (await call<{ checkpoints: CheckpointInfo[] }>("GET", "v1/checkpoints")).checkpoints) }));
  if (!checkpoint) return null;
  if (!checkpoint.path || of.text.length > MOST_TEXT) {
    return <p class="small">The change of the model's logits is not known here: {checkpoint.path ? `the text has more than ${MOST_TEXT} characters.` : `the server has no checkpoint ${of.model} with its tokenizer in its model repository, or no transformers.`}</p>;
  }
  const body = { checkpoint: checkpoint.path, text: of.text, ...(of.target ? { target: of.target } : {}), edits: { [layer]: edits }, ...(params.at ? { position: integer(params.at, 0) } : {}) };
  const key = JSON.stringify(body);
  const ask = async (position?: string) => {
    const wanted = position === undefined ? body : { ...body, position: Number(position) };
    setBusy(true);
    setProblem(null);
    try {
      const asked: Asked = { method: "POST", path: "v1/recordings/predictions", body: wanted };
      setMade({ key: JSON.stringify(wanted), value: await call<Predictions>(asked.method, asked.path, wanted), asked });
      announce("The predictions are there.");
    } catch (fault) {
      setProblem(problemOf(fault));
    } finally {
      setBusy(false);
    }
  };
  const shown = made?.key === key ? made.value : null;
  return (
    <section aria-busy={busy}>
      <h3>Logits</h3>
      <div class="fields">
        <button type="button" class="primary" disabled={busy} onClick={() => void ask()}>{busy ? "Asking…" : "Ask the whole model"}</button>
        {shown && <Choice label="Prediction of" value={String(shown.position)} options={shown.tokens.map((token, i): [string, string] => [String(i), `${i} ${token}`])} set={(at) => { go({ at }); void ask(at); }} />}
      </div>
      <ProblemBox problem={problem} />
      {!shown && !problem && <p class="small">The server runs {checkpoint.path} twice, without and with these edits of {layer}. It takes some seconds.</p>}
      {shown && made && (
        <>
          <p>{shown.predicts === "next" ? "The token that follows" : "The token in the place of"} <code>{shown.tokens[shown.position]}</code>:</p>
          <div class="side">
            <Table caption="Likeliest tokens, unedited and edited" rows={shown.top} columns={[
              { head: "token", header: true, cell: ({ token }) => token },
              { head: "unedited", number: true, cell: (each) => precise(each.probability) },
              { head: "edited", number: true, cell: (each) => precise(each.edited_probability) },
              { head: "logit", number: true, cell: (each) => precise(each.logit) },
              { head: "its change", number: true, cell: (each) => precise(each.edited_logit - each.logit) },
            ]} />
            <Drawing fit scene={barScene({ theme, title: "divergence of each token's prediction, nats", labels: shown.tokens.slice(0, 40), values: shown.divergence.slice(0, 40) })} />
          </div>
          <Commands calls={[made.asked]} />
        </>
      )}
    </section>
  );
}
