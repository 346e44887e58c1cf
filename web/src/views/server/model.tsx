/** The server, its checkpoints, modules and sessions. */

import { useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { bytes, clip, describe, short, whole } from "../../numbers/format";
import { importLayers, layersOf } from "../../server/import_layers";
import { SENTENCE } from "../../subjects/subject";
import type { Body } from "../../server/tensors";
import type { CheckpointAttention, CheckpointInfo, ModuleConfig, ModuleInfo, ServerInfo, SessionInfo } from "../../server/types";
import { WholeModels } from "./whole_models";
import { Button, Check, FactList, Faulty, Field, ProblemBox, Table } from "../../parts/ui";
import { Answer, Remover, useWork } from "../../parts/work";

export function Model() {
  return (
    <>
      <Server />
      <WholeModels />
      <Modules />
      <Checkpoints />
      <Sessions />
    </>
  );
}

function Server() {
  const { modules, models } = usePage();
  const those = [modules.length, ...(models ?? []).map(({ id, state }) => `${id} ${state}`)];
  const { value: info, problem } = useLoaded(those.join(), () => call<ServerInfo>("GET", "v1"));
  if (!info) return <ProblemBox problem={problem} />;
  const { resident_bytes: resident, models_bytes: whole, sessions_bytes: pasts, in_flight_bytes: flight, free_bytes: free } = info.memory;
  const budget = info.limits.memory_budget_bytes || 1;
  const share = (part: number) => ({ width: `${Math.min(100, (100 * part) / budget)}%`, minWidth: part > 0 ? "2px" : "0" });
  const parts: [string, string, number][] = [["whole models", "models", whole], ["modules", "resident", resident], ["sessions", "sessions", pasts], ["in flight", "in-flight", flight], ["free", "free", free]];
  const label = `Memory budget ${bytes(budget)}: ${parts.map(([name, , size]) => `${bytes(size)} ${name}`).join(", ")}`;
  return (
    <section aria-labelledby="server-title">
      <h3 id="server-title">Server</h3>
      <FactList facts={[["version", info.version], ["device", `${info.device} — ${info.device_name}`], ["torch", info.torch], ["modules", String(info.modules)]]} />
      <div class="bar" role="img" aria-label={label}>{parts.slice(0, -1).map(([name, kind, size]) => <span key={name} class={kind} style={share(size)} />)}</div>
      <p class="legend" aria-hidden="true">
        {parts.map(([name, kind, size]) => <span key={name} class={kind}>{name} <b>{bytes(size)}</b></span>)}
        <span class="budget">budget <b>{bytes(budget)}</b></span>
      </p>
    </section>
  );
}

const headsOf = ({ num_heads: all, num_kv_heads: kv }: ModuleConfig) => (kv && kv !== all ? `${all} / ${kv}` : String(all));
const sourceOf = (from: ModuleInfo["source"]) => (from ? `${from.checkpoint}, layer ${from.layer}${from.part === "cross" ? ", cross" : ""}` : "created here");

function Modules() {
  const { modules, listed, models, refresh, go } = usePage();
  const { busy, problem, done, run } = useWork();
  const [given, setGiven] = useState({ name: "demo", d_model: "64", num_heads: "4", seed: "0", causal: false });
  const remove = (name: string) => run(async () => {
    const request: ApiRequest = { method: "DELETE", path: `v1/modules/${encodeURIComponent(name)}` };
    await call(request.method, request.path);
    await refresh();
    return { text: `Deleted ${name}.`, request };
  });
  const create = () => run(async () => {
    const number = (text: string) => (text.trim() === "" ? undefined : Number(text));
    const config: Body = { d_model: number(given.d_model), num_heads: number(given.num_heads) };
    if (given.causal) config.spec = { masks: [{ name: "causal" }] };
    const body: Body = { name: given.name.trim(), config, seed: number(given.seed) };
    const made = await call<ModuleInfo>("POST", "v1/modules", body);
    await refresh();
    return { text: `Created ${made.name}: ${whole(made.parameter_count)} parameters, ${bytes(made.bytes)}.`, request: { method: "POST", path: "v1/modules", body } };
  });
  const opens = (view: string, text: string, { name, source: from }: ModuleInfo, more = {}) => (
    <Button class="quiet" aria-label={`${text} at ${name}`} disabled={Boolean(from) && !models} onClick={() => go({ view, source: `module:${name}`, layer: "", head: "", zoom: "", edits: "", ...more })}>{text}</Button>
  );
  /** The whole model of an imported layer reads a sentence; another module has vectors as its input. */
  const lookAt = ({ source: from, config }: ModuleInfo) => {
    const model = from && models?.find(({ checkpoint }) => checkpoint === from.checkpoint);
    if (model && !(model.refused && config.d_model === SENTENCE.width)) return { source: `model:${model.id}`, layer: from.layer };
    return { states: from && config.d_model === SENTENCE.width ? from.layer : "" };
  };
  const field = (name: "name" | "d_model" | "num_heads" | "seed") => ({ value: given[name], set: (value: string) => setGiven((old) => ({ ...old, [name]: value })) });
  return (
    <section aria-labelledby="modules-title">
      <h3 id="modules-title">Modules</h3>
      {listed && modules.length === 0 && <p class="empty">No module is resident. Create one below, import a checkpoint, or use raw attention.</p>}
      {modules.length > 0 && <Table caption="Resident modules" quiet rows={modules} columns={[
        { head: "name", header: true, cell: (m) => m.name },
        { head: "d_model", number: true, cell: (m) => String(m.config.d_model) },
        { head: "heads", number: true, title: "query heads, and key/value heads where they are fewer", cell: (m) => headsOf(m.config) },
        { head: "computes", cell: (m) => describe(m.config.spec) },
        { head: "version", cell: (m) => <code title={m.version}>{short(m.version)}</code> },
        { head: "device", cell: (m) => m.device },
        { head: "bytes", number: true, cell: (m) => bytes(m.bytes) },
        { head: "source", cell: (m) => sourceOf(m.source) },
        { head: <span class="hidden">actions</span>, cell: (m) => <span class="actions">{opens("overview", "Look", m, lookAt(m))}{opens("circuits", "Circuits", m, { circuits: m.name })}{opens("cost", "Cost", m, { cost: m.name })}<Remover name={m.name} remove={() => remove(m.name)} /></span> },
      ]} />}
      <Faulty problem={problem}>
        <form onSubmit={(event) => { event.preventDefault(); create(); }}>
          <h4>Create a module</h4>
          <div class="fields">
            <Field label="Name" param="name" {...field("name")} />
            <Field label="Width" hint={<code>d_model</code>} type="number" min={1} param="config.d_model" {...field("d_model")} />
            <Field label="Heads" type="number" min={1} param="config.num_heads" {...field("num_heads")} />
            <Field label="Seed" type="number" min={0} param="seed" {...field("seed")} />
            <Check label="Causal" value={given.causal} set={(causal) => setGiven((old) => ({ ...old, causal }))} />
            <button type="submit" class="primary" disabled={busy}>Create</button>
          </div>
        </form>
      </Faulty>
      <Answer problem={problem} done={done} />
    </section>
  );
}

function Checkpoints() {
  const { params, go, modules, models, refresh } = usePage();
  const { busy, problem, done, run } = useWork();
  const listed = useLoaded(String(models?.length), () => call<{ checkpoints: CheckpointInfo[] }>("GET", "v1/checkpoints"));
  const path = params.checkpoint ?? "";
  const opened = useLoaded(path, async () => (path ? layersOf(path) : null));
  const importing = (attentions: CheckpointAttention[]) => run(() => importLayers(path, attentions, refresh));
  const checkpoints = listed.value?.checkpoints ?? [];
  const attentions = opened.value ?? [];
  const resident = (name: string) => modules.some((each) => each.name === name);
  const ready = attentions.filter(({ name, config }) => config && !resident(name));
  return (
    <section aria-labelledby="checkpoints-title">
      <h3 id="checkpoints-title">Checkpoints</h3>
      <ProblemBox problem={listed.problem} />
      {listed.value && !checkpoints.length && <p class="empty">The model repository holds no checkpoint. Put a folder with config.json and safetensors files into it.</p>}
      {checkpoints.length > 0 && <Table caption="Checkpoints of the model repository" quiet rows={checkpoints} columns={[
        { head: "path", header: true, cell: (c) => c.path },
        { head: "family", cell: (c) => c.family ?? "unknown" },
        { head: "layers", number: true, cell: (c) => String(c.layers) },
        { head: "heads", number: true, cell: (c) => String(c.heads ?? "—") },
        { head: "d_model", number: true, cell: (c) => String(c.d_model ?? "—") },
        { head: "bytes", number: true, cell: (c) => bytes(c.bytes) },
        { head: "problem", cell: (c) => clip(c.problem ?? "", 60) },
        { head: <span class="hidden">actions</span>, cell: (c) => <Button class="quiet" aria-label={`Layers of ${c.path}`} aria-expanded={c.path === path} onClick={() => go({ checkpoint: c.path === path ? "" : c.path })}>Layers</Button> },
      ]} />}
      {path && attentions.length > 0 && (
        <>
          <h4>Layers of {path}</h4>
          <Button class="primary" disabled={busy || !ready.length} onClick={() => importing(ready)}>{ready.length ? `Import all ${ready.length} layers` : "No layer left to import"}</Button>
          <Table caption={`Attention layers of ${path}`} quiet rows={attentions} columns={[
            { head: "module", header: true, cell: (a) => a.name },
            { head: "computes", cell: (a) => describe(a.config?.spec) },
            { head: "heads", number: true, cell: (a) => (a.config ? headsOf(a.config) : "—") },
            { head: "bytes", number: true, cell: (a) => bytes(a.bytes) },
            { head: "problem", cell: (a) => a.problem ?? (a.missing.length ? `needs ${a.missing.join(", ")}` : "") },
            { head: <span class="hidden">actions</span>, cell: (a) => resident(a.name) ? "resident" : <Button class="quiet" disabled={busy || !a.config} aria-label={`Import ${a.name}`} onClick={() => importing([a])}>Import</Button> },
          ]} />
        </>
      )}
      <ProblemBox problem={opened.problem} />
      <Answer problem={problem} done={done} />
    </section>
  );
}

function Sessions() {
  const [again, setAgain] = useState(0);
  const { problem, done, run } = useWork();
  const listed = useLoaded(String(again), () => call<{ sessions: SessionInfo[] }>("GET", "v1/sessions"));
  const sessions = listed.value?.sessions ?? [];
  const remove = (id: string) => run(async () => {
    const request: ApiRequest = { method: "DELETE", path: `v1/sessions/${encodeURIComponent(id)}` };
    await call(request.method, request.path);
    setAgain((old) => old + 1);
    return { text: `Ended session ${id}.`, request };
  });
  return (
    <section aria-labelledby="sessions-title">
      <h3 id="sessions-title">Sessions</h3>
      {listed.value && !sessions.length && <p class="empty">No session is open.</p>}
      {sessions.length > 0 && <Table caption="Open sessions" quiet rows={sessions} columns={[
        { head: "session", header: true, cell: (s) => <code>{clip(s.session, 16)}</code> },
        { head: "module", cell: (s) => s.module },
        { head: "length", number: true, cell: (s) => whole(s.length) },
        { head: "held", number: true, cell: (s) => whole(s.held) },
        { head: "sequences", number: true, cell: (s) => String(s.sequences) },
        { head: "policy", cell: (s) => s.policy.name },
        { head: "bytes", number: true, cell: (s) => bytes(s.bytes) },
        { head: "expires", cell: (s) => s.expires_at.replace("T", " ").slice(0, 19) },
        { head: <span class="hidden">actions</span>, cell: (s) => <Remover name={`session ${s.session}`} remove={() => remove(s.session)} /> },
      ]} />}
      <Button onClick={() => setAgain(again + 1)}>List again</Button>
      <Answer problem={problem ?? listed.problem} done={done} />
    </section>
  );
}
