/** The whole models of the server: loaded, ended, and fetched from the hub where the operator allows it. */

import { useEffect } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { usePage } from "../../page/context";
import { bytes, clip } from "../../numbers/format";
import type { Body } from "../../server/tensors";
import type { ModelInfo } from "../../server/types";
import { MoreModels } from "../../parts/more_models";
import { countsOf } from "../../parts/sentence";
import { Button, Table } from "../../parts/ui";
import { Answer, Remover, useWork } from "../../parts/work";

const LOADING_MS = 500; // between two lists while a model is loading
const WATCHING_MS = 2000; // between two lists else: what runs and what waits changes by other callers

const STATES: Record<ModelInfo["state"], (model: ModelInfo) => string> = {
  idle: () => "idle",
  loading: ({ progress }) => `loading, ${Math.round(100 * (progress ?? 0))} %`,
  resident: () => "resident",
  stuck: () => "stuck: its process computes nothing although it is asked",
};

/** The state, and how many requests the model's process has, and how many wait for it. */
function stateOf(model: ModelInfo): string {
  return [STATES[model.state](model), countsOf(model)].filter(Boolean).join(", ");
}

export function WholeModels() {
  const { go, models, refreshModels } = usePage();
  const { busy, problem, done, run } = useWork();
  const loading = busy || (models ?? []).some(({ state }) => state === "loading");
  useEffect(() => {
    const list = () => { if (!document.hidden) void refreshModels().catch(() => undefined); };
    const timer = setInterval(list, loading ? LOADING_MS : WATCHING_MS);
    return () => clearInterval(timer);
  }, [loading]);
  const ask = (method: ApiRequest["method"], path: string, text: string, body?: Body) => run(async () => {
    await call(method, path, body);
    await refreshModels();
    return { text, request: { method, path, body } };
  });
  const load = ({ id, checkpoint, base }: ModelInfo) => ask("POST", "v1/models", `Loaded ${id}.`, base ? { checkpoint } : { checkpoint, name: id });
  const end = (id: string) => ask("DELETE", `v1/models/${encodeURIComponent(id)}`, `Ended ${id}.`);
  const look = (id: string) => go({ view: "overview", source: `model:${id}`, layer: "", head: "", image: "", zoom: "", edits: "" });
  return (
    <section aria-labelledby="whole-title">
      <h3 id="whole-title">Whole models</h3>
      {models?.length === 0 && <p class="empty">There is none: the server has no transformers, or its model repository no checkpoint.</p>}
      {models && models.length > 0 && <Table caption="Whole models and their states" quiet rows={models} columns={[
        { head: "name", header: true, cell: (m) => m.id },
        { head: "state", title: "running: requests that its process has; waiting: those that wait until others are answered, or until it is loaded", cell: stateOf },
        { head: "computed by", cell: (m) => m.architecture ?? "—" },
        { head: "takes", cell: (m) => m.takes.join(", ") },
        { head: "bytes", number: true, title: "an estimate until it is resident", cell: (m) => (m.base ? `with ${m.base}` : bytes(m.bytes)) },
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
