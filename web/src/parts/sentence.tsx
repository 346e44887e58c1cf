/** The box on top of every view of a whole model: its sentence, its image or its sound, and its loading. */

import { useEffect, useRef, useState } from "preact/hooks";
import { call, problemOf } from "../server/api";
import type { ProblemDocument } from "../server/api";
import { useLoaded, usePage } from "../page/context";
import { bytes } from "../numbers/format";
import { mostTokens } from "../page/limits";
import { chatOf } from "../subjects/chat";
import { SOUND_FILES, pictures, readPicture, readSound, remember, sounds } from "../subjects/media";
import { FIRST_TEXT } from "../subjects/model_subject";
import type { ModelInfo } from "../server/types";
import { ChatLine, TextBox } from "./texts";
import { Button, Field, ProblemBox } from "./ui";

/** The parameters that belong to one input alone. */
const CHANGED = { query: "", key: "", zoom: "", sequence: "", edits: "" };

const RESTS_MS = 300; // after which a text that is typed is counted

interface SentenceProps {
  id: string;
  /** The tokens of the text, once they are known. */
  tokens: number | null;
  /** Ask again for what failed. */
  again: (() => void) | undefined;
}

/** The text or the chat, the image and the sound of a model, to be changed. */
export function Sentence({ id, tokens, again }: SentenceProps) {
  const { view, params, go, models } = usePage();
  const model = models?.find((each) => each.id === id);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const text = params.text ?? FIRST_TEXT;
  const [draft, setDraft] = useState(text);
  const [target, setTarget] = useState(params.target ?? "");
  const [busy, setBusy] = useState(false);
  const [pair, setPair] = useState(params.pair ?? "");
  useEffect(() => setDraft(text), [text]);
  useEffect(() => setPair(params.pair ?? ""), [params.pair]);
  useEffect(() => setTarget(params.target ?? ""), [params.target]);
  useEffect(() => setProblem(null), [id, text, params.messages, params.image, params.sound]);
  const takes = (what: string) => model?.takes.includes(what) ?? what === "text";
  const chat = takes("text") ? chatOf(params) : null;
  /** Take a file that was chosen or dropped, as what the model takes. */
  const take = async (file: File | undefined) => {
    setProblem(null);
    if (!file) return;
    try {
      if (takes("audio")) go({ ...CHANGED, sound: remember(sounds, await readSound(file)) });
      else go({ ...CHANGED, image: remember(pictures, await readPicture(file)) });
    } catch (fault) {
      setProblem(problemOf(fault));
    }
  };
  const sound = params.sound === undefined ? undefined : sounds.get(params.sound);
  /** Have the model write down what it hears, which becomes the decoder's text. */
  const transcribe = async (base64: string) => {
    setProblem(null);
    setBusy(true);
    try {
      const { text: heard } = await call<{ text: string }>("POST", "v1/audio/transcriptions", { model: id, file: { base64 } });
      if (heard.trim()) go({ ...CHANGED, target: heard.trim() });
      else setProblem({ title: "No words", detail: `${id} heard none in ${params.sound ?? ""}.`, waits: true });
    } catch (fault) {
      setProblem(problemOf(fault));
    }
    setBusy(false);
  };
  const ofView = mostTokens(view, model) ?? Infinity;
  const ofModel = model?.max_length ?? Infinity;
  const limit = Number.isFinite(Math.min(ofView, ofModel)) ? Math.min(ofView, ofModel) : null;
  // Until its tokenizer has read it, as many characters a token as the sentence before had.
  const uncounted = !chat && (draft !== text || tokens === null) ? draft : "";
  const { value: count } = useLoaded(`${id}/${uncounted}/${pair}`, async (signal) => {
    if (model?.state !== "resident" || !uncounted.trim() || !takes("text")) return null;
    await new Promise((rested) => setTimeout(rested, RESTS_MS));
    if (signal.aborted) return null;
    const { count: read } = await call<{ count: number }>("POST", "v1/tokenize", { model: id, prompt: uncounted, ...(pair.trim() ? { text_pair: pair } : {}) }, signal);
    return { draft, read };
  });
  const known = !uncounted ? tokens : count?.draft === draft ? count.read : null;
  const about = known ?? Math.ceil((draft.length * (tokens ?? 1)) / (tokens === null ? 4 : Math.max(1, text.length)));
  const counted = `${known === null ? "about " : ""}${about}${limit ? ` of at most ${limit}` : ""} tokens${ofView < ofModel ? " in this view" : ""}`;
  return (
    <form class="sentence" onDragOver={(event) => event.preventDefault()} onDrop={(event) => { event.preventDefault(); if (takes("images") || takes("audio")) void take(event.dataTransfer?.files[0]); }}
      onSubmit={(event) => { event.preventDefault(); if (!chat && takes("text") && !draft.trim()) return; go({ ...CHANGED, ...(chat ? {} : { text: draft.trim() === FIRST_TEXT ? "" : draft.trim(), pair: pair.trim() }), target: target.trim() }); again?.(); }}>
      {chat && <ChatLine turns={chat} hint={tokens === null ? "" : counted} />}
      {takes("text") && !chat && <TextBox label="Type a sentence" hint={counted} over={limit !== null && about > limit} value={draft} write={setDraft} />}
      {takes("text_pair") && !chat && <Field label="A second text" hint="or nothing" value={pair} live set={setPair} />}
      {takes("target") && <Field label="The decoder's text" hint="or nothing" value={target} live set={setTarget} />}
      {takes("images") && <Chosen label="Image" name={params.image} accept="image/png,image/jpeg,image/webp,image/gif" take={take} />}
      {takes("audio") && <Chosen label="Sound" name={params.sound} accept={SOUND_FILES} take={take} />}
      {sound && takes("target") && model?.generates && <Button disabled={busy} onClick={() => void transcribe(sound.base64)}>{busy ? "Listening…" : "Transcribe"}</Button>}
      {((takes("text") && !chat) || takes("target")) && <button type="submit" class="primary" disabled={takes("text") && !chat && !draft.trim()}>Look</button>}
      <ProblemBox problem={problem} />
    </form>
  );
}

interface ChosenProps {
  label: string;
  name: string | undefined;
  accept: string;
  take: (file: File | undefined) => Promise<void>;
}

/** A file of this browser, by its name. */
const Chosen = ({ label, name, accept, take }: ChosenProps) => (
  <label><span>{label} <span class="hint">{name ?? "or drop one here"}</span></span>
    <input type="file" accept={accept} onChange={({ currentTarget }) => { void take(currentTarget.files?.[0]); currentTarget.value = ""; }} /></label>
);

/** The label of a model in a choice, with its state. */
export function modelLabel({ id, state, bytes: size, refused, base }: ModelInfo): string {
  if (refused) return `${id} · cannot be loaded`;
  const waits = state === "resident" ? "" : `, ${state === "loading" ? "loading" : "to be loaded"}, about ${bytes(size)}`;
  return `${id} · ${base ? `adapter of ${base}` : "whole model"}${waits}`;
}

/** The requests that a model's process has, and those that wait for it; none is an empty text. */
export const countsOf = ({ running, waiting }: Pick<ModelInfo, "running" | "waiting">): string =>
  [...(running ? [`${running} running`] : []), ...(waiting ? [`${waiting} waiting`] : [])].join(", ");

/** Who is answered and who waits, where that is more than this page's own request. */
const asking = (model: ModelInfo) => (model.running + model.waiting > 1 ? `${model.id} has ${countsOf(model)}.` : "");

const ASK_AGAIN_MS = 300;

/** The loading of a model that a view waits for, with its progress. `cancel` gives up what the page asked. */
export function Opening({ id, cancel }: { id: string; cancel: () => void }) {
  const [model, setModel] = useState<ModelInfo | null>(null);
  const ended = useRef(false);
  useEffect(() => {
    ended.current = false;
    const ask = () => call<ModelInfo>("GET", `v1/models/${encodeURIComponent(id)}`).then((found) => !ended.current && setModel(found), () => undefined);
    const timer = setInterval(() => void ask(), ASK_AGAIN_MS);
    return () => {
      ended.current = true;
      clearInterval(timer);
    };
  }, [id]);
  const stop = () => {
    cancel();
    // A load goes on without its caller unless the model is ended.
    if (model?.state === "loading") void call("DELETE", `v1/models/${encodeURIComponent(id)}`).catch(() => undefined);
  };
  if (model?.state !== "loading") return <p class="empty" role="status">{["Opening…", ...(model ? [asking(model)] : [])].filter(Boolean).join(" ")}</p>;
  const share = model.progress ?? 0;
  return (
    <div class="opening" role="status">
      <p>{id} is loaded into memory: about {bytes(model.bytes)}, of which its process with PyTorch takes some 300 MiB. This is needed once.</p>
      <div class="fields"><progress {...(share ? { value: share } : {})} max={1} aria-label={`Loading ${id}`} /><span>{share ? `${Math.round(100 * share)} %` : "its process starts"}</span><Button onClick={stop}>Cancel</Button></div>
    </div>
  );
}
