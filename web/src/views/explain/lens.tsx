/** Lens: the token that each layer would predict at each place if it were read out at once, and what each head adds. */

import { useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { colour } from "../../drawing/colour";
import { useCorrected, useLoaded, usePage } from "../../page/context";
import { heatScene } from "../../drawing/drawings";
import { precise } from "../../numbers/format";
import { matrix } from "../../numbers/matrix";
import { integer } from "../../page/state";
import { shownToken } from "../../subjects/model_subject";
import { refOf, subjectKey } from "../../subjects/subject";
import type { SubjectProps } from "../../subjects/subject";
import type { LensReply } from "../../server/types";
import { Pictured } from "../../parts/pictured";
import { FittedLenses } from "./fitted_lenses";
import { Button, Commands, Export, ProblemBox, Table, Waiting } from "../../parts/ui";

const MOST_PLACES = 64; // tokens across
const LIKELIEST = 5;
const DARKEST = { light: 0.45, dark: 0.35 }; // of the scale: letters stay readable

const request = (model: string, body: object): ApiRequest & { body: Record<string, unknown> } => ({ method: "POST", path: `v1/models/${encodeURIComponent(model)}/lens`, body: { ...body } });

export function Lens({ subject, layer }: SubjectProps) {
  const { params, models } = usePage();
  const { whole } = subject;
  const model = models?.find(({ id }) => id === whole?.id);
  const predicts = model?.predicts ?? null;
  const own = predicts === "own" && model?.takes.includes("text") === true; // it predicts the tokens of a text, each in its place
  if (!whole?.id || !whole.input) return <p>A lens reads a whole model: choose one above, and type a sentence.</p>;
  if (model && predicts !== "next" && !own) return <p>{whole.id} predicts no tokens of a text: there is nothing to read its layers out by.</p>;
  const places = Array.from({ length: Math.min(whole.tokens, MOST_PLACES) }, (_, i) => whole.tokens - Math.min(whole.tokens, MOST_PLACES) + i);
  const lens = params.lens && !own ? { kind: "jacobian", lens: params.lens } : {};
  return (
    <>
      {!own && <FittedLenses key={whole.id} id={whole.id} chosen={params.lens} />}
      <Grid key={`${subjectKey(params)}/${params.lens ?? ""}`} subject={subject} layer={layer} id={whole.id} own={own} input={{ ...whole.input, ...lens }} places={places} cut={whole.tokens > MOST_PLACES} />
    </>
  );
}

interface GridProps extends Pick<SubjectProps, "subject" | "layer"> {
  id: string;
  /** Each token is predicted in its own place, and not the one after it. */
  own: boolean;
  /** What the model read, and the lens to read it by. */
  input: Record<string, unknown>;
  /** The positions across. */
  places: number[];
  cut: boolean;
}

function Grid({ subject, layer, id, own, input, places, cut }: GridProps) {
  const { params, go, theme } = usePage();
  const sent = request(id, { ...input, of: ["hidden"], positions: places, top_k: LIKELIEST });
  const { value, problem } = useLoaded(JSON.stringify(sent.body), (signal) => call<LensReply>(sent.method, sent.path, sent.body, signal));
  const at = integer(params.at, places[places.length - 1], places[0], places[places.length - 1]);
  useCorrected(params.at === undefined ? {} : { at });
  if (problem) return <ProblemBox problem={problem} />;
  if (!value) return <Waiting what={`Asking the server for the readings of ${id}`} />;
  const { names } = value;
  const tokens = (Array.isArray(value.labels) ? value.labels[0] : value.labels).tokens.map(shownToken);
  const name = (token: number) => shownToken(names[token] ?? String(token));
  /** Layers of the lens, with their places among those of the subject. */
  const layers = value.layers.flatMap(({ layer: ref, hidden }) => (hidden?.top ? [{ ref: String(ref), index: subject.layers.findIndex((each) => each.ref === String(ref)), top: hidden.top }] : []));
  const column = places.indexOf(at);
  const said = layers.at(-1)?.top.ids[column]?.[0];
  // Nobody chose a layer: the first that says the prediction.
  const row = (params.layer === undefined ? layers.find(({ top }) => top.ids[column]?.[0] === said) : layers.find(({ index }) => index === layer)) ?? layers[layers.length - 1];
  const title = (ref: string) => (/^\d+$/.test(ref) ? `L${ref}` : ref);
  const chances = matrix(layers.length, places.length, Float32Array.from(layers.flatMap(({ top }) => top.probabilities?.map(([first]) => first) ?? [])));
  const across = places.map((place) => `${place} ${tokens[place]}`);
  return (
    <>
      <p class="small">A cell has the likeliest {own ? "token in that place" : "next token"} if the states after that layer {own ? "are read out by the model's head" : `are read out by ${params.lens ? "the Jacobian of the lens, " : ""}the final norm and the unembedding`}. Darker is likelier. The last row is the prediction of the model.{cut ? ` The last ${MOST_PLACES} tokens of the text.` : ""} Click a cell for its layer and its heads.</p>
      <Export of={{
        name: "lens",
        scene: () => heatScene(chances, { theme, title: "probability of the likeliest token, by layer", queries: layers.map(({ ref }) => title(ref)), keys: across, axes: ["layers", "tokens"] }),
        rows: () => [["layer", ...across], ...layers.map(({ ref, top }) => [title(ref), ...top.ids.map(([first]) => name(first))])],
        json: () => value,
      }} />
      <Pictured picture={<div class="scroll lens" role="region" aria-label="The likeliest token of each layer at each token" tabIndex={0}>
        <table>
          <caption class="hidden">The likeliest token of each layer at each token</caption>
          <thead><tr><th scope="col">layer</th>{places.map((place, i) => <th key={place} scope="col" class={i === column ? "at" : undefined}>{tokens[place]}</th>)}</tr></thead>
          <tbody>
            {layers.map(({ ref, index, top }) => (
              <tr key={ref}>
                <th scope="row">{title(ref)}</th>
                {places.map((place, i) => {
                  const chance = top.probabilities?.[i][0] ?? 0;
                  const read = name(top.ids[i][0]);
                  return (
                    <td key={place}><button type="button" aria-pressed={ref === row.ref && i === column} aria-label={`${title(ref)} at ${place} ${tokens[place]}: ${read} ${precise(chance, 2)}`} title={top.ids[i].map((each, j) => `${name(each)} ${precise(top.probabilities?.[i][j] ?? 0, 2)}`).join("\n")}
                      style={{ background: colour(theme, DARKEST[theme] * chance) }} onClick={() => go({ layer: index, at: place })}>{read}</button></td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>}>
        <div class="side">
        <Table caption={`Read after ${title(row.ref)}, ${own ? "in the place of" : "at"} ${across[column]}`} rows={row.top.ids[column]} columns={[
          { head: own ? "token" : "next token", header: true, cell: name },
          { head: "logit", number: true, cell: (_, i) => precise(row.top.logits[column][i]) },
          { head: "probability", number: true, cell: (_, i) => precise(row.top.probabilities?.[column][i] ?? NaN, 3) },
        ]} />
        <Heads key={own ? `${row.ref}/${at}` : id} wait={own} id={id} input={input} layer={{ ref: row.ref, index: row.index }} place={at} target={layers[layers.length - 1].top.ids[column][0]} named={name} />
        </div>
      </Pictured>
      <Commands calls={[sent]} />
    </>
  );
}

interface HeadsProps {
  id: string;
  /** Ask once the reader wants it: a head of the model that is no matrix has no parts of heads, and the server says so. */
  wait: boolean;
  input: Record<string, unknown>;
  layer: { ref: string; index: number };
  place: number;
  /** The token that the model itself predicts. */
  target: number;
  named: (token: number) => string;
}

/** What each head of a layer adds to the logits at one token, and to that of the model's own prediction. */
function Heads({ id, wait, input, layer, place, target, named }: HeadsProps) {
  const { go } = usePage();
  const sent = request(id, { ...input, of: ["heads"], layers: [refOf(layer.ref)], positions: [place], top_k: LIKELIEST, targets: [target] });
  const [wanted, want] = useState(!wait);
  const { value, problem, busy } = useLoaded(wanted ? JSON.stringify(sent.body) : "", async (signal) => (wanted ? call<LensReply>(sent.method, sent.path, sent.body, signal) : null));
  const heads = value?.layers[0].heads;
  if (!wanted) return <div><Button onClick={() => want(true)}>What each head adds</Button></div>;
  if (problem) return <ProblemBox problem={problem} />;
  if (!heads) return <Waiting what="Asking the server for the heads" />;
  const title = (head: number) => (/^\d+$/.test(layer.ref) ? `L${layer.ref}H${head}` : `${layer.ref} H${head}`);
  const rows = (heads.top?.ids ?? []).map(([ids], head) => ({ head, ids, added: heads.targets?.[head][0][0] ?? NaN }));
  return (
    <div aria-busy={busy}>
      <Table caption={`What each head adds to the logits there, and to that of ${named(target)}`} rows={rows} columns={[
        { head: "head", header: true, cell: ({ head }) => <Button class="quiet" aria-label={`Open ${title(head)}`} onClick={() => go({ view: "head", layer: layer.index, head, query: place })}>{title(head)}</Button> },
        { head: named(target), number: true, title: "the direct contribution to the logit of the token that the model predicts", cell: ({ added }) => precise(added, 3) },
        { head: "promotes most", cell: ({ ids }) => <span class="wrap">{ids.map((each) => shownToken(value.names[each] ?? String(each))).join(" ")}</span> },
      ]} />
      <Commands calls={[sent]} />
    </div>
  );
}
