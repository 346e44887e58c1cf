/** Small parts that all views use: fields, problems, tables, drawings, commands and exports. */

import type { ButtonHTMLAttributes, ComponentChildren, TargetedEvent, TargetedPointerEvent } from "preact";
import { createContext } from "preact";
import { useCallback, useContext, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { curl, python } from "../server/api";
import type { ApiRequest, ProblemDocument } from "../server/api";
import { GROUND } from "../drawing/colour";
import { usePage } from "../page/context";
import { useNarrow } from "./controls";
import { bytes, clip, count, csvCell, duration, real, savedCell, short, whole } from "../numbers/format";
import { attributes, toCanvas, toSvg } from "../drawing/scene";
import type { Scene } from "../drawing/scene";
import type { Ran } from "../server/types";

// ── fields and problems ─────────────────────────────────────────────────────────────────────────────────────────────

const Fault = createContext<string | undefined>(undefined);

/** Mark the fields inside that a problem names. */
export const Faulty = ({ problem, children }: { problem: ProblemDocument | null; children: ComponentChildren }) => (
  <Fault.Provider value={problem?.param}>{children}</Fault.Provider>
);

const near = (one: string, other: string) => one === other || one.startsWith(`${other}.`) || other.startsWith(`${one}.`);

/** A text that is being written: it follows the value, and is kept while other parts of the page change. */
function useDraft(value: string): [string, (text: string) => void] {
  const [draft, setDraft] = useState(value);
  useLayoutEffect(() => setDraft(value), [value]);
  return [draft, setDraft];
}

interface FieldProps {
  label: ComponentChildren;
  hint?: ComponentChildren;
  value: string | number;
  /** Called at each input where `live`, else when the user is done. */
  set: (value: string) => void;
  live?: boolean;
  /** The field of the request that this is, as problems name it. */
  param?: string;
  type?: "number" | "text" | "range";
  min?: number;
  max?: number;
  step?: number;
  wide?: boolean;
  placeholder?: string;
}

export function Field({ label, hint, value, set, live, param, type = "text", wide, ...rest }: FieldProps) {
  const fault = useContext(Fault);
  const [draft, setDraft] = useDraft(String(value));
  const write = (event: TargetedEvent<HTMLInputElement>) => (live ? set : setDraft)(event.currentTarget.value);
  const done = (event: TargetedEvent<HTMLInputElement>) => set(event.currentTarget.value);
  const given: object = { type, dir: "auto", value: draft, autocomplete: "off", ...rest, onInput: write, onChange: done };
  return (
    <label class={wide ? "wide" : undefined}>
      <span>{label} {hint !== undefined && <span class="hint">{hint}</span>}</span>
      <input {...given} spellcheck={false} aria-invalid={param !== undefined && fault !== undefined && near(param, fault) ? "true" : undefined} />
    </label>
  );
}

interface AreaProps {
  label: ComponentChildren;
  hint?: ComponentChildren;
  value: string;
  set: (value: string) => void;
  /** Called at each input where `live`, else when the user is done. */
  live?: boolean;
  /** Lines are broken where they end, as in prose. */
  wrap?: boolean;
  param?: string;
  rows?: number;
  placeholder?: string;
}

export function Area({ label, hint, value, set, live, wrap, param, rows = 4, placeholder }: AreaProps) {
  const fault = useContext(Fault);
  const [draft, setDraft] = useDraft(value);
  return (
    <label>
      <span>{label} {hint !== undefined && <span class="hint">{hint}</span>}</span>
      <textarea dir="auto" class={wrap ? "prose" : undefined} rows={rows} value={draft} onInput={(event) => (live ? set : setDraft)(event.currentTarget.value)} spellcheck={false} placeholder={placeholder} onChange={(event) => set(event.currentTarget.value)}
        aria-invalid={param !== undefined && fault !== undefined && near(param, fault) ? "true" : undefined} />
    </label>
  );
}

interface ChoiceProps {
  label: ComponentChildren;
  value: string;
  set: (value: string) => void;
  /** Values, their names, and the groups that some stand in. */
  options: readonly (readonly [string, string, string?])[];
  wide?: boolean;
}

export function Choice({ label, value, set, options, wide }: ChoiceProps) {
  const groups = [...new Set(options.map(([, , group]) => group))];
  const of = (group: string | undefined) => options.filter((each) => each[2] === group).map(([key, text]) => <option key={key} value={key} selected={key === value}>{text}</option>);
  return (
    <label class={wide ? "wide" : undefined}>
      <span>{label}</span>
      <select value={value} onChange={(event) => set(event.currentTarget.value)}>
        {groups.map((group) => (group === undefined ? of(group) : <optgroup key={group} label={group}>{of(group)}</optgroup>))}
      </select>
    </label>
  );
}

export const Check = ({ label, value, set }: { label: ComponentChildren; value: boolean; set: (value: boolean) => void }) => (
  <label class="check"><input type="checkbox" checked={value} onChange={(event) => set(event.currentTarget.checked)} /> {label}</label>
);

export const Button = ({ children, ...rest }: ButtonHTMLAttributes) => (
  <button type="button" {...rest}>{children}</button>
);

const UNAUTHORIZED = 401; // the browser asks for a key when the page is loaded

/** True if the same request may succeed later: the server refused it for now, failed, or did not answer. */
const mayPass = ({ status, code, retry_s }: ProblemDocument) => (status === undefined ? code !== undefined : retry_s !== undefined || status >= 500);

/** A problem, and what one can do about it. */
export function ProblemBox({ problem }: { problem: ProblemDocument | null }) {
  if (!problem) return null;
  if (problem.waits) return <p class="waits" role="status"><b>{problem.title}.</b> {problem.detail}</p>;
  const facts = [
    problem.param && `field ${problem.param}`,
    problem.code && `code ${problem.code}`,
    problem.status && `status ${problem.status}`,
    problem.request_id && `request ${problem.request_id}`,
  ];
  return (
    <div class="problem" role="alert">
      <strong>{problem.title ?? "The request failed"}</strong>
      <p>{problem.retrying ? `${(problem.detail ?? "").replace(/\.?$/, ".")} The page tries again by itself.` : (problem.detail ?? "")}</p>
      {problem.status === UNAUTHORIZED && <Button onClick={() => location.reload()}>Enter another key</Button>}
      {problem.again && !problem.retrying && mayPass(problem) && <Button onClick={problem.again}>Try again</Button>}
      <p class="small">{facts.filter(Boolean).join(" · ")}</p>
    </div>
  );
}

// ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────

export interface Column<T> {
  head: ComponentChildren;
  title?: string;
  number?: boolean;
  header?: boolean;
  cell: (of: T, at: number) => ComponentChildren;
}

const MOST_ROWS = 128;

/** A table; of more than 128 rows the first, and all once they are asked for. `many`: its columns, whose heads are broken. */
export function Table<T>({ caption, columns, rows, quiet, many }: { caption: string; columns: Column<T>[]; rows: T[]; quiet?: boolean; many?: boolean }) {
  const [all, showAll] = useState(false);
  const shown = all ? rows : rows.slice(0, MOST_ROWS);
  return (
    <div class="scroll" role="region" aria-label={caption} tabIndex={0}>
      <table class={many ? "many" : undefined}>
        <caption class={quiet ? "hidden" : undefined}>{caption}</caption>
        <thead>
          <tr>{columns.map((column, i) => <th key={i} scope="col" title={column.title} class={column.number ? "number" : undefined}>{column.head}</th>)}</tr>
        </thead>
        <tbody>
          {shown.map((each, at) => (
            <tr key={at}>
              {columns.map((column, i) => {
                const kind = column.number ? "number" : undefined;
                return column.header ? <th key={i} scope="row" class={kind}>{column.cell(each, at)}</th> : <td key={i} class={kind}>{column.cell(each, at)}</td>;
              })}
            </tr>
          ))}
        </tbody>
      </table>
      {shown.length < rows.length && <Button class="quiet" onClick={() => showAll(true)}>Show all {whole(rows.length)} rows</Button>}
    </div>
  );
}

export const FactList = ({ facts }: { facts: readonly (readonly [string, ComponentChildren, string?])[] }) => (
  <dl class="facts">
    {facts.map(([name, value, about]) => <div key={name} title={about}><dt>{name}</dt><dd>{typeof value === "string" && value.length > LONG_FACT ? <LongText text={value} /> : value}</dd></div>)}
  </dl>
);

const LONG_FACT = 200; // characters

/** The beginning of a text, and all of it once that is asked for. */
function LongText({ text: all }: { text: string }) {
  const [open, setOpen] = useState(false);
  return <>{open ? all : clip(all, LONG_FACT)} <Button class="quiet" aria-expanded={open} onClick={() => setOpen(!open)}>{open ? "Show less" : `Show all ${whole(all.length)} characters`}</Button></>;
}

/** What is being fetched, in the place where it will be. */
export const Waiting = ({ what }: { what: string }) => <p class="empty" role="status">{what}…</p>;

export const FACTS_OF_RAN: [string, (ran: Ran) => ComponentChildren][] = [
  ["kernel", (ran) => ran.kernel],
  ["computed in", (ran) => `${ran.dtype} on ${ran.device}`],
  ["version", (ran) => short(ran.version)],
  ["predicted", (ran) => duration(ran.predicted_ms)],
  ["90 % interval", (ran) => `${duration(ran.predicted_low_ms)} to ${duration(ran.predicted_high_ms)}`],
  ["took", (ran) => duration(ran.compute_ms)],
  ["on a processor", (ran) => duration(ran.cpu_ms)],
  ["waited", (ran) => duration(ran.queue_ms)],
  ["batched with", (ran) => (ran.batch > 1 ? `${ran.batch - 1} more` : "none")],
  ["FLOPs", (ran) => <span title={whole(ran.flops)}>{count(ran.flops)}</span>],
  ["peak memory", (ran) => bytes(ran.peak_bytes)],
];

/** The execution of requests, predicted and measured, one column each. */
export function RanTable({ rans }: { rans: Record<string, Ran> }) {
  const names = Object.keys(rans);
  const columns: Column<(typeof FACTS_OF_RAN)[number]>[] = [
    { head: <span class="hidden">fact</span>, header: true, cell: ([label]) => label },
    ...names.map((name) => ({ head: name, number: true, cell: ([, read]: (typeof FACTS_OF_RAN)[number]) => read(rans[name]) })),
  ];
  return <details><summary>Execution, predicted and measured</summary><Table caption="Execution" columns={columns} rows={FACTS_OF_RAN} quiet /></details>;
}

const MOST = { rows: 64, columns: 16 };

/** The first numbers of a matrix whose rows are tokens. */
export function NumberTable({ caption, labels, width, data }: { caption: string; labels: string[]; width: number; data: Float32Array }) {
  const rows = Math.min(MOST.rows, width ? data.length / width : 0);
  const shown = Math.min(MOST.columns, width);
  const columns: Column<number>[] = [
    { head: "token", header: true, cell: (i) => labels[i] ?? String(i) },
    ...Array.from({ length: shown }, (_, j) => ({ head: String(j), number: true, cell: (i: number) => real(data[i * width + j]) })),
    ...(width > shown ? [{ head: `… ${width}`, cell: () => "…" }] : []),
  ];
  return <Table caption={caption} columns={columns} rows={Array.from({ length: rows }, (_, i) => i)} />;
}

// ── drawings ────────────────────────────────────────────────────────────────────────────────────────────────────────

/** A scene as SVG in the page. */
interface DrawingProps {
  scene: Scene;
  fit?: boolean;
  /** Called with the place under the pointer, in the drawing's own units. */
  point?: (x: number, y: number) => void;
  leave?: () => void;
  /** Called with the name of a shape that was clicked. */
  pick?: (name: string) => void;
}

const NEAR = 9; // width of the strip around a line that can be clicked

export function Drawing({ scene, fit, point, leave, pick }: DrawingProps) {
  const move = (event: TargetedPointerEvent<SVGSVGElement>) => {
    const { left, top, width } = event.currentTarget.getBoundingClientRect();
    const scale = scene.width / width;
    point?.((event.clientX - left) * scale, (event.clientY - top) * scale);
  };
  return (
    <svg onPointerMove={point && move} onPointerDown={point && move} onPointerLeave={leave} class={fit ? "drawing fit" : "drawing"} viewBox={`0 0 ${scene.width} ${scene.height}`} width={scene.width} height={scene.height} role="img" aria-label={`${scene.title}; the table has the numbers.`}>
      {scene.shapes.map((shape, i) => {
        const [Name, given] = attributes(shape);
        const Element = Name as "text";
        const { name, tip } = shape;
        const drawn = <Element key={i} {...given}>{shape.kind === "text" ? shape.text : null}{tip ? <title>{tip}</title> : null}</Element>;
        if (!pick || name === undefined || shape.kind !== "path") return drawn;
        return <g key={i} class="pick" onClick={() => pick(name)}>{drawn}<path d={shape.d} fill="none" stroke="transparent" stroke-width={NEAR}>{tip ? <title>{tip}</title> : null}</path></g>;
      })}
    </svg>
  );
}

// ── commands and exports ────────────────────────────────────────────────────────────────────────────────────────────

function CopyButton({ text, label }: { text: () => string; label: string }) {
  const [caption, say] = useState(label);
  const shown = useRef<ReturnType<typeof setTimeout>>(undefined);
  useEffect(() => () => clearTimeout(shown.current), []);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
      say("Copied");
    } catch {
      say("No clipboard: open the line and copy it");
    }
    shown.current = setTimeout(() => say(label), 2000);
  };
  return <Button class="quiet" onClick={() => void copy()}>{caption}</Button>;
}

/** The requests as commands, each with buttons that copy it. */
export function Commands({ calls }: { calls: (ApiRequest | null)[] }) {
  const real = calls.filter((each) => each !== null);
  if (!real.length) return null;
  return (
    <div class="commands">
      {real.map((each, i) => <Command key={i} request={each} />)}
    </div>
  );
}

function Command({ request }: { request: ApiRequest }) {
  const [open, setOpen] = useState(false);
  return (
    <div class="command">
      <details onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary><span class="verb">{request.method}</span> /{request.path}</summary>
        {open && <><p class="small">curl</p><pre tabIndex={0}>{curl(request)}</pre><p class="small">Python</p><pre tabIndex={0}>{python(request)}</pre></>}
      </details>
      <CopyButton label="Copy curl" text={() => curl(request)} />
      <CopyButton label="Copy Python" text={() => python(request)} />
    </div>
  );
}

function save(name: string, blob: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** What a view can save. */
export interface Exported {
  /** The files' name, without its ending. */
  name: string;
  /** What it is called where a view has several. */
  label?: string;
  scene?: () => Scene;
  /** Rows of a table, the first of them its heads. */
  rows?: () => (string | number)[][];
  json?: () => unknown;
  facts?: Record<string, unknown>;
}

const text = (content: string, type: string) => new Blob([content], { type });

/** A page of its own with a drawing and its numbers, which needs no server. */
export function standalone(svg: string, title: string, rows: (string | number)[][]): string {
  const safe = (value: string | number) => savedCell(value).replace(/[&<>]/g, (each) => `&#${each.charCodeAt(0)};`);
  const table = rows.map((cells, i) => `<tr>${cells.map((cell) => (i ? `<td>${safe(cell)}</td>` : `<th>${safe(cell)}</th>`)).join("")}</tr>`).join("\n");
  return `<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>${safe(title)}</title>
<style>body{font:14px sans-serif;margin:2rem}svg{max-width:100%;height:auto}td,th{padding:.1rem .6rem .1rem 0;text-align:right}</style></head>
<body><h1>${safe(title)}</h1>\n${svg}\n<details><summary>Numbers</summary><table>${table}</table></details></body></html>\n`;
}

/** What the view at hand offers to save, as it is now. */
interface Offer {
  name: string;
  now: { current: Exported };
}

const Offering = createContext<(offer: Offer) => () => void>(() => () => undefined);

/** Offer to save what a view shows: the page's one row of buttons has it, or chooses among several. */
export function Export({ of }: { of: Exported }) {
  const now = useRef(of);
  now.current = of;
  const offer = useContext(Offering);
  useLayoutEffect(() => offer({ name: of.name, now }), [offer, of.name, !of.scene, !of.rows, !of.json]);
  return null;
}

/** A view and its intro, beside which stand the buttons that save what the view shows. */
export function Saving({ intro, children }: { intro: ComponentChildren; children: ComponentChildren }) {
  const [offers, setOffers] = useState<Offer[]>([]);
  const offer = useCallback((made: Offer) => {
    setOffers((old) => [...old, made]);
    return () => setOffers((old) => old.filter((each) => each !== made));
  }, []);
  return (
    <Offering.Provider value={offer}>
      <div class="intro"><div>{intro}</div><div class="saving">{offers.length > 0 && <SaveRow offers={offers} />}</div></div>
      {children}
    </Offering.Provider>
  );
}

function SaveRow({ offers }: { offers: Offer[] }) {
  const { theme } = usePage();
  const narrow = useNarrow();
  const [chosen, choose] = useState("");
  const { name, now } = offers.find((each) => each.name === chosen) ?? offers[0];
  const has = now.current;
  // The view may have been drawn again since: what it offers is read when a button is pressed.
  const [drawn, rows] = [() => now.current.scene?.() ?? { width: 0, height: 0, title: name, shapes: [] }, () => now.current.rows?.() ?? []];
  const facts = () => ({ page: location.href, ...now.current.facts });
  const svg = () => toSvg(drawn(), GROUND[theme], facts());
  const csv = () => rows().map((cells) => `${cells.map(csvCell).join(",")}\n`).join("");
  const buttons = (
    <div class="export" role="group" aria-label="Save">
      {!narrow && <span class="hint">Save</span>}
      {offers.length > 1 && <select aria-label="What is saved" value={name} onChange={(event) => choose(event.currentTarget.value)}>{offers.map((each) => <option key={each.name} value={each.name} selected={each.name === name}>{each.now.current.label ?? each.name}</option>)}</select>}
      {has.scene && <Button class="quiet" onClick={() => save(`${name}.svg`, text(svg(), "image/svg+xml"))}>SVG</Button>}
      {has.scene && <Button class="quiet" onClick={() => toCanvas(drawn(), GROUND[theme]).toBlob((blob) => blob && save(`${name}.png`, blob))}>PNG</Button>}
      {has.rows && <Button class="quiet" onClick={() => save(`${name}.csv`, text(csv(), "text/csv"))}>CSV</Button>}
      {has.json && <Button class="quiet" onClick={() => save(`${name}.json`, text(JSON.stringify({ ...facts(), ...(now.current.json?.() as object) }, null, 1), "application/json"))}>JSON</Button>}
      {has.scene && <Button class="quiet" onClick={() => save(`${name}.html`, text(standalone(svg(), drawn().title, rows()), "text/html"))}>HTML</Button>}
      <CopyButton label="Copy link" text={() => location.href} />
    </div>
  );
  return narrow ? <details class="saves"><summary>Save</summary>{buttons}</details> : buttons;
}
