/** A view of the subject at hand: opens it, and offers its source, layer, head and sequence. */

import type { FunctionComponent } from "preact";
import { useState } from "preact/hooks";
import { loadScript } from "../server/api";
import { PageContext, useCorrected, useHeadKeys, useLoaded, usePage } from "../page/context";
import { openModel } from "../subjects/model_subject";
import type { Needs } from "../subjects/model_subject";
import { Controls } from "./controls";
import { MoreModels } from "./more_models";
import { Player } from "./player";
import { Opening, Sentence, modelLabel } from "./sentence";
import { sounds } from "../subjects/media";
import { recordingNames } from "../subjects/names";
import { useNowhere } from "../drawing/pointed";
import { integer } from "../page/state";
import type { Params } from "../page/state";
import { BUILT_IN, countingOf, openSubject, subjectKey } from "../subjects/subject";
import type { Subject, SubjectProps } from "../subjects/subject";
import { clip } from "../numbers/format";
import { shownStatistics } from "../numbers/matrix";
import { Choice, Field, ProblemBox, Waiting } from "./ui";

/** The parameters that belong to one subject alone. */
const CHANGED = { image: "", layer: "", head: "", query: "", key: "", zoom: "", sequence: "", edits: "", lens: "" };

export type OfSubject = FunctionComponent<SubjectProps>;

interface Kept {
  key: string;
  needs: Needs;
  made: Promise<Subject>;
  stop: AbortController;
}

/** Open what the parameters name. */
function opened(params: Params, needs: Needs = "weights"): Kept {
  const [kind, id] = (params.source ?? "").split(/:(.*)/s);
  const stop = new AbortController();
  return { key: subjectKey(params), needs, made: kind === "model" ? openModel(id, params, stop.signal, needs) : openSubject(params), stop };
}

let kept: Kept | null = null;

/** The subject of the parameters; the last one is remembered, so that all views that need no more of it share it. */
export function subjectOf(params: Params, needs: Needs = "weights"): Promise<Subject> {
  const key = subjectKey(params);
  if (kept?.key === key && (kept.needs === needs || kept.needs === "weights")) return kept.made;
  kept?.stop.abort(); // a sentence that nobody waits for any more
  const now = (kept = opened(params, needs));
  now.made.catch(() => {
    if (kept === now) kept = null;
  });
  return now.made;
}

/** Give up the subject that is being opened. */
const cancelOpening = () => kept?.stop.abort();

/** Forget the subject, so that it is opened again. */
export const forget = () => {
  kept = null;
};

/** The sources that a choice offers. */
export function useSources(): [string, string, string][] {
  const { modules, models, recordings, params } = usePage();
  const { source = "" } = params;
  const known: [string, string, string][] = [
    ...(models ?? []).map((model): [string, string, string] => [`model:${model.id}`, modelLabel(model), "Whole models"]),
    ...BUILT_IN.map(({ id, label }): [string, string, string] => [`builtin:${id}`, label, "Recordings of this page"]),
    ...[...recordingNames(recordings)].map(([id, name]): [string, string, string] => [`stored:${id}`, name, "Recordings on the server"]),
    ...modules.map((module): [string, string, string] => [`module:${module.name}`, `${module.name} · ${module.config.d_model} wide, ${module.config.num_heads} heads`, "Modules"]),
    ["raw:", "raw attention: your own q, k and v", "Your own"],
  ];
  return known.some(([value]) => value === source) ? known : [...known, [source, source.replace(":", " "), "Your own"]];
}

export function WithSubject({ load, needs }: { load: () => Promise<OfSubject>; needs: Needs }) {
  const page = usePage();
  const { params, models, refreshModels } = page;
  const key = subjectKey(params);
  const [kind, id] = (params.source ?? "").split(/:(.*)/s);
  const [opening, setOpening] = useState("");
  const sources = useSources();
  const { value, problem } = useLoaded(key, async () => {
    setOpening(`Opening ${clip(sources.find(([each]) => each === params.source)?.[1] ?? "", 60)}`);
    const [subject, Component] = await Promise.all([subjectOf(params, needs).then((made) => { setOpening("Loading this view"); return made; }), loadScript(load)]);
    if (kind === "model" && models?.find((each) => each.id === id)?.state !== "resident") void refreshModels();
    return { subject, Component, key, params };
  });
  const here = value?.key === key;
  // A view must not read the subject before this one under the key of this one. Until the next sentence of a model has
  // been read, the page shows the one before, with its own parameters.
  const before = value && !here && !problem && kind === "model" && value.params.source === params.source;
  return (
    <>
      <div class="subject-row">
        <Header subject={value?.subject ?? null} />
        {kind === "model" && <Sentence id={id} tokens={here ? (value.subject.whole?.read ?? null) : null} again={problem?.again} />}
      </div>
      <ProblemBox problem={problem} />
      {here && <><Corrected subject={value.subject} /><Chosen subject={value.subject} Component={value.Component} /></>}
      {before && <PageContext.Provider value={{ ...page, params: value.params }}><div aria-busy="true"><Chosen subject={value.subject} Component={value.Component} /></div></PageContext.Provider>}
      {!here && !before && !problem && (kind === "model" ? <Opening id={id} cancel={cancelOpening} /> : <Waiting what={opening} />)}
    </>
  );
}

/** The layer and the head of the parameters that the subject has. */
function placeOf(params: Params, { layers }: Subject): { layer: number; head: number } {
  const layer = integer(params.layer, 0, 0, layers.length - 1);
  return { layer, head: integer(params.head, 0, 0, layers[layer].heads.length - 1) };
}

/** The address names the layer, head and sequence that are shown. */
function Corrected({ subject }: { subject: Subject }) {
  const { params } = usePage();
  const { layer, head } = placeOf(params, subject);
  useHeadKeys(subject.layers.map(({ heads }) => heads.length), layer, head);
  useCorrected({ layer, head, sequence: integer(params.sequence, 0, 0, subject.sequences - 1) });
  return null;
}

function Chosen({ subject, Component }: { subject: Subject; Component: OfSubject }) {
  const { layer, head } = placeOf(usePage().params, subject);
  useNowhere(subject);
  const sound = subject.sound === undefined ? undefined : sounds.get(subject.sound);
  return (
    <>
      {sound && <Player subject={subject} layer={layer} head={head} sound={sound} />}
      <Component subject={subject} layer={layer} head={head} />
    </>
  );
}

/** The views that show all layers. */
const OF_ALL_LAYERS = ["overview", "rollout", "lens"];

function Header({ subject }: { subject: Subject | null }) {
  const { view, params, go } = usePage();
  const sources = useSources();
  const source = sources.find(([each]) => each === params.source)?.[1];
  const layers = subject?.layers ?? [];
  const layer = integer(params.layer, 0, 0, Math.max(0, layers.length - 1));
  const heads = layers.length ? layers[layer].heads : [];
  const head = integer(params.head, 0, 0, Math.max(0, heads.length - 1));
  const chooses = !OF_ALL_LAYERS.includes(view) || (view === "overview" && layers.some(({ wide }) => wide));
  return (
    <Controls class="subject" summary={[source?.split(" · ")[0], !OF_ALL_LAYERS.includes(view) && heads[head]].filter(Boolean).join(" · ")}>
      <Choice wide label="Attention of" value={params.source ?? ""} options={sources.map(([value, label, group]) => [value, clip(label, 80), group])}
        set={(source) => go({ ...CHANGED, source })} />
      {chooses && layers.length > 1 && <Choice label="Layer" value={String(layer)} set={(value) => go({ layer: value, zoom: "" })} options={layers.map(({ name }, i) => [String(i), name])} />}
      {![...OF_ALL_LAYERS, "effects"].includes(view) && heads.length > 1 && <Choice label="Head" value={String(head)} set={(value) => go({ head: value })} options={heads.map((name, i) => [String(i), name])} />}
      {subject && subject.sequences > 1 && <Choice label="Sequence" value={params.sequence ?? "0"} set={(sequence) => go({ sequence })} options={Array.from({ length: subject.sequences }, (_, i) => [String(i), `${i + 1} of ${subject.sequences}`])} />}
      {params.source?.startsWith("model:") && <MoreModels loaded={(name) => go({ ...CHANGED, source: `model:${name}` })} />}
      {view === "overview" && <Counted />}
    </Controls>
  );
}

/** What the statistics count. */
function Counted() {
  const { params, go } = usePage();
  const counting = countingOf(params);
  const { window, sinks } = counting;
  return (
    <details class="more models counted">
      <summary>What the statistics count</summary>
      <div class="fields">
        <Field label="Near: tokens to each side" type="number" min={0} value={window} set={(each) => go({ window: each })} />
        <Field label="Sinks: first keys" type="number" min={0} value={sinks} set={(each) => go({ sinks: each })} />
        <Field label="Classes of tokens" value={params.classes ?? ""} set={(classes) => go({ classes })} placeholder="articles: the a; stops: . ," />
      </div>
      <dl>{shownStatistics(counting).map(([name, label, about]) => <div key={name}><dt>{label}</dt><dd>{about}</dd></div>)}</dl>
    </details>
  );
}

let besides: Kept | null = null;

/** A second subject, to compare with: the first one again if their parameters agree. */
export function openBeside(params: Params): Promise<Subject> {
  const key = subjectKey(params);
  if (kept?.key === key) return kept.made;
  if (besides?.key !== key) {
    const now = (besides = opened(params));
    now.made.catch(() => {
      if (besides === now) besides = null;
    });
  }
  return besides.made;
}
