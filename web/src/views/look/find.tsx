/** Find heads: all heads of a model by what they do in many texts, sounds or images, and those in which one is strongest. */

import { useEffect, useMemo, useState } from "preact/hooks";
import corpus from "../../../../client/attention_client/survey/texts.txt?raw";
import { callTensors, problemOf } from "../../server/api";
import type { ProblemDocument } from "../../server/api";
import { useHeadKeys, useLoaded, usePage } from "../../page/context";
import { precise, whole } from "../../numbers/format";
import { LinkedHead } from "../../parts/linked_head";
import { matrix } from "../../numbers/matrix";
import { layerTokens, shownToken } from "../../subjects/model_subject";
import type { WeightsReply } from "../../subjects/model_subject";
import { Scatter, counted, labelOf, scatterScene, spreadScene } from "./find_drawings";
import { Files, inputsOf, mediaOf } from "./find_inputs";
import { LinkedPairs } from "./linked_pairs";
import { useNowhere } from "../../drawing/pointed";
import { Opening } from "../../parts/sentence";
import { integer } from "../../page/state";
import { RETRIEVAL, distribution, linesOf, means, passageRequest, statisticsIn, strongest, survey, textsOf } from "../../subjects/survey";
import type { Medium, Survey } from "../../subjects/survey";
import type { ModelInfo } from "../../server/types";
import { Area, Button, Choice, Commands, Drawing, Export, FactList, Field, ProblemBox, Table, Waiting } from "../../parts/ui";

const SHIPPED = textsOf(corpus);
const PASSAGES = 5;
const PAIRS = "pairs"; // in the address: heads by given pairs of tokens, and not by many texts
const MOST_LINES = 256; // tokens of a passage that is drawn with lines
const NONE = { files: [] as string[], texts: "" };
/** The texts and files of one's own, and the last survey: kept while other views are shown. A link cannot carry them. */
const kept: { own: string; needle: string; sounds: typeof NONE; images: typeof NONE; last: { of: Survey; from: string } | null } = { own: "", needle: "", sounds: NONE, images: NONE, last: null };
/** The two statistics of the first drawing. */
const FIRST = { texts: ["previous_token", "induction"], sounds: ["max_weight", "alignment"], images: ["mean_distance", "max_weight"] };

const labelsIn = (of: Survey) => statisticsIn(of).map(([name, label]): [string, string] => [name, label]);
const known = (of: Survey, name: string | undefined, otherwise: string) => (name !== undefined && name in of.values ? name : otherwise);

export function Find() {
  const { params, go, models } = usePage();
  const able = (models ?? []).filter((each) => !each.refused && (each.takes.includes("text") || mediaOf(each).length));
  const [kind, name] = (params.source ?? "").split(/:(.*)/s);
  const model = able.find(({ id }) => kind === "model" && id === name) ?? able[0];
  if (!models) return <Waiting what="Asking the server for its models" />;
  if (!able.length) return <p class="empty">The server has no whole model, or no transformers.</p>;
  const texts: [string, string][] = model.takes.includes("text") ? [["shipped", `the ${SHIPPED.length} that ship`], ["own", "your own"]] : [];
  const options = [...texts, ...mediaOf(model).map((each): [string, string] => [each, `your ${each}`])];
  const from = options.find(([value]) => value === params.texts)?.[0] ?? options[0][0];
  const linking = params.find === PAIRS && model.takes.includes("text");
  return (
    <>
      <div class="fields subject">
        <Choice wide label="Heads of" value={model.id} set={(id) => go({ source: `model:${id}`, layer: "", head: "", passage: "", survey: "", pairs: "" })} options={able.map(({ id }): [string, string] => [id, id])} />
        {texts.length > 0 && <Choice label="Find" value={linking ? PAIRS : ""} set={(find) => go({ find, layer: "", head: "" })} options={[["", "heads by what they do in many texts"], [PAIRS, "heads that link my pairs of tokens"]]} />}
        {!linking && options.length > 1 && <Choice label={mediaOf(model).length ? "Inputs" : "Texts"} value={from} set={(chosen) => go({ texts: chosen === "shipped" ? "" : chosen, passage: "", survey: "" })} options={options} />}
      </div>
      {linking ? <LinkedPairs key={model.id} model={model} /> : <Surveyed key={`${model.id}/${from}`} model={model} from={from} />}
    </>
  );
}

const isMedium = (from: string): from is Medium => from === "sounds" || from === "images";

function Surveyed({ model, from }: { model: ModelInfo; from: string }) {
  const { params, go, announce, refreshModels } = usePage();
  const [written, write] = useState(kept.own);
  const [hidden, hide] = useState(kept.needle);
  const own = from === "own";
  const kind = isMedium(from) ? from : null;
  const [media, setMedia] = useState(kind ? kept[kind] : NONE);
  const keep = (change: Partial<typeof NONE>) => kind && setMedia((kept[kind] = { ...kept[kind], ...change }));
  const needle = own ? hidden : "";
  const inputs = useMemo(() => (kind ? inputsOf(model, kind, media.files, linesOf(media.texts, media.files.length)) : []), [kind, media, model]);
  const texts = useMemo(() => (kind ? inputs.map(({ shown }) => shown) : own ? textsOf(written) : SHIPPED), [kind, inputs, own, written]);
  const what = kind ?? "texts";
  const [done, setDone] = useState(0);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [running, setRunning] = useState<AbortController | null>(null);
  useEffect(() => () => running?.abort(), [running]);
  const found = kept.last?.of.model === model.id && kept.last.from === from ? kept.last.of : null;
  const past = found && (found.texts.join("\n") !== texts.join("\n") || (found.needle ?? "") !== needle); // the texts were changed since
  const run = async () => {
    const stop = new AbortController();
    setRunning(stop);
    setProblem(null);
    setDone(0);
    try {
      kept.last = { of: await survey(model.id, texts, stop.signal, setDone, needle, kind ? { kind, inputs } : undefined), from };
      announce(`${texts.length} ${what} went through ${model.id}.`);
      if (!model.layers.length) void refreshModels();
    } catch (fault) {
      if (!stop.signal.aborted) setProblem(problemOf(fault));
    } finally {
      setRunning(null);
    }
  };
  const wanted = params.survey === "yes" && from === "shipped" && !found;
  useEffect(() => {
    if (wanted) void run(); // a link to what was found
  }, []);
  const take = (file: File | undefined) => void file?.text().then((text) => write((kept.own = text)));
  return (
    <>
      {own && (
        <div class="fields">
          <Area label="Texts" hint={`one a line; they stay in this browser and go to the server alone${texts.length ? `. ${whole(texts.length)} now` : ""}`} value={written} set={(text) => write((kept.own = text))} rows={6} />
          <label><span>or a file</span><input type="file" accept=".txt,text/plain" onChange={(event) => take(event.currentTarget.files?.[0])} /></label>
          <Field wide label="Needle" hint="optional: words that every text has. The model answers each text; retrieval is the share of these words that a head copies into the answer" value={hidden} live set={(words) => hide((kept.needle = words))} />
        </div>
      )}
      {kind && <Files model={model} kind={kind} files={media.files} choose={(files) => keep({ files })} written={media.texts} write={(lines) => keep({ texts: lines })} />}
      {kind && media.files.length > 0 && !texts.length && <p role="status">{whole(linesOf(media.texts, media.files.length).length)} lines for {whole(media.files.length)} files: write one for each, or none.</p>}
      <div class="fields" role="status">
        {running
          ? <><progress value={done} max={texts.length} aria-label="Texts that went through the model" /><span>{done ? `${whole(done)} of ${whole(texts.length)} ${what}` : `asking ${model.id}`}</span><Button onClick={() => running.abort()}>Cancel</Button></>
          : <Button class="primary" disabled={!texts.length} onClick={() => { go({ survey: "yes" }, "replace"); void run(); }}>{found && !past ? "Go through them again" : `Go through ${whole(texts.length)} ${what}`}</Button>}
      </div>
      <ProblemBox problem={problem} />
      {running && !done && model.state !== "resident" && <Opening id={model.id} cancel={() => running.abort()} />}
      {!found && !running && !problem && <p class="small">Every {what.slice(0, -1)} goes through {model.id} once. Each head then stands at its means of two statistics; click one for its distribution and the passages in which it is strongest.</p>}
      {past && <p role="status">The result below is for the {whole(found.texts.length)} {what} that went through before, not for the present ones.</p>}
      {found && <Found of={found} />}
    </>
  );
}

function Found({ of }: { of: Survey }) {
  const { params, go, theme } = usePage();
  const [firstX, firstY] = FIRST[of.media?.kind ?? "texts"];
  const [x, y] = [known(of, params.x, firstX), known(of, params.y, of.needle ? RETRIEVAL[0] : firstY)];
  const labels = labelsIn(of);
  const [across, up] = useMemo(() => [means(of, x), means(of, y)], [of, x, y]);
  const order = useMemo(() => of.heads.map((_, at) => at).sort((a, b) => up[b] - up[a]), [of, up]);
  const [layer, head] = [integer(params.layer, -1), integer(params.head, -1)];
  const chosen = of.heads.findIndex((each) => each.layer === layer && each.head === head);
  const at = chosen < 0 ? order[0] : chosen;
  const heads: number[] = []; // of each layer
  for (const each of of.heads) heads[each.layer] = (heads[each.layer] ?? 0) + 1;
  useHeadKeys(heads, of.heads[at].layer, of.heads[at].head);
  const pick = (each: number) => go({ layer: of.heads[each].layer, head: of.heads[each].head, passage: "" });
  const table = () => [["layer", "head", ...labels.map(([name]) => name)], ...of.heads.map((each, i) => [String(each.ref), each.head, ...labels.map(([name]) => means(of, name)[i])])];
  const scene = () => scatterScene(of, x, y, across, up, at, theme);
  return (
    <div class="beside found">
      <section aria-label="All heads">
        <div class="fields">
          <Choice label="Across" value={x} set={(name) => go({ x: name })} options={labels} />
          <Choice label="Up" value={y} set={(name) => go({ y: name })} options={labels} />
        </div>
        <Scatter scene={scene()} across={across} up={up} at={at} pick={pick} names={of.heads.map(({ name }) => name)} labels={[labelOf(x), labelOf(y)]} />
        <Export of={{ name: "heads", label: "all heads", scene, rows: table, json: () => ({ model: of.model, texts: of.texts, heads: of.heads.map((each, i) => ({ layer: each.ref, head: each.head, statistics: Object.fromEntries(labels.map(([name]) => [name, { ...distribution(of, i, name), strongest: strongest(of, i, name, PASSAGES) }])) })) }) }} />
        <details>
          <summary>As a table</summary>
          <Table caption={`Means over ${counted(of)}, by ${labelOf(y)}`} rows={order} columns={[
            { head: "head", header: true, cell: (each) => <Button class="quiet" aria-pressed={each === at} onClick={() => pick(each)}>{of.heads[each].name}</Button> },
            { head: labelOf(y), number: true, cell: (each) => precise(up[each]) },
            { head: labelOf(x), number: true, cell: (each) => precise(across[each]) },
          ]} />
        </details>
      </section>
      <OneHead key={at} of={of} at={at} y={y} />
    </div>
  );
}

/** One head: the distribution of a statistic, and its strongest passages by it. */
function OneHead({ of, at, y }: { of: Survey; at: number; y: string }) {
  const { params, go, theme } = usePage();
  const each = of.heads[at];
  const by = known(of, params.by, y);
  const spread = distribution(of, at, by);
  const passages = strongest(of, at, by, PASSAGES);
  const passage = passages.find(({ text }) => text === integer(params.passage, -1)) ?? passages.at(0);
  const scene = spreadScene(spread, `${labelOf(by)} of ${each.name} over ${counted(of)}`, theme);
  return (
    <section aria-label={each.name}>
      <h3>{each.name}</h3>
      <div class="fields"><Choice label="Strongest by" value={by} set={(name) => go({ by: name, passage: "" })} options={labelsIn(of)} /></div>
      <Drawing fit scene={scene} />
      <FactList facts={[["mean", precise(spread.mean)], ["least", precise(spread.quantiles[0])], ["quartiles", spread.quantiles.slice(1, 4).map((value) => precise(value, 3)).join(", ")], ["largest", precise(spread.quantiles[4])]]} />
      <Export of={{ name: "distribution", label: "distribution of the head", scene: () => scene, rows: () => [["text", by], ...strongest(of, at, by, of.texts.length).map(({ text, value }) => [of.texts[text], value])], json: () => ({ head: each.name, statistic: by, ...spread }) }} />
      <h4>Passages</h4>
      <ol class="passages">
        {passages.map(({ text, value }) => <li key={text}><button type="button" aria-pressed={text === passage?.text} onClick={() => go({ passage: text })}><b>{precise(value, 3)}</b> {of.texts[text]}</button></li>)}
      </ol>
      {passage && <Passage of={of} at={at} text={passage.text} />}
    </section>
  );
}

/** What a head looks at in one text. */
function Passage({ of, at, text }: { of: Survey; at: number; text: number }) {
  const { go } = usePage();
  const each = of.heads[at];
  const read = of.media ? of.media.inputs[text] : null;
  const own = (name: string) => (typeof read?.body[name] === "string" ? read.body[name] : "");
  const opened = !read ? { text: of.texts[text] } : { ...(own("text") && { text: own("text") }), target: own("target"), [of.media?.kind === "sounds" ? "sound" : "image"]: read.file };
  const request = passageRequest(of, each, text);
  const { value, problem, busy } = useLoaded(JSON.stringify(request), async () => {
    const { reply, tensors } = await callTensors<WeightsReply>(request.path, request.body);
    const { shape, data } = tensors["layers.0.weights"];
    const [rows, columns] = shape.slice(-2);
    const [queries, keys] = layerTokens(reply, String(each.ref), 0).map((labels) => labels.tokens.map(shownToken));
    return { text, of: matrix(rows, columns, data.subarray(0, rows * columns)), queries, keys };
  });
  useNowhere(value);
  if (!value) return problem ? <ProblemBox problem={problem} /> : <Waiting what={`Asking for the weights of ${each.name}`} />;
  return (
    <div aria-busy={busy || value.text !== text}>
      <LinkedHead of={value.of} queries={value.queries} keys={value.keys} title={`${each.name} in this passage`} range="unit" most={MOST_LINES} />
      <Button onClick={() => go({ view: "head", source: `model:${of.model}`, messages: "", ...opened, layer: each.layer, head: each.head })}>Open in Head</Button>
      <Commands calls={[request]} />
    </div>
  );
}
