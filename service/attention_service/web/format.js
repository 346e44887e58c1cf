// Numbers and specs as text for readers.

const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["", "k", "M", "G", "T", "P", "E"];

function scaled(value, base, units, gap) {
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
export const bytes = (value) => (Number.isFinite(value) ? scaled(value, 1024, BINARY, " ") : "—");

/** Format a count in decimal units: 1.07 G. */
export const count = (value) => (Number.isFinite(value) ? scaled(value, 1000, DECIMAL, " ") : "—");

/** Format a count in full, with separated thousands. */
export const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en-US").replaceAll(",", "\u202f") : "—");

/** Format a number with fixed decimals; nonfinite numbers as on the wire. */
export function real(value, digits = 3) {
  if (typeof value === "string") return value;
  if (value === null || value === undefined) return "—";
  return value.toFixed(digits).replace("-", "−");
}

/** Format milliseconds with three significant digits. */
export function milliseconds(value) {
  if (!Number.isFinite(value)) return "—";
  if (value === 0) return "0 ms";
  if (value < 0.001) return "< 0.001 ms";
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ms`;
}

/** Return the first characters of a version. */
export const short = (version) => (version ? version.slice(0, 10) : "—");

/** Summarize a spec: its score, and its differences from the defaults. */
export function describe(spec) {
  if (!spec) return "—";
  const mask = (m) => (m.name === "any" ? `(${m.of.map(mask).join(" or ")})` : m.name);
  const parts = [spec.score?.name ?? "scaled_dot", ...(spec.masks ?? []).map(mask)];
  if (spec.position && spec.position.name !== "none") parts.push(spec.position.name);
  if (spec.normalizer && spec.normalizer.name !== "softmax") parts.push(spec.normalizer.name);
  if (spec.method && spec.method.name !== "exact") parts.push(spec.method.name);
  return parts.join(" · ");
}
