/** The whole models of the server: loaded, ended, and fetched from the hub where the operator allows it. */

import { useEffect } from "preact/hooks";
import { call } from "../../server/api";
import type { Asked } from "../../server/api";
import { usePage } from "../../page/context";
import { bytes, clip } from "../../numbers/format";
import type { Body } from "../../server/tensors";
import type { ModelInfo } from "../../server/types";
import { MoreModels } from "../../parts/more_models";
import { Button, Table } from "../../parts/ui";
import { Answer, Remover, useWork } from "../../parts/work";

const LOOK_AGAIN_MS = 500;

const stateOf = ({ state, progress }: ModelInfo) =>
  state === "loading" ? `loading, ${Math.round(100 * (progress ?? 0))} %` : state === "stuck" ? "stuck: its process computes nothing although it is asked" : state;

export function WholeModels() {
  const { go, models, refreshModels } = usePage();
  const { busy, problem, done, run } = useWork();
  const loading = busy || (models ?? []).some(({ state }) => state === "loading");
  useEffect(() => {
    if (!loading) return;
    const timer = setInterval(() => void refreshModels().catch(() => undefined), LOOK_AGAIN_MS);
    return () => clearInterval(timer);
  }, [loading]);
  const ask = (method: Asked["method"], path: string, text: string, body?: Body) => run(async () => {
    await call(method, path, body);
    await refreshModels();
    return { text, asked: { method, path, body } };
  });
  const load = ({ id, checkpoint }: ModelInfo) => ask("POST", "v1/models", `Loaded ${id}.`, { checkpoint, name: id });
  const end = (id: string) => ask("DELETE", `v1/models/${encodeURIComponent(id)}`, `Ended ${id}.`);
  const look = (id: string) => go({ view: "overview", source: `model:${id}`, layer: "", head: "", image: "", zoom: "", edits: "" });
  return (
    <section aria-labelledby="whole-title">
      <h3 id="whole-title">Whole models</h3>
      {models?.length === 0 && <p class="empty">There is none: the server has no transformers, or its model repository no checkpoint.</p>}
      {models && models.length > 0 && <Table caption="Whole models and their states" quiet rows={models} columns={[
        { head: "name", header: true, cell: (m) => m.id },
        { head: "state", cell: stateOf },
        { head: "computed by", cell: (m) => m.architecture ?? "—" },
        { head: "takes", cell: (m) => m.takes.join(", ") },
        { head: "bytes", number: true, title: "an estimate until it is resident", cell: (m) => bytes(m.bytes) },
        { head: "refused", cell: (m) => <span class="wrap">{clip(m.refused ?? "", 90)}</span> },
        { head: <span class="hidden">actions</span>, cell: (m) => (
          <span class="actions">
            {!m.refused && <Button class="quiet" aria-label={`Look at ${m.id}`} onClick={() => look(m.id)}>Look</Button>}
            {!m.refused && m.state === "idle" && <Button class="quiet" disabled={busy} aria-label={`Load ${m.id}`} onClick={() => load(m)}>Load</Button>}
            {m.state === "loading" && <Button class="quiet" aria-label={`Cancel the loading of ${m.id}`} onClick={() => void call("DELETE", `v1/models/${encodeURIComponent(m.id)}`).catch(() => undefined)}>Cancel</Button>}
            {m.state === "resident" && <Remover name={m.id} word="End" remove={() => end(m.id)} />}
          </span>
        ) },
      ]} />}
      <MoreModels loaded={look} />
      <Answer problem={problem} done={done} />
    </section>
  );
}
