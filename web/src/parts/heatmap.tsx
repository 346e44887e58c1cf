/** The heat map of a head: pan and zoom, a cursor for pointer and keys, and the numbers as a table. */

import { select } from "d3-selection";
import { zoom as zooming, zoomIdentity } from "d3-zoom";
import type { ZoomBehavior } from "d3-zoom";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { Tiles, whole } from "../numbers/cells";
import type { Cells } from "../numbers/cells";
import { SCALES as COLOURS, step } from "../drawing/colour";
import { useHeight, usePage, useWidth } from "../page/context";
import { QUERIES_AND_KEYS, endsOf, rampStart, usualRange } from "../drawing/drawings";
import type { Range } from "../drawing/drawings";
import { precise } from "../numbers/format";
import type { Matrix, Spread } from "../numbers/matrix";
import { Painter } from "../drawing/painter";
import type { Cell, Zoom } from "../drawing/painter";
import { NOWHERE, usePointed, usePointing } from "../drawing/pointed";
import type { Pointed } from "../drawing/pointed";
import { ringed } from "../page/tour";
import { Button, Table } from "./ui";

interface HeatMapProps {
  of: Matrix | Cells;
  queries: string[];
  keys: string[];
  title: string;
  range?: Range;
  /** The spread of all heads that share the range `shared`. */
  shared?: Spread;
  signed?: boolean;
  large?: boolean;
  /** The names of the rows and of the columns. */
  axes?: [string, string];
  /** The cell of the cursor while nothing is pointed at. */
  at?: Cell | null;
  /** Its queries and keys are not the tokens of the other drawings of the view. */
  alone?: boolean;
  /** The cursor moved by keys. */
  move?: (cell: Cell) => void;
  /** A cell was clicked, or Enter pressed on it. */
  pick?: (cell: Cell) => void;
  zoom?: Zoom | null;
  zoomed?: (zoom: Zoom) => void;
}

const STEPS: Partial<Record<string, [number, number]>> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const SCALES: Partial<Record<string, number>> = { "+": 1.5, "=": 1.5, "-": 1 / 1.5, "0": 0 };
const MOST_CELLS = 10_000; // of the table

const cellOf = ({ query, key }: Pointed): Cell | null => (query === null || key === null ? null : { query, key });

export function HeatMap(props: HeatMapProps) {
  const { of, queries, keys, title, shared, signed = of.signed ?? false, large = false, axes = QUERIES_AND_KEYS, at = null, alone = axes !== QUERIES_AND_KEYS } = props;
  const { range = axes === QUERIES_AND_KEYS ? usualRange(Math.max(of.rows, of.columns)) : "own" } = props;
  const { theme, params } = usePage();
  const rings = useMemo(() => (signed || axes !== QUERIES_AND_KEYS ? [] : ringed(params, title, queries, keys)), [params.tour, title, queries, keys, signed, axes]);
  const cells: Cells = useMemo(() => ("levels" in of ? of : whole(of, signed)), [of, signed]);
  const spread = useMemo(() => (range === "shared" && shared ? shared : { low: axes === QUERIES_AND_KEYS ? cells.spread.low : 0, high: cells.spread.high }), [cells, range, shared?.low, shared?.high, axes]);
  const [place, width] = useWidth();
  const screen = useHeight();
  const canvas = useRef<HTMLCanvasElement>(null);
  const painter = useRef<Painter>(undefined);
  const behaviour = useRef<ZoomBehavior<HTMLCanvasElement, unknown>>(undefined);
  const newest = useRef(props);
  newest.current = props;
  const pointing = usePointing(alone);
  const now = usePointed(pointing);
  const pointed: Pointed = now.query === null && now.key === null && at ? at : now;
  const frame = useRef(0);
  const [, count] = useState(0); // of strips that came

  const repaint = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => {
      painter.current?.paint();
      tell();
    });
  };
  /** Say at the stage whether cells of its view are still read; the painter asks for them, so no rendering knows. */
  const tell = () => of instanceof Tiles && place.current?.setAttribute("aria-busy", String(of.waits));

  useEffect(() => {
    if (canvas.current) painter.current = new Painter(canvas.current);
    return () => cancelAnimationFrame(frame.current);
  }, []);

  useEffect(() => {
    if (!width || !painter.current) return;
    painter.current.show({ of: cells, queries, keys, theme, range, spread, signed, strips: large && !signed, large, axes, ringed: rings }, width, screen);
    behave();
  }, [cells, queries, keys, theme, range, spread, signed, large, axes.join(), rings, width, screen]);

  useEffect(() => {
    if (!(of instanceof Tiles)) return;
    of.changed = () => {
      repaint();
      count((many) => many + 1);
    };
    of.settled = tell;
    return () => {
      of.changed = () => undefined;
      of.settled = () => undefined;
    };
  }, [of]);

  useEffect(() => void tell());

  useEffect(() => {
    if (!painter.current) return;
    painter.current.pointed = pointed;
    repaint();
  }, [pointed.query, pointed.key]);

  useLayoutEffect(() => {
    // A step back in the address; at once: a later effect would undo a key pressed meanwhile.
    if (at && (at.query !== pointing.now.query || at.key !== pointing.now.key)) pointing.set(NOWHERE);
  }, [at?.query, at?.key]);

  /** Zoom with wheel (with Ctrl, or while focused), pinch, or the buttons; drag to pan. */
  function behave() {
    const element = canvas.current;
    const paint = painter.current;
    if (!large || !element || !paint) return;
    const { left, top, width: wide, height } = paint.frame;
    const cells = [of.columns * paint.frame.cell, of.rows * paint.frame.cell];
    behaviour.current = zooming<HTMLCanvasElement, unknown>()
      .scaleExtent([1, Math.max(4, 48 / paint.frame.cell)])
      .extent([[left, top], [left + wide, top + height]])
      .translateExtent([[left, top], [left + cells[0], top + cells[1]]])
      .filter((event: MouseEvent | TouchEvent) => {
        if (event.type === "wheel") return (event as WheelEvent).ctrlKey || document.activeElement === element;
        return "touches" in event ? event.touches.length > 1 || paint.zoom.k > 1 : !event.button && event.type !== "dblclick";
      })
      .on("zoom", ({ transform }: { transform: Zoom }) => {
        paint.zoom = { k: transform.k, x: transform.x + left * (transform.k - 1), y: transform.y + top * (transform.k - 1) };
        repaint();
      })
      .on("end", ({ sourceEvent }: { sourceEvent: unknown }) => sourceEvent && newest.current.zoomed?.(paint.zoom));
    const start = props.zoom ?? paint.zoom;
    // d3-zoom measures from the canvas, a zoom of the painter from the frame of the cells.
    const first = zoomIdentity.translate(start.x - left * (start.k - 1), start.y - top * (start.k - 1)).scale(start.k);
    const selected = select(element);
    behaviour.current(selected);
    behaviour.current.transform(selected, first);
    element.style.touchAction = "pan-x pan-y";
  }

  const scaleBy = (by: number) => {
    const { current: element } = canvas;
    if (!element || !behaviour.current) return;
    if (by === 0) behaviour.current.transform(select(element), zoomIdentity);
    else behaviour.current.scaleBy(select(element), by);
    if (painter.current) newest.current.zoomed?.(painter.current.zoom);
  };

  const point = (event: TargetedPointerEvent<HTMLCanvasElement>) => {
    if (!event.buttons || event.type === "pointerdown") pointing.set(painter.current?.at(event.offsetX, event.offsetY) ?? NOWHERE);
  };
  const move = (cell: Cell) => {
    pointing.set(cell);
    newest.current.move?.(cell);
  };
  /** The cell at once, before the next rendering. */
  const held = () => cellOf(pointing.now) ?? at;
  const press = (event: TargetedKeyboardEvent<HTMLCanvasElement>) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (large && event.key in SCALES) scaleBy(SCALES[event.key] ?? 0);
    else if (event.key === "Enter" && cursor) newest.current.pick?.(cursor);
    else {
      const way = STEPS[event.key];
      if (!way) return;
      const far = event.shiftKey ? 10 : 1;
      const from = held() ?? { query: 0, key: 0 };
      const kept = (value: number, many: number) => Math.min(many - 1, Math.max(0, value));
      move({ query: kept(from.query + far * way[0], of.rows), key: kept(from.key + far * way[1], of.columns) });
    }
    event.preventDefault();
  };
  const cursor = cellOf(pointed);
  const shown = cursor && cursor.query < of.rows && cursor.key < of.columns ? cursor : null;
  const number = shown ? cells.value(shown.query, shown.key) : undefined;
  const label = `Heat map of ${title}: ${of.rows} ${axes[0]} by ${of.columns} ${axes[1]}. Arrow keys move from cell to cell${large ? "; plus, minus and 0 zoom" : ""}. The table below has the numbers.`;
  return (
    <div class="heatmap">
      {large && (
        <div class="zoom" role="group" aria-label="Zoom">
          <Button class="quiet" aria-label="Zoom in" onClick={() => scaleBy(1.5)}>+</Button>
          <Button class="quiet" aria-label="Zoom out" onClick={() => scaleBy(1 / 1.5)}>−</Button>
          <Button class="quiet" onClick={() => scaleBy(0)}>Whole</Button>
        </div>
      )}
      <Legend spread={spread} most={cells.most} range={range} signed={signed} axes={axes} chooses={cells.chosen !== undefined} />
      <div ref={place} class="stage">
        <canvas ref={canvas} tabIndex={0} role="img" aria-label={label} onPointerMove={point} onPointerDown={point}
          onPointerLeave={() => pointing.set(NOWHERE)} onKeyDown={press}
          onFocus={(event) => event.currentTarget.matches(":focus-visible") && !held() && move({ query: 0, key: 0 })}
          onClick={(event) => { const cell = painter.current?.at(event.offsetX, event.offsetY); if (cell) newest.current.pick?.(cell); }} />
      </div>
      <output class="readout" aria-live={document.activeElement === canvas.current ? "polite" : "off"}>
        {shown ? <><span>{queries[shown.query]} → {keys[shown.key]}</span><b>{cells.chosen?.(shown.query, shown.key) === false ? "not chosen" : worded(number, 6)}</b></> : "\u00a0"}
      </output>
      <CellTable of={cells} queries={queries} keys={keys} title={title} axes={axes} />
    </div>
  );
}

/** A number that may not be here yet. */
const worded = (value: number | undefined, digits?: number) => (value === undefined ? "…" : precise(value, digits));

/** The numbers of the first queries as a table, made when it is opened. */
export function CellTable({ of, queries, keys, title, axes }: { of: Cells; queries: string[]; keys: string[]; title: string; axes: [string, string] }) {
  const [open, setOpen] = useState(false);
  const rows = Math.min(of.rows, Math.max(1, Math.floor(MOST_CELLS / of.columns)));
  const columns = Array.from({ length: Math.min(of.columns, MOST_CELLS) }, (_, key) => ({
    head: keys[key],
    number: true,
    cell: (i: number) => worded(of.value(i, key)),
  }));
  const caption = `${title}: rows are ${axes[0]}, columns are ${axes[1]}${rows < of.rows ? `, the first ${rows} ${axes[0]}` : ""}`;
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>As a table</summary>
      {open && <Table caption={caption} columns={[{ head: axes[0], header: true, cell: (i: number) => queries[i] }, ...columns]} rows={Array.from({ length: rows }, (_, i) => i)} />}
    </details>
  );
}

interface LegendProps {
  /** The spread of the numbers and the largest magnitude; unknown for several maps with their own ranges. */
  spread?: Spread | undefined;
  most?: number;
  range: Range;
  signed?: boolean;
  axes?: [string, string];
  /** Its layer chooses keys. */
  chooses?: boolean;
}

/** What the colours mean, and what rows and columns are. */
export function Legend({ spread, most, range, signed = false, axes, chooses = false }: LegendProps) {
  const { theme } = usePage();
  const [low, high] = endsOf(spread, range, signed, most);
  const first = rampStart(low, signed);
  const stops = [0, 0.25, 0.5, 0.75, 1].map((at) => first + (1 - first) * at).map((at) => COLOURS[signed ? "differences" : "weights"][theme].css[step(at)]).join(", ");
  return (
    <span class="scale">
      {axes && <span>rows {axes[0]}, columns {axes[1]}</span>}
      <span class="ends">{low} <span class="ramp" aria-hidden="true" style={{ background: `linear-gradient(to right, ${stops})` }} /> {high}</span>
      {!signed && <span><span class="swatch hatched" aria-hidden="true" /> exactly 0</span>}
      {chooses && <span><span class="swatch unchosen" aria-hidden="true" /> not chosen: its query may not look at it</span>}
    </span>
  );
}
