/** The fitted Jacobian lenses of a model: the choice of one to read by, the fit of a new one with its price first, and their removal. */

import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { bytes, count, duration, short } from "../../numbers/format";
import type { ModelComplexityReply, PassCost } from "../../server/types";
import { Answer, Remover, useWork } from "../../parts/work";
import { Area, Button, Choice, Faulty, Field, ProblemBox, Table } from "../../parts/ui";

interface LensInfo {
  id: string;
  created: string;
  texts: number;
  skip_first?: number | null;
  max_tokens?: number | null;
  layers: number[];
  state: "fitting" | "ready";
  progress: number;
  bytes: number;
}

const REPORTS_S = 1; // seconds between two reports of a fit
const RESTS_MS = 400; // without a key pressed, after which texts are priced

const named = ({ id, texts }: LensInfo) => `Jacobian lens ${short(id)}${texts ? ` of ${texts} ${texts === 1 ? "text" : "texts"}` : ""}`;

/** The lenses of a model; `chosen` is the one that the view reads by, none for the logit lens. */
export function FittedLenses({ id, chosen }: { id: string; chosen: string | undefined }) {
  const { go } = usePage();
  const [round, ask] = useState(0);
  const { busy, problem, done, run } = useWork();
  const path = `v1/models/${encodeURIComponent(id)}/lenses`;
  const { value, problem: unlisted } = useLoaded(`${id}/${round}`, (signal) => call<{ lenses: LensInfo[] }>("GET", path, undefined, signal));
  const lenses = value?.lenses ?? [];
  const ready = lenses.filter(({ state }) => state === "ready");
  const fitting = busy || lenses.some(({ state }) => state === "fitting");
  useEffect(() => {
    if (!fitting) return;
    const timer = setInterval(() => ask((times) => times + 1), 1000 * REPORTS_S);
    return () => clearInterval(timer);
  }, [fitting]);
  const stopped = useRef("");
  const fit = (body: { texts: string[] } & Record<string, unknown>) => run(async () => {
    const request: ApiRequest = { method: "POST", path, body };
    let made: LensInfo | null = null;
    try {
      do made = await call<LensInfo>("POST", path, { ...body, wait_s: made ? REPORTS_S : 0 });
      while (made.state === "fitting");
    } catch (fault) {
      if (made === null || stopped.current !== made.id) throw fault;
      return { text: "Stopped the fit.", request: { method: "DELETE", path: `v1/lenses/${made.id}` } };
    } finally {
      ask((times) => times + 1);
    }
    go({ lens: made.id });
    return { text: `Fitted a lens over ${body.texts.length} texts; the view reads by it.`, request };
  });
  const end = async (lens: string) => {
    const request: ApiRequest = { method: "DELETE", path: `v1/lenses/${lens}` };
    stopped.current = lens;
    await call(request.method, request.path);
    ask((times) => times + 1);
    if (lens === chosen) go({ lens: "" });
    return { text: "Deleted the lens.", request };
  };
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
          { head: "state", cell: (each) => (each.state === "ready" ? "ready" : <span class="actions"><progress value={each.progress} max={1} aria-label={`Fitting ${short(each.id)}`} /> {Math.round(100 * each.progress)} %</span>) },
          { head: <span class="hidden">actions</span>, cell: (each) => (
            <span class="actions">
              {each.state === "fitting" ? <Button class="quiet" aria-label={`Stop the fit of ${short(each.id)}`} onClick={() => void end(each.id).catch(() => undefined)}>Stop</Button> : <>
                <Button class="quiet" aria-label={`Read by ${short(each.id)}`} disabled={each.id === chosen} onClick={() => go({ lens: each.id })}>Read</Button>
                <Remover name={short(each.id)} remove={() => run(() => end(each.id))} />
              </>}
            </span>
          ) },
          { head: "left out", number: true, title: "the first tokens of each text that are left out", cell: (each) => each.skip_first ?? "—" },
          { head: "layers", cell: ({ layers }) => (layers.length ? `${layers[0]} to ${layers[layers.length - 1]}` : "—") },
          { head: "bytes", number: true, cell: (each) => (each.bytes ? bytes(each.bytes) : "—") },
        ]} />}
        <NewLens id={id} busy={busy} problem={problem} fit={fit} />
        <Answer problem={problem} done={done} />
      </details>
    </>
  );
}

interface NewLensProps {
  id: string;
  busy: boolean;
  problem: ReturnType<typeof useWork>["problem"];
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
