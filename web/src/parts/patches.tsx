/** An image under numbers of its patches: what a token of a head looks at, or what a prediction depends on. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { usePage, useWidth } from "../page/context";
import { overlaid } from "../drawing/drawings";
import { precise } from "../numbers/format";
import { marginals, row } from "../numbers/matrix";
import type { Matrix } from "../numbers/matrix";
import { pictures } from "../subjects/media";
import { integer } from "../page/state";
import type { Layer, Place } from "../subjects/subject";
import { Choice } from "./ui";

const SINK = 8; // times an even share of all queries, as in the server's pictures
const MOST_SIDE = 520;
/** Colours that are seen on dark and on light parts of a grey image: of numbers above and below 0, and of marks. */
const [HOT, COLD, MARK] = ["rgb(235,90,20)", "rgb(40,60,235)", "rgb(20,140,240)"];
const DARKEST = 0.75; // opacity of the largest number

/** The patches that take at least 8 times an even share from all queries in the mean. */
export function sinksOf(of: Matrix, places: Place[]): number[] {
  const { keys } = marginals(of);
  return places.flatMap((place, i) => (place && keys[i] * of.columns >= SINK ? [i] : []));
}

interface OverImageProps {
  /** The name of the image. */
  picture: string;
  /** The pixels that each token shows. */
  places: Place[];
  /** A number for each token. */
  values: ArrayLike<number>;
  /** The numbers may lie on both sides of 0. */
  signed?: boolean;
  /** What the picture says of a patch, or of all if none is under the pointer. */
  describe: (patch: number | null) => string;
  label: string;
  sinks?: number[];
  pick?: (patch: number) => void;
}

/** An image in grey, and over its patches their numbers: orange above 0, blue below, the darker the larger. */
export function OverImage({ picture, places, values, signed = false, describe, label, sinks = [], pick }: OverImageProps) {
  const [frame, width] = useWidth();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [pointed, point] = useState<number | null>(null);
  const bitmap = pictures.get(picture)?.bitmap;
  const { place, ends } = useMemo(() => overlaid(places.flatMap((each, i) => (each ? [values[i]] : [])), signed), [places, values, signed]);
  const large = bitmap ? Math.min(4, Math.min(width || MOST_SIDE, MOST_SIDE) / Math.max(bitmap.width, bitmap.height)) : 1; // of a pixel
  useEffect(() => {
    const pen = canvas.current?.getContext("2d");
    if (!canvas.current || !pen || !bitmap) return;
    canvas.current.width = Math.round(bitmap.width * large);
    canvas.current.height = Math.round(bitmap.height * large);
    pen.filter = "grayscale(1)";
    pen.drawImage(bitmap, 0, 0, canvas.current.width, canvas.current.height);
    pen.filter = "none";
    places.forEach((each, i) => {
      if (!each) return;
      const [left, top, right, bottom] = each.map((side) => side * large);
      pen.globalAlpha = DARKEST * Math.min(1, Math.max(0, Math.abs(place(values[i]))));
      pen.fillStyle = values[i] < 0 ? COLD : HOT;
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
  const readout = describe(pointed);
  return (
    <>
      <div ref={frame}>
        <canvas ref={canvas} role="img" aria-label={`${label}: ${readout}`}
          onPointerMove={(event) => point(at(event.offsetX / large, event.offsetY / large))} onPointerLeave={() => point(null)}
          onClick={(event) => { const found = at(event.offsetX / large, event.offsetY / large); if (found !== null) pick?.(found); }} />
      </div>
      <p class="scale"><span class="ends">{ends[0]} <span class="ramp" aria-hidden="true" style={{ background: `linear-gradient(to right, ${signed ? `${COLD}, transparent` : "transparent"}, ${HOT})` }} /> {ends[1]}</span></p>
      <p class="readout">{readout}</p>
    </>
  );
}

/** The token whose looking is shown first: the last of a text, which has read all, or the first of an image, often CLS. */
export const firstLooking = ({ places, queries }: Layer) => (places?.at(-1) ? 0 : queries.length - 1);

/** The patches of `picture` that a layer's keys show, and how much one token looks at each. A patch that looks too is chosen by a click. */
export function Patches({ of, layer, picture, title }: { of: Matrix; layer: Layer; picture: string; title: string }) {
  const { params, go } = usePage();
  const { places = [], queries, keys } = layer;
  const query = integer(params.query, firstLooking(layer), 0, queries.length - 1);
  const weights = row(of, query);
  const sinks = useMemo(() => sinksOf(of, places), [of, places]);
  if (!pictures.has(picture)) return null;
  const share = places.reduce((sum, each, i) => sum + (each ? weights[i] : 0), 0);
  const all = `${precise(share, 3)} of the weights of ${queries[query]} lie on the image${sinks.length ? `; × marks ${sinks.length} ${sinks.length > 1 ? "sinks" : "sink"}, which all tokens look at` : ""}`;
  return (
    <figure class="patches">
      <Choice label="Looking" value={String(query)} set={(each) => go({ query: each })} options={queries.map((each, i): [string, string] => [String(i), `${i} ${each}`])} />
      <OverImage picture={picture} places={places} values={weights} signed={of.signed ?? false} sinks={sinks} label={`${picture} with the weights of ${title}`}
        describe={(patch) => (patch === null ? all : `${queries[query]} looks at ${keys[patch]}: ${precise(weights[patch], 4)}`)} pick={(patch) => { if (queries[patch] === keys[patch]) go({ query: patch }); }} />
    </figure>
  );
}
