/** Token lines of one head or of several heads of a layer, each in its colour; a legend switches heads off and on. */

import { follow, useLoaded, usePage } from "../../page/context";
import { lineScene } from "../../drawing/drawings";
import type { Lines } from "../../drawing/drawings";
import { headStroke } from "../../drawing/head_colours";
import { usePointed, usePointing } from "../../drawing/pointed";
import { format } from "../../page/state";
import type { Params } from "../../page/state";
import { headTitle, subjectKey } from "../../subjects/subject";
import type { SubjectProps } from "../../subjects/subject";
import { TokenLines, readout } from "../../parts/token_lines";
import { Button, Export, ProblemBox, Waiting } from "../../parts/ui";

const LEAST_OF_ONE = 0.01; // of the lines of a token that is pointed at

/** The heads whose lines are drawn: those of the address, `lines=0,3`, else the chosen one. */
function headsOf(params: Params, head: number, many: number): number[] {
  const named = (params.lines ?? "").split(",").filter(Boolean).map(Number).filter((each) => Number.isInteger(each) && each >= 0 && each < many);
  return named.length ? [...new Set(named)].sort((a, b) => a - b) : [head];
}

interface HeadLinesProps extends SubjectProps {
  /** The least weight that is a line. */
  least: number;
  /** The query whose lines are drawn while nothing is pointed at; null for all. */
  only: number | null;
}

export function HeadLines({ subject, layer, head, least, only }: HeadLinesProps) {
  const { params, go, theme } = usePage();
  const { name: layerName, heads, queries, keys } = subject.layers[layer];
  const chosen = headsOf(params, head, heads.length);
  const place = `${subjectKey(params)}/${layer}/${chosen.join()}`;
  const { value, problem } = useLoaded(place, async () => ({ place, weights: await Promise.all(chosen.map((each) => subject.weights(layer, each))) }));
  const weights = value?.place === place ? value.weights : null;
  const pointed = usePointed(usePointing());
  // One head alone has no colour of its own.
  const drawn = weights?.map((of, i): Lines => (weights.length === 1 ? { of } : { of, name: heads[chosen[i]], ...headStroke(theme, chosen[i]) })) ?? [];
  const title = chosen.length === 1 ? headTitle(subject, layer, chosen[0]) : `${layerName} · ${chosen.map((each) => heads[each]).join(", ")}`;
  const rows = () => drawn.flatMap(({ of }, at) => Array.from(of.data, (weight, i) => [heads[chosen[at]], queries[Math.floor(i / of.columns)], keys[i % of.columns], weight]).filter(([, , , weight]) => Math.abs(Number(weight)) >= least));
  const choose = (list: number[]) => go({ lines: list.length === 1 && list[0] === head ? "" : list.join() });
  const toggled = (each: number) => (chosen.includes(each) ? chosen.filter((other) => other !== each) : [...chosen, each].sort((a, b) => a - b));
  const open = (each: number, cell: { query?: number; key?: number } = {}) => ({ head: each, lines: "", show: "", ...cell });
  return (
    <>
      {heads.length > 1 && (
        <ul class="colours" aria-label="Heads whose lines are drawn">
          {heads.map((name, each) => {
            const on = chosen.includes(each);
            const { ink, dash } = headStroke(theme, each);
            const to = { view: "head", params: { ...params, head: String(each), lines: "", show: "" } };
            return (
              <li key={name}>
                <Button class="quiet" aria-pressed={on} aria-label={`Lines of ${name}`} disabled={on && chosen.length === 1} onClick={() => choose(toggled(each))}>
                  <svg width={26} height={12} aria-hidden="true"><path d="M1,6H25" stroke={ink} stroke-width={4} stroke-dasharray={dash.join(" ") || undefined} /></svg>
                </Button>
                <a href={format(to)} title={`Open ${name}`} onClick={follow(() => go(open(each)))}>{name}</a>
              </li>
            );
          })}
          <li><Button class="quiet" disabled={chosen.length === heads.length} onClick={() => choose(heads.map((_, each) => each))}>All heads</Button></li>
          <li><Button class="quiet" disabled={chosen.length === 1} onClick={() => choose([head])}>One head</Button></li>
        </ul>
      )}
      <ProblemBox problem={problem} />
      {!weights && !problem && <Waiting what="Reading the weights" />}
      {weights && (
        <>
          <Export of={{ name: `lines-${layerName}`, scene: () => lineScene(drawn, { theme, title, queries, keys, least, only }), rows: () => [["head", "query", "key", "weight"], ...rows()], json: () => ({ layer: layerName, heads: chosen, queries, keys, least, weights: weights.map(({ data }) => Array.from(data)) }) }} />
          <p class="caption" aria-hidden="true">{readout(weights.map((of, i) => ({ name: heads[chosen[i]], of })), queries, keys, pointed)}</p>
          <TokenLines drawn={drawn} queries={queries} keys={keys} title={title} least={{ all: least, one: Math.min(least, LEAST_OF_ONE) }} only={only}
            pick={(at, query, key) => go(open(chosen[at], { query, key }))} />
          <p class="small">Point at a token to see its lines alone. A click on a line{heads.length > 1 ? " or on a head's name" : ""} opens the map of that head.</p>
        </>
      )}
    </>
  );
}
