/** A chart of shares with their intervals, one for each of a row of things such as layers. */

import { scaleLinear } from "d3-scale";
import { INKS } from "./colour";
import type { Theme } from "./colour";
import type { Scene, Shape } from "./scene";
import { precise } from "../numbers/format";

export interface Interval {
  label: string;
  value: number;
  low: number;
  high: number;
}

interface IntervalOptions {
  theme: Theme;
  title: string;
  across: string;
  /** The share with a line across, and its name. */
  reference: { value: number; label: string };
  /** The index of the one that is meant. */
  marked?: number | undefined;
}

const SIZE = { width: 460, height: 240, left: 44, right: 14, top: 34, bottom: 40 };
const CAP = 4; // half the width of the end of an interval
const MOST_LABELS = 16;

/** Each share from 0 to 1 as a point over its interval. */
export function intervalScene(of: Interval[], { theme, title, across, reference, marked }: IntervalOptions): Scene {
  const inks = INKS[theme];
  const { width, height, left, right, top, bottom } = SIZE;
  const x = scaleLinear([-0.5, of.length - 0.5], [left, width - right]);
  const y = scaleLinear([0, 1], [height - bottom, top]);
  const shapes: Shape[] = [{ kind: "text", x: 4, y: 16, text: title, size: 13, bold: true, fill: inks.ink }];
  for (const tick of y.ticks(4)) {
    shapes.push({ kind: "path", d: `M${left},${y(tick)}H${width - right}`, stroke: inks.hair });
    shapes.push({ kind: "text", x: left - 6, y: y(tick) + 4, text: String(tick), anchor: "end", fill: inks.soft });
  }
  shapes.push({ kind: "path", d: `M${left},${y(reference.value)}H${width - right}`, stroke: inks.soft, dash: [4, 3] });
  shapes.push({ kind: "text", x: width - right, y: y(reference.value) - 4, text: reference.label, anchor: "end", fill: inks.soft });
  shapes.push({ kind: "text", x: (left + width - right) / 2, y: height - 6, text: across, anchor: "middle", fill: inks.soft });
  const step = Math.ceil(of.length / MOST_LABELS);
  of.forEach(({ label, value, low, high }, i) => {
    const ink = i === marked ? inks.second : inks.accent;
    const at = x(i);
    shapes.push({ kind: "path", d: `M${at - CAP},${y(low)}h${2 * CAP}M${at - CAP},${y(high)}h${2 * CAP}M${at},${y(low)}V${y(high)}`, stroke: ink, width: 1.5 });
    shapes.push({ kind: "circle", x: at, y: y(value), r: i === marked ? 5 : 3.5, fill: ink, tip: `${label}: ${precise(value, 3)}, ${precise(low, 3)} to ${precise(high, 3)}` });
    if (i % step === 0) shapes.push({ kind: "text", x: at, y: height - bottom + 16, text: label, anchor: "middle", fill: inks.soft });
  });
  return { width, height, title, shapes };
}
