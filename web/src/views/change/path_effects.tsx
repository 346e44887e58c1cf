/** The effect of each path from the heads of a layer to later components, through the residual stream alone. */

import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { effect, real, settled } from "../../numbers/format";
import { matrix, matrixRows } from "../../numbers/matrix";
import { shownToken } from "../../subjects/model_subject";
import { headName, refOf } from "../../subjects/subject";
import type { Body } from "../../server/tensors";
import type { PathEnd } from "../../server/types";
import { Controls } from "../../parts/controls";
import { HeatMap } from "../../parts/heatmap";
import { Pictured } from "../../parts/pictured";
import { Choice, Commands, Export, FactList, ProblemBox, Waiting } from "../../parts/ui";
import { effectsOnPrediction } from "./head_effects";

interface PathEffectsProps {
  model: string;
  input: Body;
  /** The key of the layer whose heads are the beginnings, and the keys of the layers after it. */
  layerRef: string;
  later: string[];
  /** A head at a beginning was chosen. */
  pick: (layerRef: string, head: number) => void;
}

const ENDS: [string, string][] = [["k", "keys of a later layer"], ["q", "queries of a later layer"], ["v", "values of a later layer"], ["others", "MLPs and logits"]];
const AXES: [string, string] = ["from", "to"];

/** A component in a few letters. */
function endName({ part, layer, head }: PathEnd): string {
  if (layer == null) return part;
  if (head == null) return `MLP ${layer}`;
  return `${headName(layer, head)}${part === "heads" ? "" : ` ${part}`}`;
}

export function PathEffects({ model, input, layerRef, later, pick }: PathEffectsProps) {
  const { params, go, theme } = usePage();
  const ends = later.length ? ENDS : ENDS.slice(3);
  const [part] = ends.find(([each]) => each === params.ends) ?? ends[0];
  const end = later.find((each) => each === params.end) ?? later[0];
  const to = part === "others" ? { parts: ["mlps", "logits"] } : { parts: [part], layer: refOf(end) };
  const request: ApiRequest = { method: "POST", path: `v1/models/${encodeURIComponent(model)}/effects`, body: { ...input, from: { layer: refOf(layerRef) }, to } };
  const key = JSON.stringify(request);
  const { value, problem, busy } = useLoaded(key, async (signal) => ({ request, reply: await effectsOnPrediction(request, signal) }));
  const controls = (
    <Controls summary="the ends of the paths">
      <Choice label="Ends of the paths" value={part} set={(each) => go({ ends: each === ends[0][0] ? "" : each })} options={ends} />
      {part !== "others" && later.length > 1 && <Choice label="Their layer" value={end} set={(each) => go({ end: each === later[0] ? "" : each })} options={later.map((each): [string, string] => [each, each])} />}
    </Controls>
  );
  if (problem) return <>{controls}<ProblemBox problem={problem} /></>;
  if (!value) return <>{controls}<Waiting what="Asking the server for the effect of each path" /></>;
  const { swept: { from = [], to: all = [] }, baseline, effects, token_names: [token = ""] = [] } = value.reply;
  const shown = all.map((_, i) => i).filter((i) => effects.value.some((row) => Number.isFinite(row[i])));
  const of = matrix(from.length, shown.length, Float32Array.from(effects.value.flatMap((row) => shown.map((i) => row[i])), (each) => settled(-each)));
  const rows = from.map(endName);
  const columns = shown.map((i) => endName(all[i]));
  const best = of.data.reduce((most, each, i) => (Math.abs(each) > Math.abs(of.data[most]) ? i : most), 0);
  const log = `log p(${shownToken(token)})`;
  const title = `${log} lost without each path`;
  return (
    <div aria-busy={busy}>
      {controls}
      <Export of={{ name: "path_effects", label: title, scene: () => heatScene(of, { theme, title, queries: rows, keys: columns, axes: AXES, signed: true }), rows: () => [["from", ...columns], ...matrixRows(of, rows, columns).slice(1)], json: () => value.reply }} />
      <Pictured columns={columns.length} picture={<HeatMap of={of} queries={rows} keys={columns} title={title} axes={AXES} signed pick={({ query }) => pick(layerRef, from[query].head ?? 0)} />}>
      <p class="small">Each path takes the output of one head out of the input of one later component; every other component still reads it. Orange: the prediction loses log p without the path. Click a cell (or press Enter on it) to see the edit of its head under Edit.</p>
      <FactList facts={[[log, real(baseline)], ["matters most", `${rows[Math.floor(best / columns.length)]} → ${columns[best % columns.length]}`], [title, effect(of.data[best])], ["paths in one request", String(of.data.length)]]} />
      </Pictured>
      <Commands calls={[value.request]} />
    </div>
  );
}
