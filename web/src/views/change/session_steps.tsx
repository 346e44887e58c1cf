/** A session step by step: the weights come one query at a time. */

import { useState } from "preact/hooks";
import { call, callTensors, problemOf } from "../../server/api";
import type { ApiRequest, ProblemDocument } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { bytes, precise, whole } from "../../numbers/format";
import { HeatMap } from "../../parts/heatmap";
import { forgetKept, keep, keptOf } from "../../page/kept";
import { matrix, matrixRows } from "../../numbers/matrix";
import type { Matrix } from "../../numbers/matrix";
import { normal } from "../../numbers/random";
import { integer } from "../../page/state";
import { headName } from "../../subjects/subject";
import type { Body } from "../../server/tensors";
import type { Ran, SessionInfo } from "../../server/types";
import { Button, Choice, Commands, Export, FactList, Field, ProblemBox, RanTable, Waiting } from "../../parts/ui";

const CAPACITY = 512;

/** The weights of a step: its position, and [head, key]. */
interface Step {
  at: number;
  heads: ArrayLike<number>[];
}

/** The steps that this page made, by session. */
const seen = new Map<string, Step[]>();
const keptAs = (session: string) => `steps of ${session}`; // for the next load of this tab

/** The steps of a session that this page, or this tab before a reload, has made. */
function stepsOf(session: string): Step[] {
  const known = seen.get(session) ?? (keptOf(keptAs(session)) as Step[] | null) ?? [];
  seen.set(session, known);
  return known;
}

function setSteps(session: string, steps: Step[]): void {
  seen.set(session, steps);
  keep(keptAs(session), steps.map(({ at, heads }) => ({ at, heads: heads.map((each) => Array.from(each)) })));
}

function stepsMatrix(session: string, head: number): { of: Matrix; queries: string[]; keys: string[] } {
  const steps = stepsOf(session);
  const most = steps.reduce((wide, { heads }) => Math.max(wide, heads[0].length), 0);
  const of = matrix(steps.length, most);
  steps.forEach(({ heads }, i) => of.data.set(heads[Math.min(head, heads.length - 1)], i * most));
  return { of, queries: steps.map(({ at }) => `token ${at}`), keys: Array.from({ length: most }, (_, j) => `token ${j}`) };
}

export function SessionSteps() {
  const { params, go, modules, listed, theme, announce } = usePage();
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [working, setWorking] = useState(false);
  const [again, setAgain] = useState(0);
  const [last, setLast] = useState<{ request: ApiRequest; ran: Ran } | null>(null);
  const fromSource = params.source?.startsWith("module:") ? params.source.slice(7) : "";
  const name = params.decode ?? (modules.some((each) => each.name === fromSource) ? fromSource : (modules.at(0)?.name ?? ""));
  const module = modules.find((each) => each.name === name);
  const session = params.session ?? "";
  const { value: info, problem: gone, busy: loading } = useLoaded(`${session}/${again}`, async () => (session ? call<SessionInfo>("GET", `v1/sessions/${encodeURIComponent(session)}`) : null));
  const busy = working || (session !== "" && loading); // a step says the length that it follows
  const head = integer(params.head, 0, 0, Math.max(0, (module?.config.num_heads ?? 1) - 1));

  const work = (make: () => Promise<void>) => {
    if (busy) return;
    setWorking(true);
    setProblem(null);
    make().catch((fault: unknown) => setProblem(problemOf(fault))).finally(() => {
      setWorking(false);
      setAgain((old) => old + 1);
    });
  };
  const open = () => work(async () => {
    const made = await call<SessionInfo>("POST", `v1/modules/${encodeURIComponent(name)}/sessions`, { capacity: CAPACITY });
    go({ decode: name, session: made.session });
  });
  const step = (many: number) => work(async () => {
    if (!module || !info) return;
    const width = module.config.d_model;
    let { length } = info;
    for (let i = 0; i < many; i += 1) {
      const data = normal(1, width, integer(params.seed, 0) * 100_003 + length);
      const body: Body = { query: { shape: [1, width], data }, return: ["output", "weights"], at: length };
      const request: ApiRequest = { method: "POST", path: `v1/sessions/${encodeURIComponent(session)}/step`, body };
      const { reply, tensors } = await callTensors<{ ran: Ran; length: number }>(request.path, body);
      const { shape, data: weights } = tensors.weights;
      const keys = shape.at(-1) ?? 1;
      const heads = Array.from({ length: weights.length / keys }, (_, h) => weights.slice(h * keys, (h + 1) * keys));
      setSteps(session, [...stepsOf(session), { at: length, heads }]);
      length = reply.length;
      setLast({ request, ran: reply.ran });
    }
    announce(`The session holds ${length} tokens.`);
  });
  const forgetLast = () => work(async () => {
    if (!info) return;
    await call("POST", `v1/sessions/${encodeURIComponent(session)}/truncate`, { length: info.length - 1, at: info.length });
    setSteps(session, stepsOf(session).filter(({ at }) => at < info.length - 1));
  });
  const end = () => work(async () => {
    await call("DELETE", `v1/sessions/${encodeURIComponent(session)}`);
    seen.delete(session);
    forgetKept(keptAs(session));
    go({ session: "" });
  });
  const shown = stepsMatrix(session, head);
  const title = `weights of ${headName("", head)}, step by step`;
  if (!listed) return <Waiting what="Asking the server for its modules" />;
  if (!modules.length) return <p>A session needs a module: create one under Model, or import a checkpoint.</p>;
  return (
    <>
      <div class="fields">
        <Choice wide label="Module" value={name} set={(each) => go({ decode: each, session: "" })} options={modules.map((each) => [each.name, each.name])} />
        <Choice label="Head" value={String(head)} set={(each) => go({ head: each })} options={Array.from({ length: module?.config.num_heads ?? 1 }, (_, i) => [String(i), headName("", i)])} />
        <Field label="Seed" hint="of the random vectors" type="number" min={0} value={params.seed ?? "0"} set={(seed) => go({ seed })} />
      </div>
      <div class="fields">
        {!session && <Button class="primary" disabled={busy} onClick={open}>Open a session</Button>}
        {session && info && <Button class="primary" disabled={busy || info.length >= CAPACITY} onClick={() => step(1)}>Step</Button>}
        {session && info && <Button disabled={busy || info.length + 10 > CAPACITY} onClick={() => step(10)}>10 steps</Button>}
        {session && info && <Button disabled={busy || !info.length} onClick={forgetLast}>Forget the last token</Button>}
        {session && <Button disabled={busy} onClick={() => (gone ? go({ session: "" }) : end())}>End the session</Button>}
      </div>
      <ProblemBox problem={problem ?? gone} />
      {info && (
        <>
          <FactList facts={[["session", info.session.slice(0, 12)], ["tokens", whole(info.length)], ["held", whole(info.held)], ["bytes", bytes(info.bytes)], ["expires", info.expires_at.slice(11, 19)]]} />
          {shown.of.rows > 0 && <HeatMap of={shown.of} queries={shown.queries} keys={shown.keys} title={title} />}
          {shown.of.rows > 0 && <p class="small">The last step's largest weight is {precise(Math.max(...shown.of.data.subarray((shown.of.rows - 1) * shown.of.columns)))}. Steps that another page made are not shown.</p>}
          {shown.of.rows > 0 && <Export of={{ name: "decode", scene: () => heatScene(shown.of, { theme, title, queries: shown.queries, keys: shown.keys }), rows: () => matrixRows(shown.of, shown.queries, shown.keys), json: () => ({ session, head, weights: shown.queries.map((each, i) => ({ query: each, weights: Array.from(shown.of.data.subarray(i * shown.of.columns, (i + 1) * shown.of.columns)) })) }) }} />}
          {last && <RanTable rans={{ step: last.ran }} />}
          <Commands calls={[last?.request ?? null]} />
        </>
      )}
    </>
  );
}
