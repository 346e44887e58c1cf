/** q · k of one query, dimension by dimension: its vector, those of the keys, their products, the scores and the weights. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { whole } from "../../numbers/cells";
import { INKS } from "../../drawing/colour";
import { usePage, useWidth } from "../../page/context";
import { precise } from "../../numbers/format";
import { CellTable } from "../../parts/heatmap";
import { matrix } from "../../numbers/matrix";
import { NOWHERE, usePointed, usePointing } from "../../drawing/pointed";
import { layoutOf, placeAt, productScene, scaleName } from "../../drawing/products";
import type { Products } from "../../drawing/products";
import { paintScene } from "../../drawing/scene";
import { Export } from "../../parts/ui";

const LEAST_WIDTH = 620; // below it the drawing scrolls

interface DimensionsProps {
  of: Products;
  /** The query's place, and its name. */
  query: number;
  name: string;
  /** The places of the keys, and their names. */
  places: number[];
  keys: string[];
  /** What the vectors are, and how the weights come from the scores. */
  about: [string, string];
  title: string;
}

export function Dimensions({ of, query, name, places, keys, about, title }: DimensionsProps) {
  const { theme } = usePage();
  const [frame, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const pointing = usePointing();
  const pointed = usePointed(pointing);
  const [dimension, setDimension] = useState<number | null>(null);
  const layout = layoutOf(of, Math.max(LEAST_WIDTH, width));
  const scene = useMemo(() => productScene(of, layout, { theme, title, query: name, keys }), [of, layout.width, theme, title]);
  const at = pointed.key === null ? -1 : places.indexOf(pointed.key); // −1: none, or the query's own row
  const ratio = globalThis.devicePixelRatio || 1;
  const drawn = useMemo(() => {
    const sheet = document.createElement("canvas");
    paintScene(sheet, scene, INKS[theme].paper, ratio);
    return sheet;
  }, [scene, ratio]);
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!canvas.current || !pen) return;
    canvas.current.width = drawn.width;
    canvas.current.height = drawn.height;
    pen.drawImage(drawn, 0, 0);
    pen.scale(ratio, ratio);
    const { blocks, cell, top, first, high } = layout;
    pen.strokeStyle = INKS[theme].second;
    pen.lineWidth = 1.5;
    if (at >= 0) pen.strokeRect(1, top + at * high, layout.width - 2, high);
    if (dimension !== null) for (const left of blocks) pen.strokeRect(left + dimension * cell - 0.5, left === blocks[0] ? first : top, Math.max(cell, 3), layout.height - 5 - (left === blocks[0] ? first : top));
  }, [drawn, at, dimension]);
  const point = (event: TargetedPointerEvent<HTMLCanvasElement>) => {
    const place = placeAt(layout, of, event.offsetX, event.offsetY);
    setDimension(place?.dimension ?? null);
    pointing.set(place && place.key >= 0 ? { query, key: places[place.key] } : NOWHERE);
  };
  const press = (event: TargetedKeyboardEvent<HTMLCanvasElement>) => {
    const way = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const far = event.shiftKey ? 10 : 1;
    const started = dimension !== null && at >= 0;
    setDimension(Math.min(of.q.length - 1, Math.max(0, (dimension ?? 0) + (started ? far * way[1] : 0))));
    pointing.set({ query, key: places[Math.min(keys.length - 1, Math.max(0, at + (started ? far * way[0] : at < 0 ? 1 : 0)))] });
  };
  const table = useMemo(() => whole(matrix(keys.length, of.q.length, Float32Array.from(of.parts.flatMap((each) => Array.from(each))))), [of]);
  const numbers = useMemo(() => Array.from(of.q, (_, i) => String(i)), [of]);
  const factor = scaleName(of) && ` × ${scaleName(of)}`;
  const value = (number: number) => precise(number, 3);
  const readout = dimension === null
    ? at < 0 ? "Point at a cell." : `${name} · ${keys[at]}: the products add up to the score ${value(of.scores[at])}, the weight ${value(of.weights[at])}`
    : at < 0 ? `dimension ${dimension}: q of ${name} is ${value(of.q[dimension])}`
    : `${keys[at]}, dimension ${dimension}: ${value(of.q[dimension])} × ${value(of.k[at][dimension])}${factor} = ${value(of.parts[at][dimension])}, of the score ${value(of.scores[at])}`;
  return (
    <section aria-label="q · k by dimension">
      <h3>q · k, dimension by dimension</h3>
      <p class="small">{about[0]} Each product q × k{factor} is a part of the score, and a key's parts add up to it. {about[1]} Orange is above 0, blue below.</p>
      <div ref={frame} class="scroll dimensions">
        <canvas ref={canvas} tabIndex={0} role="img" aria-label={`${title}: ${keys.length} keys by ${of.q.length} dimensions. Arrow keys move from cell to cell. The table below has the numbers.`} style={{ width: `${layout.width}px`, height: `${layout.height}px` }}
          onPointerMove={point} onPointerDown={point} onPointerLeave={() => { setDimension(null); pointing.set(NOWHERE); }} onKeyDown={press} />
      </div>
      <output class="readout" aria-live={document.activeElement === canvas.current ? "polite" : "off"}>{readout}</output>
      <CellTable of={table} queries={keys} keys={numbers} title={`Parts of the scores of ${name}`} axes={["keys", "dimensions"]} />
      <Export of={{ name: `dimensions-${query}`, label: "q · k by dimension", scene: () => productScene(of, layoutOf(of, 1000), { theme, title, query: name, keys }), rows: () => [["key", "score", "weight", ...numbers], ...keys.map((key, j) => [key, of.scores[j], of.weights[j], ...Array.from(of.parts[j])])], json: () => ({ query: name, keys, scale: of.scale, q: Array.from(of.q), k: of.k.map((each) => Array.from(each)), products: of.parts.map((each) => Array.from(each)), scores: Array.from(of.scores), weights: Array.from(of.weights) }) }} />
    </section>
  );
}
