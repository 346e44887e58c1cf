/** Effects: each head, query or key of a head knocked out in turn, and the change of the output. */

import { useLoaded, usePage } from "../../page/context";
import { barScene, heatScene } from "../../drawing/drawings";
import { describeEdit, editedFields, noHead, readChanges, wholeEdits, writeEdits } from "../../subjects/edits";
import type { Edit as Change } from "../../subjects/edits";
import { ABOUT_ROUNDING, effect, settled } from "../../numbers/format";
import { MOST_TOKENS } from "../../page/limits";
import { Controls } from "../../parts/controls";
import { HeatMap } from "../../parts/heatmap";
import { Pictured } from "../../parts/pictured";
import { effectsOf } from "../../subjects/live";
import { matrix, matrixRows } from "../../numbers/matrix";
import { integer } from "../../page/state";
import { headName, notComputed, subjectKey } from "../../subjects/subject";
import type { SubjectProps } from "../../subjects/subject";
import { HeadEffects } from "./head_effects";
import { PathEffects } from "./path_effects";
import { Button, Choice, Commands, Drawing, Export, FactList, ProblemBox, RanTable, Table, Waiting } from "../../parts/ui";


interface Sweep {
  label: string;
  edit: Change;
  /** The axes that are swept. */
  over: ("heads" | "queries" | "keys")[];
}

const HEADS: Sweep = { label: "the heads of this layer", edit: { tap: "context", set: 0 }, over: ["heads"] };
const SWEEPS: Record<string, Sweep> = {
  heads: HEADS,
  layers: { ...HEADS, label: "the heads of all layers" },
  queries: { label: "each query of each head", edit: { tap: "context", set: 0 }, over: ["heads", "queries"] },
  keys: { label: "each key of each head", edit: { tap: "weights", set: 0, renormalize: true }, over: ["heads", "keys"] },
};
const MEASURES: [string, string][] = [["relative", "‖change‖ / ‖output‖"], ["norm", "‖change‖"], ["max", "largest |change|"]];

/** The sweep of a whole model, which is its first: each head of all layers, and the change of a prediction. */
const PREDICTION = "prediction";
/** The heads of a layer, as one later component reads each. */
const PATHS = "paths";

/** The choices of a sweep. */
const optionsOf = (many: boolean, predicts: boolean, wide = false): [string, string][] => [
  ...(predicts ? [[PREDICTION, `the heads of ${wide ? "this layer" : "all layers"}: the change of the prediction`], ...(wide ? [] : [[PATHS, "paths from the heads of this layer: the change of the prediction"]])] as [string, string][] : []),
  ...Object.entries(SWEEPS).filter(([each]) => many || each !== "layers").map(([each, { label }]): [string, string] => [each, `${label}${predicts ? ": the change of the attention's output" : ""}`]),
];

export function Effects(props: SubjectProps) {
  const { subject, layer } = props;
  const { params, go, models } = usePage();
  const { whole, layers } = subject;
  const predicts = Boolean(whole?.id && whole.input && models?.find(({ id }) => id === whole.id)?.predicts);
  if (!predicts || !whole?.id || (params.over !== undefined && params.over !== PREDICTION && params.over !== PATHS)) return <OfOutput {...props} predicts={predicts} />;
  const { ref = "", queries, keys, wide = false } = layers[layer];
  const { edits, temperature, causal } = readChanges(params);
  const held = wholeEdits(edits, temperature, causal, queries.length, keys.length);
  const open = (wanted: string, head: number) => {
    const at = layers.findIndex((each) => each.ref === wanted);
    go({ view: "edit", layer: at, head, edits: writeEdits([...(at === layer ? edits : []), noHead(head)]) });
  };
  const along = params.over === PATHS;
  return (
    <>
      <Controls summary={along ? "paths" : wide ? "the heads of this layer" : "the heads of all layers"}><Choice wide label="Knock out in turn" value={along ? PATHS : PREDICTION} set={(over) => go({ over: over === PREDICTION ? "" : over })} options={optionsOf(layers.length > 1, true, wide)} /></Controls>
      {!along && held.length > 0 && <p class="small">On top of the edits of {layers[layer].name}. <Button class="quiet" onClick={() => go({ edits: "", temperature: "", masked: "" })}>Clear them</Button></p>}
      {whole.tokens > MOST_TOKENS.effects
        ? <p>This text has more than {MOST_TOKENS.effects} tokens.</p>
        : along ? <PathEffects model={whole.id} input={{ ...whole.input }} layerRef={ref} later={layers.slice(layer + 1).map((each) => each.ref ?? "")} pick={open} />
        : <HeadEffects model={whole.id} input={{ ...whole.input, ...(held.length ? { edits: { [ref]: held } } : {}) }} layerRef={ref} alone={wide} pick={open} about="Click a cell (or press Enter on it) to see its edit under Edit." />}
    </>
  );
}

/** The change of the output of one attention, or of each layer's own. */
function OfOutput({ subject, layer, predicts }: SubjectProps & { predicts: boolean }) {
  const { params, go, theme } = usePage();
  const many = subject.layers.length > 1;
  const chosen = params.over && params.over in SWEEPS && (many || params.over !== "layers") ? params.over : "heads";
  const { edit, over, label } = SWEEPS[chosen];
  const [measure, formula] = MEASURES.find(([each]) => each === params.measure) ?? MEASURES[0];
  const held = chosen === "layers" ? null : readChanges(params);
  const places = chosen === "layers" ? subject.layers.map((_, i) => i) : [layer];
  const fits = places.every((i) => Math.max(subject.layers[i].queries.length, subject.layers[i].keys.length) <= MOST_TOKENS.effects);
  const axes: [string, string] = chosen === "layers" ? ["layers", "heads"] : ["heads", over[1] ?? measure];
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${chosen === "layers" ? "" : layer}/${chosen}/${JSON.stringify(held)}`, async () => {
    if (!fits) return null;
    const all = await Promise.all(places.map(async (i) => {
      const live = await subject.live(i);
      const changed = held && editedFields(held.edits, held.temperature, held.causal, subject.layers[i].queries.length, subject.layers[i].keys.length);
      return live && effectsOf(live, { sweep: { ...edit, over }, ...changed }, integer(params.sequence, 0));
    }));
    return { all: all.filter((each) => each !== null), chosen, layer };
  });
  // Until the next layer's are there, the effects before with the tokens and names of their own.
  const shown = value?.layer ?? layer;
  const { name, heads, queries, keys } = subject.layers[shown];
  const rows = chosen === "layers" ? subject.layers.map(({ name: each, ref }) => (ref === undefined ? each.replace(/^layers\./, "L") : /^\d+$/.test(ref) ? `L${ref}` : ref)) : heads;
  const most = Math.max(...subject.layers.map((each) => each.heads.length));
  const columns = { heads: [measure], layers: Array.from({ length: most }, (_, i) => headName("", i)), queries, keys }[chosen] ?? [];
  const made = value?.chosen === chosen && value.all.length === places.length ? value.all : null;
  const of = matrix(rows.length, columns.length);
  made?.forEach(({ tensors }, i) => of.data.set(tensors[`effects.${measure}`].data.subarray(0, of.data.length - i * columns.length).map((each, at) => settled(each, tensors["effects.relative"].data[at])), i * columns.length));
  const best = of.data.indexOf(Math.max(...of.data));
  const [row, column] = [Math.floor(best / columns.length), best % columns.length];
  const nameOf = (i: number, j: number) => (chosen === "layers" ? subject.layers[i].heads[j] : [rows[i], ...(over[1] ? [columns[j]] : [])].join(" → "));
  /** The edit of one cell. */
  const open = (i: number, j: number) => {
    const one: Change = { ...edit, heads: [chosen === "layers" ? j : i], ...(over[1] ? { [over[1]]: [j] } : {}) };
    go({ view: "edit", edits: writeEdits([...(held?.edits ?? []), one]), ...(chosen === "layers" ? { layer: i, head: j } : { layer: shown, head: i }) });
  };
  const title = `${formula} by ${label}${many && chosen !== "layers" ? `, ${name}` : ""}`;
  const scene = () => (over[1] || chosen === "layers" ? heatScene(of, { theme, title, queries: rows, keys: columns, axes }) : barScene({ theme, title, labels: rows, values: Array.from(of.data), written: effect }));
  const told = <FactList facts={[["matters most", nameOf(row, column)], ["its effect", effect(of.data[best])], ["edits", String(of.data.length)]]} />;
  return (
    <>
      <div class="fields">
        <Choice wide label="Knock out in turn" value={chosen} set={(each) => go({ over: each === (predicts ? PREDICTION : "heads") ? "" : each })} options={optionsOf(many, predicts)} />
        <Choice label="Measure" value={measure} set={(each) => go({ measure: each === "relative" ? "" : each })} options={MEASURES} />
      </div>
      {held && held.edits.length > 0 && <p class="small">On top of the edits {held.edits.map((each) => describeEdit(each, { heads, queries, keys })).join("; ")}. <Button class="quiet" onClick={() => go({ edits: "" })}>Clear them</Button></p>}
      <ProblemBox problem={problem} />
      {made && <p class="small">{ABOUT_ROUNDING}</p>}
      {!made && busy && <Waiting what={`Asking the server for the effects of ${label}`} />}
      {!made && !problem && !busy && <p>This attention {fits ? notComputed(subject, layer) : `has more than ${MOST_TOKENS.effects} tokens.`}</p>}
      {made && (
        <div aria-busy={busy}>
          <Export of={{ name: "effects", scene, rows: () => [[axes[0], ...columns], ...matrixRows(of, rows, columns).slice(1)], json: () => ({ sweep: { ...edit, over }, measure, rows, columns, effects: rows.map((_, i) => Array.from(of.data.subarray(i * columns.length, (i + 1) * columns.length))) }) }} />
          {over[1] || chosen === "layers" ? (
            <Pictured columns={columns.length} picture={<HeatMap of={of} queries={rows} keys={columns} title={title} axes={axes} pick={({ query, key }) => open(query, key)} />}>
              {told}
              <p class="small">Click a cell (or press Enter on it) to see its edit under Edit.{chosen === "layers" ? " For each layer it is the output of that layer's attention that changes." : ""}</p>
            </Pictured>
          ) : (
            <Pictured first={told} picture={<Drawing fit scene={scene()} />}>
              <Table caption={title} rows={rows} columns={[
                { head: "head", header: true, cell: (each) => each },
                { head: measure, number: true, cell: (_, i) => effect(of.data[i]) },
                { head: <span class="hidden">actions</span>, cell: (each, i) => <Button class="quiet" aria-label={`Edit without ${each}`} onClick={() => open(i, 0)}>Edit</Button> },
              ]} />
            </Pictured>
          )}
          <RanTable rans={{ effects: made[0].ran }} />
          <Commands calls={made.map((each) => each.request)} />
        </div>
      )}
    </>
  );
}
