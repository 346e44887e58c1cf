/** The sound that a model heard: played, with the weights of the chosen head over its seconds, and the place of what is pointed at. */

import { useRef, useState } from "preact/hooks";
import { useLoaded, usePage } from "../page/context";
import { precise } from "../numbers/format";
import { marginals, row } from "../numbers/matrix";
import type { Matrix } from "../numbers/matrix";
import { NOWHERE, usePointed, usePointing } from "../drawing/pointed";
import type { Sound } from "../subjects/media";
import { subjectKey } from "../subjects/subject";
import type { Layer, Span, SubjectProps } from "../subjects/subject";
import { SoundStrip } from "./sound_strip";

const MOST_CELLS = 4_000_000; // of a head whose weights are drawn over the sound
const RESTS_MS = 150; // that the pointer rests on a small head before its weights are asked for

const written = ([from, to]: [number, number]) => `${from.toFixed(2)} to ${to.toFixed(2)} s`;
const strongest = (of: ArrayLike<number>) => Array.from(of).reduce((best, each, i, all) => (each > all[best] ? i : best), 0);

/** What the strip shows: a number for each frame, the frame that is marked, and both in words. */
function shownOf({ queries, keys, seconds = {} }: Layer, of: Matrix | null, query: number | null, key: number | null): { spans: Span[]; values?: ArrayLike<number>; marked: number | null; caption: string } {
  const [looking, seen] = [seconds.queries, seconds.keys];
  const values = seen && of ? (query === null ? marginals(of).keys : row(of, query)) : undefined;
  const spans = seen ?? looking ?? [];
  const of_query = query === null ? undefined : looking?.[query];
  const of_key = key === null ? undefined : seen?.[key];
  const common = { spans, ...(values ? { values } : {}) };
  if (key !== null && of_key) return { ...common, marked: key, caption: query === null || !values ? `${keys[key]}: ${written(of_key)}` : `${queries[query]} looks at ${written(of_key)}: ${precise(values[key], 3)}` };
  if (query !== null && of_query && looking === spans) return { ...common, marked: query, caption: `${queries[query]}: ${written(of_query)}` };
  if (query !== null && values && seen) {
    const most = strongest(values);
    const at = seen[most];
    const own = of_query ? ` (${written(of_query)})` : "";
    return { ...common, marked: at ? most : null, caption: at ? `${queries[query]}${own} looks at ${written(at)} most: ${precise(values[most], 3)}` : `${queries[query]}${own} looks most at what comes after the end of the sound` };
  }
  return { ...common, marked: null, caption: seen ? "Point at the sound, a frame or a token; click the sound to hear it from there." : "Tokens of this layer have no seconds." };
}

export function Player({ subject, layer, head, sound }: SubjectProps & { sound: Sound }) {
  const { params } = usePage();
  const pointing = usePointing();
  const { query, key, head: other } = usePointed(pointing);
  const audio = useRef<HTMLAudioElement>(null);
  const [playing, play] = useState(0);
  const [at, of] = other ? other.split("/").map(Number) : [layer, head];
  const attention = subject.layers[at];
  const small = attention.queries.length * attention.keys.length <= MOST_CELLS;
  const { value } = useLoaded(`${subjectKey(params)}/${at}/${of}`, async (signal) => {
    await new Promise((rested) => setTimeout(rested, other ? RESTS_MS : 0));
    return { at, weights: small && !signal.aborted ? await subject.weights(at, of) : null };
  });
  const weights = value?.at === at ? value.weights : null; // not those of the head before
  const inside = (token: number | null, tokens: string[]) => (token !== null && token < tokens.length ? token : null);
  const { spans, values, marked, caption } = shownOf(attention, weights, inside(query, attention.queries), inside(key, attention.keys));
  const isKey = attention.seconds?.keys !== undefined;
  const point = (frame: number | null) => pointing.set(frame === null ? NOWHERE : { ...(isKey ? { query: null, key: frame } : { query: frame, key: null }), ...(other ? { head: other } : {}) });
  const hear = (second: number) => {
    if (!audio.current) return;
    audio.current.currentTime = second;
    void audio.current.play().catch(() => undefined); // the browser cannot decode it
  };
  const follow = (second: number) => {
    play(second);
    const frame = spans.findIndex((span) => span && second >= span[0] && second < span[1]);
    if (!audio.current?.paused && frame >= 0) point(frame);
  };
  return (
    <section class="player" aria-label="The sound">
      <audio ref={audio} controls preload="auto" src={sound.url} aria-label={sound.name} onTimeUpdate={(event) => follow(event.currentTarget.currentTime)} onEnded={() => point(null)} />
      <SoundStrip sound={sound} spans={spans} values={values} marked={marked} playing={playing} label={`${sound.name} over its seconds: ${caption}`} point={point} pick={hear} />
      <p class="caption">{caption}</p>
    </section>
  );
}
