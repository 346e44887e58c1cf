/** A sound as a strip: its loudness over the seconds, a number for each of its frames in colours, and a mark. */

import { useEffect, useMemo, useRef } from "preact/hooks";
import { INKS, SCALES, colour, step } from "../drawing/colour";
import { overlaid } from "../drawing/drawings";
import { usePage, useWidth } from "../page/context";
import { largest } from "../numbers/matrix";
import type { Sound } from "../subjects/media";
import type { Span } from "../subjects/subject";

const HEIGHT = 84; // CSS pixels
const DARKEST = 0.8; // of the scale: the sound stays visible

interface SoundStripProps {
  sound: Sound;
  /** The seconds of each frame; of patches of a spectrogram several have the same. */
  spans: Span[];
  /** A number for each frame. */
  values?: ArrayLike<number> | undefined;
  signed?: boolean;
  /** The frame that is marked. */
  marked?: number | null;
  /** The second that is being played. */
  playing?: number;
  label: string;
  point?: (frame: number | null) => void;
  pick?: (second: number) => void;
}

/** The row of each frame among those that begin with it, and the most rows: the lowest frequencies come first. */
function rowsOf(spans: Span[]): { row: number[]; many: number } {
  const seen = new Map<number, number>();
  const row = spans.map((span) => {
    if (!span) return 0;
    const at = seen.get(span[0]) ?? 0;
    seen.set(span[0], at + 1);
    return at;
  });
  return { row, many: Math.max(1, ...seen.values()) };
}

/** The last second that the frames or the sound have. */
const endOf = (sound: Sound, spans: Span[]) => spans.reduce((most, span) => Math.max(most, span?.[1] ?? 0), sound.duration) || 1;

export function SoundStrip({ sound, spans, values, signed = false, marked = null, playing, label, point, pick }: SoundStripProps) {
  const { theme } = usePage();
  const [place, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const end = endOf(sound, spans);
  const { row, many } = useMemo(() => rowsOf(spans), [spans]);
  const across = width / end;
  const high = HEIGHT / many;
  const scale = useMemo(() => values && overlaid(spans.flatMap((span, i) => (span ? [values[i]] : [])), signed), [spans, values, signed]);
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!canvas.current || !pen || !width) return;
    const density = devicePixelRatio;
    Object.assign(canvas.current, { width: Math.round(width * density), height: Math.round(HEIGHT * density) });
    pen.scale(density, density);
    const inks = INKS[theme];
    pen.fillStyle = inks.paper;
    pen.fillRect(0, 0, width, HEIGHT);
    if (values && scale) spans.forEach((span, i) => {
      if (!span) return;
      const share = DARKEST * scale.place(values[i]);
      pen.fillStyle = signed ? SCALES.differences[theme].css[step(0.5 + share / 2)] : colour(theme, share);
      pen.fillRect(span[0] * across, HEIGHT - (row[i] + 1) * high, Math.max(1, (span[1] - span[0]) * across + 0.5), high);
    });
    pen.fillStyle = inks.soft;
    const loudest = largest(sound.peaks) || 1;
    const wide = (sound.duration * across) / (sound.peaks.length || 1);
    sound.peaks.forEach((peak, i) => {
      const tall = Math.max(1, (peak / loudest) * HEIGHT * 0.4);
      pen.fillRect(i * wide, (HEIGHT - tall) / 2, Math.max(0.5, wide * 0.6), tall);
    });
    const at = marked === null ? null : spans[marked];
    if (at && marked !== null) {
      pen.strokeStyle = inks.second;
      pen.lineWidth = 2;
      const wide = Math.max(4, (at[1] - at[0]) * across);
      pen.strokeRect(((at[0] + at[1]) * across) / 2 - wide / 2, HEIGHT - (row[marked] + 1) * high + 1, wide, high - 2);
    }
    if (playing) {
      pen.fillStyle = inks.accent;
      pen.fillRect(playing * across - 1, 0, 2, HEIGHT);
    }
  });
  const frameAt = (x: number, y: number) => {
    const second = x / across;
    const from = many - 1 - Math.min(many - 1, Math.max(0, Math.floor(y / high)));
    const found = spans.findIndex((span, i) => span && second >= span[0] && second < span[1] && row[i] === from);
    return found < 0 ? null : found;
  };
  return (
    <div ref={place} class="strip">
      <canvas ref={canvas} role="img" aria-label={label} style={{ width: `${width}px`, height: `${HEIGHT}px` }}
        onPointerMove={(event) => point?.(frameAt(event.offsetX, event.offsetY))} onPointerLeave={() => point?.(null)}
        onClick={(event) => pick?.(event.offsetX / across)} />
      <p class="seconds" aria-hidden="true"><span>0 s</span>{scale && <span>colours from {scale.ends[0]} to {scale.ends[1]}</span>}<span>{end.toFixed(2)} s</span></p>
    </div>
  );
}
