/** Interventions: knock out heads, tokens and cells, and see what changes. */

import { useLoaded, usePage } from "../../page/context";
import { Controls } from "../../parts/controls";
import { barScene, heatScene } from "../../drawing/drawings";
import { describeEdit, editedFields, has, noCell, noHead, noToken, readChanges, toggled, wholeEdits, writeEdits } from "../../subjects/edits";
import type { Edit as Change } from "../../subjects/edits";
import { ABOUT_ROUNDING, effect, placed, settled } from "../../numbers/format";
import { MOST_TOKENS } from "../../page/limits";
import { HeatMap } from "../../parts/heatmap";
import { Pictured } from "../../parts/pictured";
import { forwardOf, headOf } from "../../subjects/live";
import type { Rows } from "../../subjects/live";
import { difference, matrixRows } from "../../numbers/matrix";
import { integer } from "../../page/state";
import { headTitle, notComputed, subjectKey } from "../../subjects/subject";
import type { SubjectProps } from "../../subjects/subject";
import { Button, Check, Commands, Drawing, Export, FactList, Field, ProblemBox, RanTable, Table, Waiting } from "../../parts/ui";
import { Logits, layerKey } from "./logits";


/** The change of a length relative to it, of the squares of both. */
const relative = (moved: number, size: number) => settled(Math.sqrt(moved / (size || 1)));

/** For each token, the length of its output's change, and of its output. Outputs of several heads lie one after the other. */
function changes(before: Rows, after: Rows, tokens: number): { token: number[]; whole: number } {
  const moved = new Float64Array(tokens);
  const size = new Float64Array(tokens);
  before.forEach((row, i) => {
    row.forEach((value, j) => {
      moved[i % tokens] += (after[i][j] - value) ** 2;
      size[i % tokens] += value ** 2;
    });
  });
  const token = Array.from(moved, (each, i) => relative(each, size[i]));
  const sum = (of: Float64Array) => of.reduce((a, b) => a + b, 0);
  return { token, whole: relative(sum(moved), sum(size)) };
}

export function Edit({ subject, layer, head }: SubjectProps) {
  const { params, go, theme } = usePage();
  const attention = subject.layers[layer];
  const { edits, temperature, causal } = readChanges(params);
  const toggle = (edit: Change) => go({ edits: writeEdits(toggled(edits, edit)) });
  const none = !edits.length && temperature === 1 && !causal;
  const fits = Math.max(attention.queries.length, attention.keys.length) <= MOST_TOKENS.edit;
  const { value, problem, busy } = useLoaded(`${subjectKey(params)}/${layer}/${head}/${params.edits ?? ""}/${temperature}/${causal}`, async () => {
    const live = fits ? await subject.live(layer) : null;
    if (!live) return null;
    const sequence = integer(params.sequence, 0);
    const taps = { return: ["weights", "output"], ...(attention.heads.length > 1 ? { select: { heads: [head] } } : {}) };
    const changed = editedFields(edits, temperature, causal, attention.queries.length, attention.keys.length);
    const [plain, edited] = await Promise.all([forwardOf(live, taps, sequence), forwardOf(live, { ...taps, ...changed }, sequence)]);
    const [before, after] = [headOf(plain.tensors.weights, 0), headOf(edited.tensors.weights, 0)];
    const output = changes(plain.taps.output ?? [], edited.taps.output ?? [], attention.queries.length);
    return { none, layer, head, before, after, less: difference(after, before), output, plain, edited };
  });
  const shown = value ?? { layer, head }; // until the next attention is there, the one before with its own tokens and names
  const { name, heads, queries, keys } = subject.layers[shown.layer];
  const label = headTitle(subject, shown.layer, shown.head);
  const chip = (text: string, edit: Change, about: string) => (
    <button key={about} type="button" aria-pressed={has(edits, edit)} aria-label={about} onClick={() => toggle(edit)}>{text}</button>
  );
  const prediction = (at: number) => {
    const { name: edited, ref } = subject.layers[at];
    return subject.whole && <Logits of={subject.whole} layer={edited} layerRef={ref ?? layerKey(edited)} edits={wholeEdits(edits, temperature, causal, queries.length, keys.length)} />;
  };
  const rows = () => placed(queries).map((each, i): [string, number] => [each, value?.output.token[i] ?? 0]);
  return (
    <>
      <Controls summary={`${edits.length} ${edits.length === 1 ? "edit" : "edits"}, temperature ${temperature.toFixed(2)}${causal ? ", causal" : ""}`} class="changes">
      {heads.length > 1 && <fieldset class="chips"><legend>Heads</legend>{heads.map((each, i) => chip(each, noHead(i), `Knock out ${each}`))}</fieldset>}
      {!attention.implicit && <fieldset class="chips"><legend>Tokens</legend>{keys.slice(0, 64).map((each, i) => chip(each, noToken(i), `Hide token ${i} ${each}`))}</fieldset>}
        {!attention.implicit && <Field label="Temperature" hint={temperature.toFixed(2)} type="range" min={-2} max={2} step={0.05} value={Math.log2(temperature)} live set={(each) => go({ temperature: Math.abs(Number(each)) < 0.02 ? "" : (2 ** Number(each)).toFixed(3) }, "slide")} />}
        {!attention.implicit && <Check label="Hide later keys (causal mask)" value={causal} set={(each) => go({ masked: each ? "1" : "" })} />}
        <Button disabled={none} onClick={() => go({ edits: "", temperature: "", masked: "" })}>Clear all</Button>
      </Controls>
      {edits.length > 0 && <ul class="small">{edits.map((each, i) => <li key={i}><code>{describeEdit(each, { heads, queries, keys })}</code> <Button class="quiet" aria-label={`Remove ${describeEdit(each, { heads, queries, keys })}`} onClick={() => toggle(each)}>Remove</Button></li>)}</ul>}
      <ProblemBox problem={problem} />
      {!value && busy && <Waiting what={`Asking the server for the attention of ${name}`} />}
      {!value && !problem && !busy && (
        <>
          <p>This attention {fits ? notComputed(subject, layer) : `has more than ${MOST_TOKENS.edit} tokens.`}{subject.whole?.id && none ? " Knock out a head above to see the change of the prediction." : ""}</p>
          {subject.whole?.id && !none && prediction(layer)}
        </>
      )}
      {value?.none && (
        <figure aria-busy={busy}>
          <p>Nothing is changed yet. Knock out a head or a token above, or click a cell of the weights to hide that key from that query: <Button onClick={() => toggle(noHead(shown.head))}>Take {label} away</Button></p>
          <figcaption>{label}</figcaption>
          <HeatMap of={value.before} queries={queries} keys={keys} title={label} pick={({ query, key }) => toggle(noCell(shown.head, query, key))} />
        </figure>
      )}
      {value && !value.none && (
        <div aria-busy={busy}>
          <Export of={{ name: "edit", scene: () => heatScene(value.less, { theme, title: `${label}: edited less unedited`, queries, keys, signed: true }), rows: () => matrixRows(value.after, queries, keys), json: () => ({ edits, temperature, causal, output: value.output, weights: Array.from(value.after.data) }) }} />
          <Pictured first={<>
            {prediction(shown.layer)}
            <FactList facts={[["change of the whole output", effect(value.output.whole)], ["largest change of a token's output", effect(Math.max(...value.output.token))]]} />
          </>} picture={<>
          <div class="side">
            <figure><figcaption>edited, {label}</figcaption><HeatMap of={value.after} queries={queries} keys={keys} title={`${label}, edited`} pick={({ query, key }) => toggle(noCell(shown.head, query, key))} /></figure>
            <figure><figcaption>edited less unedited</figcaption><HeatMap of={value.less} queries={queries} keys={keys} title="the difference" signed /></figure>
          </div>
          <p class="small">Click a cell of the edited weights (or press Enter on it) to hide that key from that query in this head; the remaining keys share its weight. {ABOUT_ROUNDING}</p>
          </>}>
            <Drawing fit scene={barScene({ theme, title: "‖change of the output‖ / ‖output‖", labels: placed(queries), values: value.output.token, written: effect })} />
            <Table caption={`Change of the output of ${queries.length} tokens${subject.layers.length > 1 || !params.source?.startsWith("module:") ? ", before the output projection" : ""}`} rows={rows()} columns={[{ head: "token", header: true, cell: ([each]) => each }, { head: "relative change", number: true, cell: ([, each]) => effect(each) }]} />
          </Pictured>
          <RanTable rans={{ unedited: value.plain.ran, edited: value.edited.ran }} />
          <Commands calls={[value.edited.request, value.plain.request]} />
        </div>
      )}
    </>
  );
}

