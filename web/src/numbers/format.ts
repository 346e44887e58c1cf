/** Numbers and specs as text for readers. */

import type { ModelRan, Spec } from "../server/types";

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];

function scaled(value: number, base: number, units: readonly string[], gap: string): string {
  let unit = 0;
  let rest = Math.abs(value);
  while (rest >= base && unit < units.length - 1) {
    rest /= base;
    unit += 1;
  }
  const digits = unit === 0 || rest >= 100 ? 0 : rest >= 10 ? 1 : 2;
  const number = Number.isInteger(rest) ? String(rest) : rest.toFixed(digits);
  return `${value < 0 ? "−" : ""}${number}${units[unit] ? gap + units[unit] : ""}`;
}

/** Format bytes in binary units. */
export const bytes = (value: number | null | undefined) => (isNumber(value) ? scaled(value, 1024, BINARY, " ") : "—");

/** Format a count in decimal units: 1.07 G. */
export const count = (value: number | null | undefined) => (isNumber(value) ? scaled(value, 1000, DECIMAL, " ") : "—");

/** Format a count in full, with separated thousands. */
export const whole = (value: number) =>
  Number.isFinite(value) ? value.toLocaleString("en-US").replaceAll(",", "\u202f") : "—";

const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);

/** Format a number with fixed decimals. */
export function real(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "—";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  return value.toFixed(digits).replace("-", "−");
}

/** Format a number with significant digits: also one much smaller than 1. */
export function precise(value: number, digits = 4): string {
  if (!Number.isFinite(value)) return real(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e6 ? value.toPrecision(digits) : value.toExponential(digits - 1);
  return text.replaceAll("-", "−");
}

/** A number as it is written into a cell of a map: nothing for exactly 0, which is hatched, and `~0` for what two digits do not show. */
export function cellText(value: number): string {
  if (value === 0) return "";
  return Math.abs(value) < 0.005 ? "~0" : value.toFixed(2).replace(/^(-?)0\./, "$1.").replace("-", "−");
}

/** A number of a map as it fits into its cell: with fewer digits where two are too wide, and nothing where none fits. */
export function fitted(value: number, fits: (text: string) => boolean): string {
  const shorter = [cellText(value), ...(Math.abs(value) < 0.05 ? [] : [real(value, 1)]), ...(Math.abs(value) < 0.5 ? [] : [real(value, 0)]), ...(Math.abs(value) < 1000 ? [] : [count(Math.round(value)).replace(" ", "")])];
  return shorter.find(fits) ?? "";
}

/** Format a duration in milliseconds with three significant digits, in the unit that suits it: 0.12 ms, 10 s, 5 min. */
export function duration(value: number | null | undefined): string {
  if (!isNumber(value)) return "—";
  if (value === 0) return "0 ms";
  if (value < 0.001) return "< 0.001 ms";
  const [unit, size] = value < 1000 ? ["ms", 1] : value < 120_000 ? ["s", 1000] : value < 7_200_000 ? ["min", 60_000] : ["h", 3_600_000];
  const rest = value / size;
  return `${Number.isInteger(rest) || rest >= 100 ? rest.toFixed(0) : rest.toPrecision(3)} ${unit}`;
}

/** A relative change below this is the rounding of float32: sums of some thousand terms differ by as much. */
export const NO_EFFECT = 1e-6;

/** A change, or 0 where it is no more than rounding. `relative`: its size beside what is changed. */
export const settled = (change: number, relative = change) => (Math.abs(relative) < NO_EFFECT ? 0 : change);

/** Format a settled change. */
export const effect = (change: number) => (change === 0 ? "no effect" : precise(change));

export const ABOUT_ROUNDING = "Changes below one millionth of the output are rounding; the page writes “no effect”.";

/** Return the first characters of a version. */
export const short = (version: string | null | undefined) => (version ? version.slice(0, 10) : "—");

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/** A token that turns no other around: of letters from right to left, between marks that isolate it (UAX 9). */
export const isolated = (token: string) => (RIGHT_TO_LEFT.test(token) ? `\u2068${token}\u2069` : token);

/** A token as it was before it was shown: without marks of directions, and of a space before it. */
export const plainToken = (shown: string) => shown.replace(/[\u2068\u2069]/g, "").replace(/^·(?=.)/, "");

/** Tokens with their positions before those that come more than once. */
export function placed(tokens: string[]): string[] {
  const many = new Map<string, number>();
  tokens.forEach((each) => many.set(each, (many.get(each) ?? 0) + 1));
  return tokens.map((each, i) => ((many.get(each) ?? 0) > 1 ? `${i} ${each}` : each));
}

/** Cut a text to a length, between two characters. */
export const clip = (text: string, most = 12) => (text.length > most ? `${text.slice(0, most - 1).replace(/[\ud800-\udbff]$/, "")}…` : text);

/** A cell of a saved table; empty for what is no number. */
export const savedCell = (value: string | number) => (Number.isNaN(value) ? "" : String(value));

/** A cell of CSV. */
export function csvCell(value: string | number): string {
  const text = savedCell(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Summarize a spec: its score, and its differences from the defaults. */
export function describe(spec: Spec | undefined): string {
  if (!spec) return "—";
  const mask = (m: { name: string; of?: { name: string }[] }): string =>
    m.of ? `(${m.of.map(mask).join(" or ")})` : m.name;
  const parts = [spec.score?.name ?? "scaled_dot", ...(spec.masks ?? []).map(mask)];
  if (spec.position && spec.position.name !== "none") parts.push(spec.position.name);
  if (spec.normalizer && spec.normalizer.name !== "softmax") parts.push(spec.normalizer.name);
  if (spec.method && spec.method.name !== "exact") parts.push(spec.method.name);
  return parts.join(" · ");
}

const LONG_WAIT_MS = 1000;

/** The waits of a request to a whole model that were long, with their reasons; empty if none was. */
export const waits = ({ queue_ms: queue, load_ms: load = 0 }: Pick<ModelRan, "queue_ms" | "load_ms">): string =>
  [load >= LONG_WAIT_MS && `${duration(load)} until the model was loaded`, queue >= LONG_WAIT_MS && `${duration(queue)} for other requests`].filter(Boolean).join(", ");
