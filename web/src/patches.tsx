/** An image under the patches of a head: how much a token looks at each, where it shows it, and which are sinks. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { usePage, useWidth } from "./context";
import { precise } from "./format";
import { largest, marginals, row } from "./matrix";
import type { Matrix } from "./matrix";
import { pictures } from "./model_subject";
import type { Layer, Place } from "./subject";
import { Choice } from "./ui";

const SINK = 8; // times an even share of all queries, as in the server's pictures
const MOST_SIDE = 520;
/** Colours that are seen on dark and on light parts of a grey image. */
const [HOT, MARK] = ["rgb(235,90,20)", "rgb(20,140,240)"];

/** The patches that take at least 8 times an even share from all queries in the mean. */
export function sinksOf(of: Matrix, places: Place[]): number[] {
  const { keys } = marginals(of);
  return places.flatMap((place, i) => (place && keys[i] * of.columns >= SINK ? [i] : []));
}

/** The patches of `picture` that a layer's tokens show, and how much one token looks at each. */
export function Patches({ of, layer, picture, title }: { of: Matrix; layer: Layer; picture: string; title: string }) {
  const { params, go } = usePage();
  const [place, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [pointed, point] = useState<number | null>(null);
  const bitmap = pictures.get(picture)?.bitmap;
  const { places = [], queries, keys } = layer;
  // CLS looks at the whole image; the last token of a text has read all.
  const first = places.at(-1) === null ? queries.length - 1 : 0;
  const query = Math.min(queries.length - 1, Number(params.query ?? first));
  const weights = row(of, query);
  const sinks = useMemo(() => sinksOf(of, places), [of, places]);
  const large = bitmap ? Math.min(4, Math.min(width || MOST_SIDE, MOST_SIDE) / Math.max(bitmap.width, bitmap.height)) : 1; // of a pixel
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!canvas.current || !pen || !bitmap) return;
    canvas.current.width = Math.round(bitmap.width * large);
    canvas.current.height = Math.round(bitmap.height * large);
    pen.filter = "grayscale(1)";
    pen.drawImage(bitmap, 0, 0, canvas.current.width, canvas.current.height);
    pen.filter = "none";
    const most = largest(places.map((each, i) => (each ? weights[i] : 0))) || 1;
    places.forEach((each, i) => {
      if (!each) return;
      const [left, top, right, bottom] = each.map((side) => side * large);
      pen.globalAlpha = 0.75 * (weights[i] / most);
      pen.fillStyle = HOT;
      pen.fillRect(left, top, right - left, bottom - top);
      pen.globalAlpha = 1;
      pen.strokeStyle = i === pointed ? MARK : "rgba(128,128,128,.35)";
      pen.lineWidth = i === pointed ? 3 : 1;
      pen.strokeRect(left + 0.5, top + 0.5, right - left - 1, bottom - top - 1);
      if (sinks.includes(i)) {
        pen.strokeStyle = MARK;
        pen.lineWidth = 2;
        const [x, y] = [(left + right) / 2, (top + bottom) / 2];
        pen.beginPath();
        for (const [dx, dy] of [[-4, -4], [-4, 4]]) {
          pen.moveTo(x + dx, y + dy);
          pen.lineTo(x - dx, y - dy);
        }
        pen.stroke();
      }
    });
  });
  if (!bitmap) return null;
  const at = (x: number, y: number) => {
    const found = places.findIndex((each) => each && x >= each[0] && x < each[2] && y >= each[1] && y < each[3]);
    return found < 0 ? null : found;
  };
  const share = places.reduce((sum, each, i) => sum + (each ? weights[i] : 0), 0);
  const told = pointed === null ? `${precise(share, 3)} of the weights of ${queries[query]} lie on the image${sinks.length ? `; × marks ${sinks.length} ${sinks.length > 1 ? "sinks" : "sink"}, which all tokens look at` : ""}` : `${queries[query]} looks at ${keys[pointed]}: ${precise(weights[pointed], 4)}`;
  return (
    <figure class="patches">
      <Choice label="Looking" value={String(query)} set={(each) => go({ query: each })} options={queries.map((each, i): [string, string] => [String(i), `${i} ${each}`])} />
      <div ref={place}>
        <canvas ref={canvas} role="img" aria-label={`${picture} with the weights of ${title}: ${told}`}
          onPointerMove={(event) => point(at(event.offsetX / large, event.offsetY / large))} onPointerLeave={() => point(null)}
          onClick={(event) => { const found = at(event.offsetX / large, event.offsetY / large); if (found !== null && found < queries.length) go({ query: found }); }} />
      </div>
      <p class="readout">{told}</p>
    </figure>
  );
}
