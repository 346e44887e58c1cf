/** The steering vectors of a model: the choice of one, the fit of a new one to texts of two sides, and their removal. */

import { useEffect, useState } from "preact/hooks";
import { usePage } from "../../page/context";
import type { Params } from "../../page/state";
import { bytes, precise, short } from "../../numbers/format";
import { FIRST_SIDES, METHODS, POSITIONS, readSides } from "../../subjects/sides";
import type { Sides } from "../../subjects/sides";
import { FitActions, FitState } from "../../parts/model/fits";
import type { Fit, Fits } from "../../parts/model/fits";
import { Answer } from "../../parts/work";
import { Area, Button, Choice, Faulty, ProblemBox, Table } from "../../parts/ui";

export interface VectorInfo extends Fit {
  created: string;
  source: "texts" | "directions" | "gguf";
  method?: string | null;
  positive: number;
  negative: number;
  layers: { layer: number | string; norm: number }[];
  bytes: number;
}

const FIELDS = ["positive", "negative", "position", "method"] as const;
/** The parameters that belong to one vector. */
export const OF_VECTOR = ["vector", "behind", ...FIELDS];
const NONE = Object.fromEntries(OF_VECTOR.map((name) => [name, ""]));

const madeOf = ({ source, positive, negative }: VectorInfo) => (source === "texts" ? `${positive} and ${negative} texts` : source === "gguf" ? "a GGUF file" : "given directions");

/** The texts of the address, to which its vector was fitted; null if it has none. */
const sidesIn = (params: Params): Sides | null => (params.positive && params.negative ? { ...FIRST_SIDES, ...Object.fromEntries(FIELDS.flatMap((name) => (params[name] ? [[name, params[name]]] : []))) } : null);

export function Vectors({ fits, id, chosen }: { fits: Fits<VectorInfo>; id: string; chosen: string | undefined }) {
  const { params, go } = usePage();
  const { all, ready, listed, unlisted, busy, problem, done, end } = fits;
  const linked = sidesIn(params);
  const unknown = listed && chosen !== undefined && !ready.some((each) => each.id === chosen);
  const fit = (sides: Sides) => fits.fit(readSides(sides).body, (made) => {
    go({ ...NONE, ...sides, vector: made.id });
    return `Fitted a vector to ${madeOf(made)}; the text is continued with it.`;
  });
  const options: [string, string][] = [["", "none"], ...ready.map((each): [string, string] => [each.id, `${short(each.id)}, of ${madeOf(each)}`])];
  if (chosen && !ready.some((each) => each.id === chosen)) options.push([chosen, short(chosen)]);
  return (
    <>
      <div class="fields"><Choice wide label="Steering vector" value={chosen ?? ""} options={options} set={(vector) => go({ ...NONE, vector })} /></div>
      {unknown && !busy && <p role="status">You have no vector {short(chosen)} of {id}. {linked ? <Button onClick={() => fit(linked)}>Fit it to the texts of the link</Button> : "Choose another, or fit one."}</p>}
      <details class="more vectors" open={listed && !all.length}>
        <summary>Steering vectors{all.length > 0 && `: ${all.length}`}</summary>
        <p class="small">A steering vector is a direction in the states behind each layer. It leads from the texts of one side to those of the other, and is added to the states while the model reads and writes.</p>
        <ProblemBox problem={unlisted} />
        {all.length > 0 && <Table caption={`Steering vectors of ${id}`} quiet rows={all} columns={[
          { head: "vector", header: true, cell: (each) => short(each.id) },
          { head: "of", cell: madeOf },
          { head: "method", cell: ({ method }) => METHODS.find(([name]) => name === method)?.[1] ?? "—" },
          { head: "state", cell: (each) => <FitState of={each} /> },
          { head: <span class="hidden">actions</span>, cell: (each) => <FitActions of={each} word="Steer by" chosen={each.id === chosen} choose={() => go({ ...NONE, vector: each.id })} end={end} /> },
          { head: "lengths", title: "the length of the direction of each layer", cell: ({ layers }) => <span class="wrap">{layers.map(({ norm }) => precise(norm, 2)).join(" ") || "—"}</span> },
          { head: "bytes", number: true, cell: (each) => (each.bytes ? bytes(each.bytes) : "—") },
        ]} />}
        <NewVector first={linked ?? FIRST_SIDES} busy={busy} problem={problem} fit={fit} />
        <Answer problem={problem} done={done} />
      </details>
    </>
  );
}

interface NewVectorProps extends Pick<Fits<VectorInfo>, "busy" | "problem"> {
  first: Sides;
  fit: (sides: Sides) => void;
}

/** The texts of a new vector. */
function NewVector({ first, busy, problem, fit }: NewVectorProps) {
  const [sides, setSides] = useState(first);
  useEffect(() => setSides(first), [JSON.stringify(first)]);
  const write = (name: keyof Sides) => (value: string) => setSides({ ...sides, [name]: value });
  const { missing } = readSides(sides);
  const hint = sides.position === "answer" ? "one a line: text | answer" : "one a line";
  return (
    <Faulty problem={problem}>
      <form onSubmit={(event) => { event.preventDefault(); if (!missing && !busy) fit(sides); }}>
        <div class="fields grow">
          <Area label="Texts to lead to" hint={hint} param="positive" rows={3} wrap live value={sides.positive} set={write("positive")} />
          <Area label="Texts to lead away from" hint={hint} param="negative" rows={3} wrap live value={sides.negative} set={write("negative")} />
        </div>
        <div class="fields">
          <Choice label="States of" value={sides.position} set={write("position")} options={POSITIONS} />
          <Choice label="Method" value={sides.method} set={write("method")} options={METHODS} />
          <button type="submit" class="primary" disabled={busy || Boolean(missing)}>{busy ? "Fitting…" : "Fit a vector"}</button>
          <output>{missing}</output>
        </div>
      </form>
    </Faulty>
  );
}
