/** The drawings of a survey: all heads at two statistics, and the distribution of one head over the texts. */

import { scaleLinear } from "d3-scale";
import type { TargetedKeyboardEvent } from "preact";
import { useRef, useState } from "preact/hooks";
import { INKS, colour } from "../../drawing/colour";
import type { Theme } from "../../drawing/colour";
import { precise } from "../../numbers/format";
import { attributes } from "../../drawing/scene";
import type { Scene, Shape } from "../../drawing/scene";
import { RETRIEVAL, SURVEYED } from "../../subjects/survey";
import type { Distribution, Survey } from "../../subjects/survey";

/** The number of texts, sounds or images of a survey. */
export const counted = ({ texts, media }: Survey) => `${texts.length} ${media?.kind ?? "texts"}`;
/** The name of a statistic in words. */
export const labelOf = (name: string) => [...SURVEYED, RETRIEVAL].find(([each]) => each === name)?.[1] ?? name;

const SIZE = { width: 560, height: 440, left: 58, right: 16, top: 16, bottom: 46 };

/** All heads at their means of two statistics; later layers are darker, and the head at hand has a ring. */
export function scatterScene(of: Survey, x: string, y: string, across: number[], up: number[], at: number, theme: Theme): Scene {
  const { width, height, left, right, top, bottom } = SIZE;
  const inks = INKS[theme];
  const ends = (values: number[]): [number, number] => {
    const real = values.filter(Number.isFinite);
    const [low, high] = [Math.min(...real), Math.max(...real)];
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  };
  const rightward = scaleLinear(ends(across), [left + 10, width - right - 10]).nice(5);
  const upward = scaleLinear(ends(up), [height - bottom - 10, top + 10]).nice(5);
  const shapes: Shape[] = [];
  for (const value of upward.ticks(5)) shapes.push({ kind: "path", d: `M${left},${upward(value)}H${width - right}`, stroke: inks.hair }, { kind: "text", x: left - 6, y: upward(value) + 4, text: upward.tickFormat(5)(value), anchor: "end", fill: inks.soft });
  for (const value of rightward.ticks(5)) shapes.push({ kind: "path", d: `M${rightward(value)},${top}V${height - bottom}`, stroke: inks.hair }, { kind: "text", x: rightward(value), y: height - bottom + 16, text: rightward.tickFormat(5)(value), anchor: "middle", fill: inks.soft });
  shapes.push({ kind: "text", x: (left + width - right) / 2, y: height - 8, text: labelOf(x), anchor: "middle", fill: inks.ink, size: 12 });
  shapes.push({ kind: "text", x: 13, y: (top + height - bottom) / 2, text: labelOf(y), anchor: "middle", turn: -90, fill: inks.ink, size: 12 });
  const last = Math.max(1, ...of.heads.map(({ layer }) => layer));
  of.heads.forEach((each, i) => {
    const [cx, cy] = [rightward(across[i]), upward(up[i])];
    if (!Number.isFinite(cx + cy)) return shapes.push({ kind: "circle", x: -99, y: -99, r: 5 });
    return shapes.push({ kind: "circle", x: cx, y: cy, r: i === at ? 8 : 5.5, fill: colour(theme, 0.35 + 0.65 * (each.layer / last)), stroke: i === at ? inks.second : inks.paper, width: i === at ? 3 : 1, tip: `${each.name}: ${labelOf(x)} ${precise(across[i], 3)}, ${labelOf(y)} ${precise(up[i], 3)}` });
  });
  const named = [...new Set([at, ...[up, across].flatMap((values) => values.map((_, i) => i).sort((a, b) => values[b] - values[a]).slice(0, 2))])];
  for (const i of named) {
    const late = rightward(across[i]) > (left + width) / 2;
    shapes.push({ kind: "text", x: rightward(across[i]) + (late ? -11 : 11), y: upward(up[i]) + 4, text: of.heads[i].name, anchor: late ? "end" : "start", fill: inks.ink, bold: i === at });
  }
  return { width, height, title: `Heads of ${of.model}: ${labelOf(y)} over ${labelOf(x)}, means over ${counted(of)}`, shapes };
}

interface ScatterProps {
  scene: Scene;
  across: number[];
  up: number[];
  at: number;
  pick: (at: number) => void;
  names: string[];
  labels: [string, string];
}

/** The scatter in the page: heads are buttons; arrow keys go through them by the statistic of their direction. */
export function Scatter({ scene, across, up, at, pick, names, labels }: ScatterProps) {
  const [hovered, hover] = useState<number | null>(null);
  const place = useRef<SVGSVGElement>(null);
  const shown = hovered ?? at;
  const move = (event: TargetedKeyboardEvent<SVGGElement>, from: number) => {
    if (event.key === "Enter" || event.key === " ") pick(from);
    else {
      const [values, way] = ({ ArrowRight: [across, 1], ArrowLeft: [across, -1], ArrowUp: [up, 1], ArrowDown: [up, -1] } as Partial<Record<string, [number[], number]>>)[event.key] ?? [null, 0];
      if (!values || event.ctrlKey || event.metaKey || event.altKey) return;
      const order = names.map((_, i) => i).sort((a, b) => values[a] - values[b]);
      const next = order.at(order.indexOf(from) + way) ?? order[0];
      place.current?.querySelector<SVGGElement>(`[data-head="${next}"]`)?.focus();
    }
    event.preventDefault();
  };
  let circles = -1;
  return (
    <div class="scatter">
      <svg ref={place} class="drawing fit" viewBox={`0 0 ${scene.width} ${scene.height}`} width={scene.width} height={scene.height} role="group" aria-label={`${scene.title}. Arrow keys go from head to head, Enter opens one.`} onPointerLeave={() => hover(null)}>
        {scene.shapes.map((shape, i) => {
          const [Name, given] = attributes(shape);
          const Element = Name as "text";
          if (shape.kind !== "circle") return <Element key={i} {...given}>{shape.kind === "text" ? shape.text : null}</Element>;
          const own = (circles += 1);
          return (
            <g key={i} role="button" data-head={own} tabIndex={own === at ? 0 : -1} aria-pressed={own === at} aria-label={shape.tip ?? names[own]} onClick={() => pick(own)} onKeyDown={(event) => move(event, own)} onFocus={() => hover(own)} onBlur={() => hover(null)} onPointerEnter={() => hover(own)}>
              <Element {...given} />
            </g>
          );
        })}
      </svg>
      <p class="readout" aria-hidden="true"><b>{names[shown]}</b><span>{labels[0]} {precise(across[shown], 3)}</span><span>{labels[1]} {precise(up[shown], 3)}</span></p>
    </div>
  );
}

/** Texts in equal bins of a statistic, from its least to its largest value. */
export function spreadScene({ mean, quantiles, counts }: Distribution, title: string, theme: Theme): Scene {
  const [width, height, left, right, top, bottom] = [380, 150, 34, 10, 28, 24];
  const inks = INKS[theme];
  const most = Math.max(1, ...counts);
  const wide = (width - left - right) / counts.length;
  const high = (count: number) => ((height - top - bottom) * count) / most;
  const [least, , , , largest] = quantiles;
  const value = scaleLinear([least, largest > least ? largest : least + 1], [left, width - right]);
  const shapes: Shape[] = [{ kind: "text", x: 4, y: 16, text: title, size: 12, bold: true, fill: inks.ink }];
  counts.forEach((count, i) => shapes.push({ kind: "rect", x: left + i * wide, y: height - bottom - high(count), w: wide - 1, h: high(count), fill: inks.accent, tip: String(count) }));
  shapes.push({ kind: "path", d: `M${left},${height - bottom}H${width - right}`, stroke: inks.faint });
  shapes.push({ kind: "path", d: `M${value(mean)},${top}V${height - bottom}`, stroke: inks.second, width: 1.5, dash: [4, 3], tip: `mean ${precise(mean, 3)}` });
  shapes.push({ kind: "text", x: left - 5, y: top + 8, text: String(most), anchor: "end", fill: inks.soft }, { kind: "text", x: left - 5, y: height - bottom, text: "0", anchor: "end", fill: inks.soft });
  shapes.push({ kind: "text", x: left, y: height - 8, text: precise(least, 3), fill: inks.soft }, { kind: "text", x: width - right, y: height - 8, text: precise(largest, 3), anchor: "end", fill: inks.soft });
  shapes.push({ kind: "text", x: (left + width - right) / 2, y: height - 8, text: "dashed: the mean", anchor: "middle", fill: inks.soft });
  return { width, height, title, shapes };
}
