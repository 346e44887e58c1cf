/** The fitted Jacobian lenses of a model: the choice of one to read by, the fit of a new one with its price first, and their removal. */

import { useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ProblemDocument } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { bytes, count, duration, short } from "../../numbers/format";
import type { ModelComplexityReply, PassCost } from "../../server/types";
import { FitActions, FitState, useFits } from "../../parts/model/fits";
import type { Fit } from "../../parts/model/fits";
import { Answer } from "../../parts/work";
import { Area, Choice, Faulty, Field, ProblemBox, Table } from "../../parts/ui";

interface LensInfo extends Fit {
  created: string;
  texts: number;
  skip_first?: number | null;
  max_tokens?: number | null;
  layers: number[];
  bytes: number;
}

const RESTS_MS = 400; // without a key pressed, after which texts are priced

const named = ({ id, texts }: LensInfo) => `Jacobian lens ${short(id)}${texts ? ` of ${texts} ${texts === 1 ? "text" : "texts"}` : ""}`;

/** The lenses of a model; `chosen` is the one that the view reads by, none for the logit lens. */
export function FittedLenses({ id, chosen }: { id: string; chosen: string | undefined }) {
  const { go } = usePage();
  const { all: lenses, ready, unlisted, busy, problem, done, fit, end } = useFits<LensInfo>(id, "lenses", (lens) => lens === chosen && go({ lens: "" }));
  const make = (body: { texts: string[] } & Record<string, unknown>) => fit(body, (made) => {
    go({ lens: made.id });
    return `Fitted a lens over ${body.texts.length} texts; the view reads by it.`;
  });
  const options: [string, string][] = [["", "logit lens: the model's own unembedding"], ...ready.map((each): [string, string] => [each.id, named(each)])];
  if (chosen && !ready.some((each) => each.id === chosen)) options.push([chosen, `Jacobian lens ${short(chosen)}`]);
  return (
    <>
      <div class="fields"><Choice wide label="Read by" value={chosen ?? ""} options={options} set={(lens) => go({ lens })} /></div>
      <details class="more lenses">
        <summary>Fitted lenses{lenses.length > 0 && `: ${lenses.length}`}</summary>
        <p class="small">A Jacobian lens multiplies the states after a layer by the mean Jacobian of the last layer's states, taken over texts, and then reads them out. Early layers write for later layers; this lens reads what they pass on.</p>
        <ProblemBox problem={unlisted} />
        {lenses.length > 0 && <Table caption={`Fitted lenses of ${id}`} quiet rows={lenses} columns={[
          { head: "lens", header: true, cell: (each) => short(each.id) },
          { head: "texts", number: true, cell: (each) => each.texts || "—" },
          { head: "state", cell: (each) => <FitState of={each} /> },
          { head: <span class="hidden">actions</span>, cell: (each) => <FitActions of={each} word="Read by" chosen={each.id === chosen} choose={() => go({ lens: each.id })} end={end} /> },
          { head: "left out", number: true, title: "the first tokens of each text that are left out", cell: (each) => each.skip_first ?? "—" },
          { head: "layers", cell: ({ layers }) => (layers.length ? `${layers[0]} to ${layers[layers.length - 1]}` : "—") },
          { head: "bytes", number: true, cell: (each) => (each.bytes ? bytes(each.bytes) : "—") },
        ]} />}
        <NewLens id={id} busy={busy} problem={problem} fit={make} />
        <Answer problem={problem} done={done} />
      </details>
    </>
  );
}

interface NewLensProps {
  id: string;
  busy: boolean;
  problem: ProblemDocument | null;
  fit: (body: { texts: string[] } & Record<string, unknown>) => void;
}

/** The texts of a new lens, and what its fit costs. */
function NewLens({ id, busy, problem, fit }: NewLensProps) {
  const [draft, write] = useState("");
  const [skipped, skip] = useState("16");
  const [most, limit] = useState("128");
  const texts = draft.split("\n").map((each) => each.trim()).filter(Boolean);
  const { value: price, problem: unpriced } = useLoaded(JSON.stringify([id, texts, most]), async (signal): Promise<PassCost | null> => {
    if (!texts.length) return null;
    await new Promise((rested) => setTimeout(rested, RESTS_MS));
    if (signal.aborted) return null;
    const longest = texts.reduce((best, each) => (each.length > best.length ? each : best));
    const { count: tokens } = await call<{ count: number }>("POST", "v1/tokenize", { model: id, prompt: longest }, signal);
    const body = { length: Math.max(1, Math.min(tokens, Number(most) || tokens)), batch: texts.length, fit: true };
    return (await call<ModelComplexityReply>("POST", `v1/models/${encodeURIComponent(id)}/complexity`, body, signal)).fit ?? null;
  });
  const number = (text: string) => (text.trim() === "" ? undefined : Number(text));
  return (
    <Faulty problem={problem ?? unpriced}>
      <form onSubmit={(event) => { event.preventDefault(); if (price) fit({ texts, skip_first: number(skipped), max_tokens: number(most) }); }}>
        <Area label="Texts" hint="one a line" param="texts" rows={5} wrap live value={draft} set={write} placeholder="The texts over which the Jacobians are averaged" />
        <div class="fields">
          <Field label="First tokens left out" param="skip_first" type="number" min={0} value={skipped} live set={skip} />
          <Field label="Tokens of each text" param="max_tokens" type="number" min={2} value={most} live set={limit} />
          <button type="submit" class="primary" disabled={busy || !texts.length || !price}>{busy ? "Fitting…" : "Fit a lens"}</button>
          <output>{texts.length > 0 && price ? `${texts.length} ${texts.length === 1 ? "text" : "texts"}: about ${count(price.flops)}FLOP, ${duration(price.predicted_ms)}, ${bytes(price.peak_bytes)} at its peak` : texts.length && !unpriced ? "asking for the price…" : ""}</output>
        </div>
      </form>
      {!problem && <ProblemBox problem={unpriced} />}
    </Faulty>
  );
}
