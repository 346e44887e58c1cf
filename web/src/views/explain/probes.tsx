/** The linear probes of a model: the choice of one, the fit of a new one to labelled texts, and their removal. */

import { useState } from "preact/hooks";
import { usePage } from "../../page/context";
import { bytes, precise, short } from "../../numbers/format";
import { FIRST_LABELLED, readLabelled } from "../../subjects/labelled";
import { FitActions, FitState } from "../../parts/model/fits";
import type { Fit, Fits } from "../../parts/model/fits";
import { Answer } from "../../parts/work";
import type { ModelInfo } from "../../server/types";
import { Area, Choice, Faulty, Field, ProblemBox, Table } from "../../parts/ui";

export interface ProbeInfo extends Fit {
  /** A state of each token, statistics of heads, or the share along a steering vector. */
  of: { point?: string; statistics?: string[]; vector?: string };
  method?: string | null;
  texts: number;
  false_positive_rate?: number | null;
  /** The layer at which it scores. */
  layer?: number | string | null;
  layers: { layer?: number | string | null; auc?: number | null; auc_low?: number | null; auc_high?: number | null; threshold?: number | null }[];
  bytes: number;
}

/** The points at which a probe scores tokens while a model reads and writes. */
const POINTS: [string, string][] = [["hidden", "the state after the layer"], ["output", "what its attention returns"], ["mlp", "what its MLP adds"]];
const POSITIONS: [string, string][] = [["all", "each token, with the label of its text"], ["last", "the last token"], ["mean", "the mean over the tokens"]];
const METHODS: [string, string][] = [["logistic", "logistic regression"], ["ridge", "ridge regression"]];

/** What a probe reads. */
export const featureOf = ({ of }: ProbeInfo): string => (of.statistics ? `statistics: ${of.statistics.join(", ")}` : of.vector ? `steering vector ${short(of.vector)}` : (of.point ?? ""));
/** True for a probe that scores tokens. */
export const watches = ({ of }: ProbeInfo) => of.vector !== undefined || POINTS.some(([point]) => point === of.point);
/** The layer at which a probe scores. */
export const scoring = ({ layer, layers }: ProbeInfo) => layers.find((each) => each.layer === layer) ?? layers.at(0);

const nameOf = (each: ProbeInfo) => `${short(each.id)}, ${featureOf(each)}${each.layer === null || each.layer === undefined ? "" : ` of layer ${each.layer}`}`;
const aucOf = (each: ProbeInfo) => precise(scoring(each)?.auc ?? NaN, 3);

export function Probes({ fits, model, chosen }: { fits: Fits<ProbeInfo>; model: ModelInfo; chosen: string | undefined }) {
  const { go } = usePage();
  const { all, ready, listed, unlisted, busy, problem, done, end } = fits;
  const choose = (probe: string) => go({ probe, above: "", after: "" });
  const options: [string, string][] = [["", "none"], ...ready.map((each): [string, string] => [each.id, nameOf(each)])];
  const unknown = listed && !busy && chosen !== undefined && !ready.some(({ id }) => id === chosen);
  if (chosen && !ready.some(({ id }) => id === chosen)) options.push([chosen, short(chosen)]);
  return (
    <>
      <div class="fields"><Choice wide label="Probe" value={chosen ?? ""} options={options} set={choose} /></div>
      {unknown && <p role="status">You have no probe {short(chosen)} of {model.id}. Choose another, or fit one.</p>}
      <details class="more probes" open={listed && !(chosen && all.length)}>
        <summary>Probes{all.length > 0 && `: ${all.length}`}</summary>
        <p class="small">A linear probe is a direction in the states of a layer that tells texts with the label 1 from texts with the label 0. It scores a token by w · x + b. Fitted to last tokens alone, it knows no others, and scores them all the same.</p>
        <ProblemBox problem={unlisted} />
        {all.length > 0 && <Table caption={`Probes of ${model.id}`} quiet rows={all} columns={[
          { head: "probe", header: true, cell: (each) => short(each.id) },
          { head: "of", cell: featureOf },
          { head: "layer", cell: ({ layer }) => layer ?? "—" },
          { head: "AUC", number: true, cell: (each) => aucOf(each) },
          { head: "state", cell: (each) => <FitState of={each} /> },
          { head: <span class="hidden">actions</span>, cell: (each) => <FitActions of={each} word="Show" chosen={each.id === chosen} choose={() => choose(each.id)} end={end} /> },
          { head: "texts", number: true, cell: ({ texts }) => texts || "—" },
          { head: "method", cell: ({ method }) => METHODS.find(([name]) => name === method)?.[1] ?? "—" },
          { head: "bytes", number: true, cell: (each) => (each.bytes ? bytes(each.bytes) : "—") },
        ]} />}
        <NewProbe fits={fits} model={model} choose={choose} />
        <Answer problem={problem} done={done} />
      </details>
    </>
  );
}

/** The labelled texts that were written: kept while other views are shown. */
let written = FIRST_LABELLED;

/** The points that the layers of a model have. */
const pointsOf = ({ layers }: ModelInfo) => POINTS.filter(([point]) => layers.every(({ taps }) => !taps || taps.includes(point)));

function NewProbe({ fits: { busy, problem, fit }, model, choose }: { fits: Fits<ProbeInfo>; model: ModelInfo; choose: (probe: string) => void }) {
  const [draft, setDraft] = useState(written);
  const [asked, ask] = useState({ point: "hidden", positions: "all", method: "logistic", folds: "5", rate: "0.05" });
  const write = (name: keyof typeof asked) => (value: string) => ask({ ...asked, [name]: value });
  const { texts, labels, missing } = readLabelled(draft, Number(asked.folds));
  const submit = () => {
    const body = { of: { point: asked.point, layer: "all" }, texts, labels, positions: asked.positions, method: asked.method, folds: Number(asked.folds), false_positive_rate: Number(asked.rate) };
    fit(body, (made) => {
      choose(made.id);
      return `Fitted a probe to ${texts.length} texts; layer ${made.layer ?? "—"} tells them apart best, with an AUC of ${aucOf(made)}.`;
    });
  };
  return (
    <Faulty problem={problem}>
      <form onSubmit={(event) => { event.preventDefault(); if (!missing && !busy) submit(); }}>
        <Area label="Labelled texts" hint="one a line: 0 or 1, a space or a tab, the text" param="texts" rows={6} wrap live value={draft} set={(text) => setDraft((written = text))} />
        <div class="fields">
          <Choice label="States" value={asked.point} set={write("point")} options={pointsOf(model)} />
          <Choice label="Of" value={asked.positions} set={write("positions")} options={POSITIONS} />
          <Choice label="Method" value={asked.method} set={write("method")} options={METHODS} />
          <Field label="Folds" param="folds" type="number" min={2} max={20} value={asked.folds} live set={write("folds")} />
          <Field label="False positives" hint="at most" param="false_positive_rate" type="number" min={0.001} max={0.999} step={0.001} value={asked.rate} live set={write("rate")} />
          <button type="submit" class="primary" disabled={busy || Boolean(missing)}>{busy ? "Fitting…" : "Fit a probe"}</button>
          <output>{missing || `${texts.length} texts`}</output>
        </div>
      </form>
    </Faulty>
  );
}
