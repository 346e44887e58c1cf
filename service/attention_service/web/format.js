// Numbers as a reader wants them.

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

/** Bytes in binary units. */
export const bytes = (value) => (Number.isFinite(value) ? scaled(value, 1024, BINARY, " ") : "—");

/** A count in decimal units: 1.07 G. */
export const count = (value) => (Number.isFinite(value) ? scaled(value, 1000, DECIMAL, " ") : "—");

/** A count in full, its thousands apart. */
export const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en-US").replaceAll(",", "\u202f") : "—");

/** A real number with a fixed number of decimals; what is not finite as the wire writes it. */
export function real(value, digits = 3) {
  if (typeof value === "string") return value;
  if (value === null || value === undefined) return "—";
  return value.toFixed(digits).replace("-", "−");
}

/** Milliseconds with three significant digits. */
export function milliseconds(value) {
  if (!Number.isFinite(value)) return "—";
  if (value === 0) return "0 ms";
  if (value < 0.001) return "< 0.001 ms";
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(3)} ms`;
}

/** The first characters of a version. */
export const short = (version) => (version ? version.slice(0, 10) : "—");

/** A spec in a few words: what differs from its defaults, after the score. */
export function describe(spec) {
  if (!spec) return "—";
  const mask = (m) => (m.name === "any" ? `(${m.of.map(mask).join(" or ")})` : m.name);
  const parts = [spec.score?.name ?? "scaled_dot", ...(spec.masks ?? []).map(mask)];
  if (spec.position && spec.position.name !== "none") parts.push(spec.position.name);
  if (spec.normalizer && spec.normalizer.name !== "softmax") parts.push(spec.normalizer.name);
  if (spec.method && spec.method.name !== "exact") parts.push(spec.method.name);
  return parts.join(" · ");
}
