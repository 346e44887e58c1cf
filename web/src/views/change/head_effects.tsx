/** The effect of each head of all layers on one prediction of a whole model: each adds nothing in turn, in one request. */

import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { barScene, heatScene } from "../../drawing/drawings";
import { effect, precise, real, settled } from "../../numbers/format";
import { matrix, matrixRows } from "../../numbers/matrix";
import { shownToken } from "../../subjects/model_subject";
import { headName, refOf } from "../../subjects/subject";
import type { Body } from "../../server/tensors";
import type { EffectsReply } from "../../server/types";
import { Controls } from "../../parts/controls";
import { HeatMap } from "../../parts/heatmap";
import { Pictured } from "../../parts/pictured";
import { Choice, Commands, Drawing, Export, FactList, ProblemBox, Table, Waiting } from "../../parts/ui";

interface HeadEffectsProps {
  model: string;
  /** The input of the request, with edits of its own. */
  input: Body;
  /** The prediction, as in a request for gradients; without it that of the likeliest token at the end. */
  of?: Body;
  /** The key of the layer whose heads are told one by one. */
  layerRef: string;
  /** True for the heads of that layer alone: all layers have too many. */
  alone?: boolean;
  /** A head was chosen. */
  pick: (layerRef: string, head: number) => void;
  /** What a click on a head does. */
  about: string;
}

const KEPT = 16;
const kept = new Map<string, EffectsReply>();
const AXES: [string, string] = ["layers", "heads"];

/** Ask for the effects; what was asked lately is remembered. */
export async function effectsOnPrediction({ method, path, body }: ApiRequest, signal: AbortSignal): Promise<EffectsReply> {
  const key = JSON.stringify([path, body]);
  const made = kept.get(key) ?? (await call<EffectsReply>(method, path, body, signal));
  kept.delete(key);
  kept.set(key, made);
  for (const oldest of kept.keys()) {
    if (kept.size <= KEPT) break;
    kept.delete(oldest);
  }
  return made;
}

export function HeadEffects({ model, input, of, layerRef, alone = false, pick, about }: HeadEffectsProps) {
  const { params, go, theme } = usePage();
  const request: ApiRequest = { method: "POST", path: `v1/models/${encodeURIComponent(model)}/effects`, body: { ...input, ...(of ? { of } : {}), ...(alone ? { layers: [refOf(layerRef)] } : {}), sweep: { tap: "context", set: 0, over: ["layers", "heads"] } } };
  const key = JSON.stringify(request);
  const { value, problem, busy } = useLoaded(key, async (signal) => ({ key, request, reply: await effectsOnPrediction(request, signal) }));
  if (problem) return <ProblemBox problem={problem} />;
  if (!value) return <Waiting what="Asking the server for the effect of each head" />;
  const { swept: { layers: refs = [], heads: swept = [] }, baseline, effects, token_names: [token = ""] = [] } = value.reply;
  const log = `log p(${shownToken(token)})`;
  const measures: [string, string][] = [["value", `${log} lost without the head`], ...(effects.divergence ? [["divergence", "divergence of the prediction, nats"] as [string, string]] : [])];
  const [measure, title] = measures.find(([each]) => each === params.by_effect) ?? measures[0];
  const signed = measure === "value";
  const lost = effects.value.map((row) => row.map((each) => -each)); // what helps is above 0, as in Context and Gradient
  const numbers = (signed ? lost : effects.divergence) ?? [];
  const all = matrix(refs.length, swept.length, Float32Array.from(numbers.flat(), (each) => (Number.isFinite(each) ? settled(each) : 0)));
  const rows = refs.map((ref) => (/^\d+$/.test(String(ref)) ? `L${ref}` : String(ref)));
  const columns = swept.map((head) => headName("", head));
  const best = all.data.reduce((most, each, i) => (Math.abs(each) > Math.abs(all.data[most]) ? i : most), 0);
  const at = Math.max(0, refs.findIndex((ref) => String(ref) === layerRef));
  const heads = swept.filter((_, i) => Number.isFinite(effects.value[at]?.[i]));
  const names = heads.map((head) => headName(refs[at], head));
  const losses = heads.map((head) => settled(lost[at][swept.indexOf(head)]));
  return (
    <div aria-busy={busy}>
      <Controls summary={title}><Choice wide label="Effect" value={measure} set={(each) => go({ by_effect: each === "value" ? "" : each })} options={measures} /></Controls>
      <Export of={{ name: "head_effects", label: title, scene: () => heatScene(all, { theme, title, queries: rows, keys: columns, axes: AXES, signed }), rows: () => [["layer", ...columns], ...matrixRows(all, rows, columns).slice(1)], json: () => value.reply }} />
      <Pictured columns={columns.length} picture={<>
        <HeatMap of={all} queries={rows} keys={columns} title={title} axes={AXES} signed={signed} pick={({ query, key: head }) => pick(String(refs[query]), swept[head])} />
        <p class="small">Each head of each layer adds nothing in turn. {signed ? "Orange: the prediction loses log p without the head, so the head helps it. Blue: the prediction gains. " : ""}{about}</p>
      </>}>
      <FactList facts={[[log, real(baseline)], ["matters most", headName(refs[Math.floor(best / swept.length)], swept[best % swept.length])], [title, effect(all.data[best])], ["edits in one request", String(all.data.length)]]} />
      {names.length > 1 && (
        <div class="side">
          <Drawing fit scene={barScene({ theme, title: `${log} lost without a head`, labels: names, values: losses, signed: true, written: effect })} />
          <Table caption={`The heads of ${rows[at]}, each taken away`} rows={heads} columns={[
            { head: "head", header: true, cell: (_, i) => names[i] },
            { head: "log p without", number: true, cell: (_, i) => real(baseline - losses[i]) },
            { head: "probability without", number: true, cell: (_, i) => precise(Math.exp(baseline - losses[i]), 3) },
            { head: "lost", number: true, cell: (_, i) => effect(losses[i]) },
          ]} />
        </div>
      )}
      </Pictured>
      <Commands calls={[value.request]} />
    </div>
  );
}
