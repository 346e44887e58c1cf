/** The heads of all layers as small maps, and the same as one picture. */

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import type { ComponentChildren, TargetedPointerEvent } from "preact";
import { INKS, SCALES, UNCHOSEN, step } from "../drawing/colour";
import type { Theme } from "../drawing/colour";
import { usePage } from "../page/context";
import { endsOf, legendShapes, ranged } from "../drawing/drawings";
import type { Range } from "../drawing/drawings";
import { clip } from "../numbers/format";
import { pooled } from "../numbers/matrix";
import type { Matrix, Spread } from "../numbers/matrix";
import { NOWHERE, usePointing } from "../drawing/pointed";
import type { Scene } from "../drawing/scene";

interface MultiplesProps {
  class: string;
  children: ComponentChildren;
}

/** The list of small maps. Each marks the tokens that are pointed at, by the style of the list: nothing is drawn again. */
export function Multiples({ class: kind, children }: MultiplesProps) {
  const list = useRef<HTMLUListElement>(null);
  const pointing = usePointing();
  useLayoutEffect(() => {
    const mark = () => {
      const { query, key } = pointing.now;
      const element = list.current;
      if (!element) return;
      element.dataset.pointed = query === null ? (key === null ? "" : "key") : key === null ? "query" : "pair";
      element.style.setProperty("--query", String(query ?? 0));
      element.style.setProperty("--key", String(key ?? 0));
    };
    mark();
    return pointing.heard(mark);
  }, [pointing]);
  return <ul ref={list} onPointerLeave={() => pointing.set(NOWHERE)} class={kind}>{children}</ul>;
}

interface Shades {
  range: Range;
  /** What the scale of colours is made of: the spread of this head, and of all. */
  spread: Spread;
  shared: Spread;
}

interface MapProps extends Shades {
  of: Matrix;
  queries: number;
  keys: number;
  point: (cell: { query: number; key: number }) => void;
}

/** A small map of a head, whose cells can be pointed at where none of them are pooled. */
export function SmallMap({ of, queries, keys, point, ...shades }: MapProps) {
  const move = ({ currentTarget, offsetX, offsetY, pointerType }: TargetedPointerEvent<HTMLDivElement>) => {
    if (pointerType !== "mouse" || of.rows !== queries || of.columns !== keys) return;
    const at = (offset: number, size: number, many: number) => Math.min(many - 1, Math.max(0, Math.floor((offset / size) * many)));
    point({ query: at(offsetY, currentTarget.clientHeight, queries), key: at(offsetX, currentTarget.clientWidth, keys) });
  };
  return <div class="map" style={{ "--queries": String(queries), "--keys": String(keys) }} onPointerMove={move}><Thumbnail of={of} {...shades} /></div>;
}

const placesOf = (of: Matrix, { range, spread, shared }: Shades) => ranged(of, range, range === "shared" ? shared : spread, of.signed ?? false);

const scaleOf = ({ signed }: Matrix) => SCALES[signed ? "differences" : "weights"];

export function Thumbnail({ of, ...shades }: Shades & { of: Matrix }) {
  const { theme } = usePage();
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!canvas.current || !pen) return;
    canvas.current.width = of.columns;
    canvas.current.height = of.rows;
    const image = new ImageData(of.columns, of.rows);
    const words = new Uint32Array(image.data.buffer);
    const place = placesOf(of, shades);
    const { words: colours } = scaleOf(of)[theme];
    for (let i = 0, at = 0; i < of.rows; i += 1) for (let j = 0; j < of.columns; j += 1, at += 1) words[at] = of.chosen?.[at] === 0 ? UNCHOSEN[theme] : colours[step(place(of.data[at], i))];
    pen.putImageData(image, 0, 0);
  }, [of, shades.range, shades.spread, shades.shared.low, shades.shared.high, theme]);
  return <canvas ref={canvas} aria-hidden="true" />;
}

const SIDE = 96; // of a map in the picture
const GRAIN = 32; // its most cells a side

/** The maps of heads in rows of `across`, as one drawing. */
export function gridScene(heads: { of: Matrix; name: string; spread: Spread }[], across: number, range: Range, sharedBy: (of: Matrix) => Spread, theme: Theme, title: string): Scene {
  const inks = INKS[theme];
  const width = Math.max(across * (SIDE + 10) + 14, 430);
  const scene: Scene = { width, height: 82 + Math.ceil(heads.length / across) * (SIDE + 26), title, shapes: [{ kind: "text", x: 12, y: 20, text: clip(title, 90), size: 13, bold: true, fill: inks.ink }] };
  heads.forEach(({ of: all, name, spread }, i) => {
    if (!all.rows) return;
    let of = all;
    while (Math.max(of.rows, of.columns) > GRAIN) of = pooled(of);
    const place = placesOf(of, { range, spread, shared: sharedBy(of) });
    const [x, y] = [12 + (i % across) * (SIDE + 10), 34 + Math.floor(i / across) * (SIDE + 26)];
    const size = SIDE / Math.max(of.rows, of.columns);
    of.data.forEach((value, at) => {
      const row = Math.floor(at / of.columns);
      scene.shapes.push({ kind: "rect", x: x + (at % of.columns) * size, y: y + row * size, w: size, h: size, fill: of.chosen?.[at] === 0 ? inks.faint : scaleOf(of)[theme].css[step(place(value, row))] });
    });
    scene.shapes.push({ kind: "text", x, y: y + SIDE + 13, text: clip(name, 14), fill: inks.soft });
  });
  const kinds = [false, true].flatMap((signed) => heads.find(({ of }) => Boolean(of.signed) === signed) ?? []);
  kinds.forEach(({ of }, i) => scene.shapes.push(...legendShapes(12, scene.height - 14 - 16 * (kinds.length - 1 - i), endsOf(range === "shared" ? sharedBy(of) : undefined, range, of.signed ?? false), i === 0 ? "rows queries, columns keys" : "weights of either sign", theme, of.signed)));
  return scene;
}
