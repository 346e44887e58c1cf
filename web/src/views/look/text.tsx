/** The choice of a subject: recordings, files, modules with their input, and raw attention. */

import { useState } from "preact/hooks";
import type { TargetedDragEvent } from "preact";
import { call } from "../../server/api";
import type { ProblemDocument } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { bytes, clip } from "../../numbers/format";
import { MoreModels } from "../../parts/more_models";
import { Chat, TextBox } from "../../parts/texts";
import { normal } from "../../numbers/random";
import { integer } from "../../page/state";
import { chatOf, writeChat } from "../../subjects/chat";
import { BUILT_IN, RAW, SENTENCE, files, subjectKey } from "../../subjects/subject";
import { nested } from "../../server/tensors";
import type { RecordingSummary, VariantInfo } from "../../server/types";
import { forget, subjectOf, useSources } from "../../parts/with_subject";
import { Area, Button, Check, Choice, FactList, Faulty, Field, ProblemBox } from "../../parts/ui";

const CHANGED = { layer: "", head: "", image: "", query: "", key: "", zoom: "", sequence: "", edits: "" };

export function Text() {
  const { params, go } = usePage();
  const { source = "" } = params;
  const sources = useSources();
  const [kind, name] = source.split(/:(.*)/s);
  const { value: subject, problem } = useLoaded(subjectKey(params), () => subjectOf(params));
  return (
    <>
      <h3>A text or a chat</h3>
      <Typed />
      <Recordings />
      <h3>Modules and raw attention</h3>
      <Faulty problem={problem}>
        <form onSubmit={(event) => event.preventDefault()}>
          <Choice wide label="Attention of" value={source} options={sources.map(([value, label]) => [value, clip(label, 70)])} set={(chosen) => go({ ...CHANGED, source: chosen })} />
          {kind === "module" && <ModuleInput name={name} />}
          {kind === "raw" && <RawInput />}
          {(kind === "module" || kind === "raw") && <Both />}
        </form>
      </Faulty>
      <ProblemBox problem={problem} />
      {subject && (
        <div class="answer">
          <FactList facts={[...subject.facts, ["attentions", String(subject.layers.length)], ["heads", String(subject.layers[0].heads.length)], ["tokens", `${subject.layers[0].queries.length}`]]} />
          <Button class="primary" onClick={() => go({ view: "overview" })}>Look</Button>
        </div>
      )}
    </>
  );
}

function Recordings() {
  const { params, go } = usePage();
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [again, setAgain] = useState(0);
  const listed = useLoaded(String(again), () => call<{ recordings: RecordingSummary[] }>("GET", "v1/recordings"));
  const stored = listed.value?.recordings ?? [];
  const take = (file: File | undefined) => {
    if (!file) return;
    files.set(file.name, file);
    forget();
    setProblem(null);
    go({ ...CHANGED, source: `file:${file.name}`, opened: String(integer(params.opened, 0) + 1) });
  };
  const drop = (event: TargetedDragEvent<HTMLElement>) => {
    event.preventDefault();
    take(event.dataTransfer?.files[0]);
  };
  return (
    <div onDragOver={(event) => event.preventDefault()} onDrop={drop}>
      <h3>Recordings</h3>
      <p class="small">A recording holds the attention of every layer of a whole model for one text, with its tokens.</p>
      <div class="fields">
        <Choice wide label="Built in" value={BUILT_IN.some(({ id }) => `builtin:${id}` === (params.source ?? "")) ? (params.source ?? "") : ""} set={(source) => source && go({ ...CHANGED, source })} options={[...BUILT_IN.map(({ id, label }): [string, string] => [`builtin:${id}`, label]), ...(BUILT_IN.some(({ id }) => `builtin:${id}` === (params.source ?? "")) ? [] : [["", "choose one"] as [string, string]])]} />
        <Choice wide label="Stored on the server" value={params.source?.startsWith("stored:") ? params.source : ""} set={(source) => source && go({ ...CHANGED, source })}
          options={[["", stored.length ? "choose one" : "none is stored"], ...stored.map(({ id, model, text, bytes: size }): [string, string] => [`stored:${id}`, `${model}: ${clip(text, 60)} (${bytes(size)})`])]} />
        <Button onClick={() => setAgain(again + 1)}>List again</Button>
        <label class="wide"><span>File <span class="hint">or drop one here; it stays in this browser</span></span>
          <input type="file" accept=".safetensors" onChange={(event) => take(event.currentTarget.files?.[0])} /></label>
      </div>
      <ProblemBox problem={problem ?? listed.problem} />
    </div>
  );
}

const CHAT = "chat";

/** A text or a chat for a whole model, or the command that records a text elsewhere. */
function Typed() {
  const { params, go, models } = usePage();
  const able = (models ?? []).filter((each) => !each.refused && each.takes.includes("text")).map(({ id }) => id);
  const named = params.source?.startsWith("model:") ? params.source.slice(6) : "";
  const [model, choose] = useState(named);
  const [text, write] = useState(params.text ?? "");
  const [turns, writeTurns] = useState(chatOf(params) ?? [{ role: "user", content: params.text ?? "" }]);
  const [form, setForm] = useState(chatOf(params) ? CHAT : "text");
  const chatting = form === CHAT;
  const setWritten = (wanted: string) => {
    if (wanted === CHAT && text.trim() && turns.every(({ content }) => !content.trim())) writeTurns([{ role: "user", content: text }]);
    setForm(wanted);
  };
  const readers = chatting ? able.filter((id) => models?.find((each) => each.id === id)?.takes.includes("messages")) : able;
  const chosen = readers.includes(model) ? model : (readers[0] ?? "");
  const ready = Boolean(chosen) && (chatting ? turns.some(({ content }) => content.trim()) : Boolean(text.trim()));
  const line = `attention record CHECKPOINT '${(text || "your sentence").replaceAll("'", "'\\''")}' --taps weights --taps q --taps k --taps v --post`;
  if (models && !able.length) {
    return (
      <>
        <TextBox label="Your text" hint="for a command that records it with a checkpoint and its tokenizer" value={text} write={write} lines={3} placeholder="The cat sat on the mat" />
        <pre tabIndex={0}>{line}</pre>
        <p class="small">Run the command where transformers is installed, then list the recordings again. The server reads a sentence itself if it has transformers.</p>
      </>
    );
  }
  const look = (id: string) => go({ ...CHANGED, source: `model:${id}`, ...(chatting ? { messages: writeChat(turns.filter(({ content }) => content.trim())) } : { text: text.trim(), messages: "" }), view: "overview" });
  return (
    <>
      <form class="written" onSubmit={(event) => { event.preventDefault(); if (ready) look(chosen); }}>
        <div class="fields">
          <Choice label="Write" value={form} set={setWritten} options={[["text", "a text"], [CHAT, "a chat of turns"]]} />
          <Choice wide label="Model" value={chosen} set={choose} options={readers.length ? readers.map((id): [string, string] => [id, id]) : [["", "no model reads a chat"]]} />
        </div>
        {chatting ? <Chat turns={turns} write={writeTurns} /> : <TextBox label="Your text" hint="read by a whole model" value={text} write={write} lines={5} placeholder="The cat sat on the mat" />}
        <div class="fields"><button type="submit" class="primary" disabled={!ready}>Look at the {form}</button><span class="hint">Enter adds a line; Ctrl+Enter or ⌘+Enter looks.</span></div>
      </form>
      <MoreModels loaded={look} />
    </>
  );
}

function ModuleInput({ name }: { name: string }) {
  const { params, go, modules } = usePage();
  const module = modules.find((each) => each.name === name);
  const width = module?.config.d_model ?? 0;
  const labels = (params.labels ?? "").split(/[\s,]+/).filter(Boolean);
  const tokens = integer(params.tokens, labels.length || 8, 1, 32_768);
  const write = () => {
    const numbers = { shape: [tokens, width], data: normal(tokens, width, integer(params.seed, 0)) };
    go({ input: JSON.stringify(nested(numbers)).replaceAll("],[", "],\n [") });
  };
  const sentence = width === SENTENCE.width;
  const inputs: [string, string][] = [["", "random or written vectors"], ...Array.from({ length: SENTENCE.layers }, (_, layer): [string, string] => [String(layer), `MiniLM's states of its sentence before layer ${layer}`])];
  return (
    <>
      {sentence && <Choice wide label="Input" value={params.states ?? ""} set={(states) => go({ states })} options={inputs} />}
      {!(sentence && params.states) && <><div class="fields">
        <Field label="Tokens" type="number" min={1} max={32768} value={tokens} param="query" set={(value) => go({ tokens: value, input: "", zoom: "" })} />
        <Field label="Seed" type="number" min={0} value={params.seed ?? "0"} set={(seed) => go({ seed, input: "" })} />
        {params.input ? <Button onClick={() => go({ input: "" })}>Random vectors</Button> : tokens * width <= 4096 && width > 0 && <Button onClick={write}>Write the vectors out</Button>}
      </div>
      <Area label="Query" hint={`tokens × ${width}, as nested lists; also used as key and value. Empty: random vectors`} rows={5} param="query" value={params.input ?? ""} set={(input) => go({ input })} /></>}
    </>
  );
}

function RawInput() {
  const { params, go } = usePage();
  const { value } = useLoaded("", () => call<{ variants: VariantInfo[] }>("GET", "v1/variants"));
  const names = (kind: string, first: string): [string, string][] => {
    const known = (value?.variants ?? []).filter((each) => each.kind === kind).map(({ name }) => name);
    return (known.includes(first) ? known : [first, ...known]).map((name) => [name, name]);
  };
  return (
    <>
      <div class="three">
        <Area label="Query" hint="queries × width" param="query" value={params.q ?? RAW.q} set={(q) => go({ q })} />
        <Area label="Key" hint="keys × width" param="key" value={params.k ?? RAW.k} set={(k) => go({ k })} />
        <Area label="Value" hint="keys × any width" param="value" value={params.v ?? RAW.v} set={(v) => go({ v })} />
      </div>
      <div class="fields">
        <Choice label="Score" value={params.score ?? "scaled_dot"} set={(score) => go({ score })} options={names("score", "scaled_dot")} />
        <Choice label="Normalizer" value={params.normalizer ?? "softmax"} set={(normalizer) => go({ normalizer })} options={names("normalizer", "softmax")} />
        <Field label="Heads" hint="for concatenated heads" type="number" min={1} param="num_heads" value={params.heads ?? ""} set={(heads) => go({ heads })} />
        <Check label="Causal" value={Boolean(params.causal)} set={(causal) => go({ causal: causal ? "1" : "" })} />
      </div>
    </>
  );
}

function Both() {
  const { params, go } = usePage();
  return (
    <>
      <div class="fields grow">
        <Field label="Token labels" hint="optional, separated by spaces" value={params.labels ?? ""} set={(labels) => go({ labels })} placeholder="the cat sat on the mat" />
        <Field label="Key labels" hint="if they differ" value={params.keys ?? ""} set={(keys) => go({ keys })} />
      </div>
      <details open={Boolean(params.further)}>
        <summary>Further request fields</summary>
        <Area label="" hint={<>A JSON object to add to each request: <code>key_mask</code>, <code>mask</code>, <code>offsets</code>, <code>kernel</code>, <code>spec</code>, …</>} rows={3} param="further" value={params.further ?? ""} set={(further) => go({ further })} placeholder='{"key_lengths": [6]}' />
      </details>
    </>
  );
}
