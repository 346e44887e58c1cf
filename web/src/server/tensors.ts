/** Tensors: in JSON bodies as base64, and in safetensors files, which are read in parts. */

export interface Tensor {
  shape: number[];
  data: Float32Array;
}

/** One field of a request's body: what JSON holds, and tensors anywhere in it. */
export type Body = Record<string, unknown>;

const isTensor = (value: unknown): value is Tensor =>
  typeof value === "object" && value !== null && "data" in value && value.data instanceof Float32Array;

const texts = new WeakMap<Float32Array, string>(); // a view sends the same inputs again and again

/** The base64 text of numbers, little-endian. */
export function base64(data: Float32Array): string {
  const known = texts.get(data) ?? encoded(data);
  texts.set(data, known);
  return known;
}

function encoded(data: Float32Array): string {
  const raw = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  let text = "";
  for (let at = 0; at < raw.length; at += 8192) text += String.fromCharCode(...raw.subarray(at, at + 8192));
  return btoa(text);
}

/** Tensors of one shape as one tensor, along a new first dimension. */
export function stacked(parts: Tensor[]): Tensor {
  const size = parts[0].data.length;
  const data = new Float32Array(parts.length * size);
  parts.forEach((each, i) => data.set(each.data, i * size));
  return { shape: [parts.length, ...parts[0].shape], data };
}

/** Nested lists of a tensor, each number with the fewest digits that name its float32. */
export function nested({ shape, data }: Tensor): unknown {
  const part = (depth: number, from: number, size: number): unknown => {
    if (depth === shape.length) return shortest(data[from]);
    const step = size / shape[depth];
    return Array.from({ length: shape[depth] }, (_, i) => part(depth + 1, from + i * step, step));
  };
  return part(0, 0, data.length);
}

function shortest(value: number): number | string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  for (let digits = 3; digits < 9; digits += 1) {
    const text = Number(value.toPrecision(digits));
    if (Math.fround(text) === value) return text;
  }
  return value;
}

/** The JSON text of a body. Tensors become objects with base64, or nested lists. */
export function toJson(body: Body, lists = false): string {
  return JSON.stringify(body, (_, value: unknown) => {
    if (!isTensor(value)) return value;
    return lists ? nested(value) : { dtype: "float32", shape: value.shape, base64: base64(value.data) };
  });
}

const NOT_FINITE: unknown[] = ["NaN", "Infinity", "-Infinity"];

/** Read nested lists of numbers. Throws an Error for lists of unequal lengths, and for what is no number. */
export function fromNested(value: unknown): Tensor {
  const shape: number[] = [];
  for (let each = value; Array.isArray(each); each = (each as unknown[])[0]) shape.push(each.length);
  const numbers: number[] = [];
  const read = (each: unknown, depth: number): void => {
    if (depth < shape.length) {
      if (!Array.isArray(each) || each.length !== shape[depth]) throw new Error("the lists have unequal lengths");
      each.forEach((one) => read(one, depth + 1));
    } else if (typeof each === "number" || NOT_FINITE.includes(each)) numbers.push(Number(each));
    else throw new Error(Array.isArray(each) ? "the lists have unequal depths" : `${JSON.stringify(each)} is no number`);
  };
  read(value, 0);
  return { shape, data: Float32Array.from(numbers) };
}

// ── safetensors ─────────────────────────────────────────────────────────────────────────────────────────────────────

const pad = new DataView(new ArrayBuffer(4));

function brain(bits: number): number {
  pad.setUint32(0, bits * 2 ** 16);
  return pad.getFloat32(0);
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
}

const READ: Partial<Record<string, [number, (view: DataView, at: number) => number]>> = {
  F64: [8, (view, at) => view.getFloat64(at, true)],
  F32: [4, (view, at) => view.getFloat32(at, true)],
  F16: [2, (view, at) => half(view.getUint16(at, true))],
  BF16: [2, (view, at) => brain(view.getUint16(at, true))],
  I64: [8, (view, at) => Number(view.getBigInt64(at, true))],
  I32: [4, (view, at) => view.getInt32(at, true)],
  BOOL: [1, (view, at) => view.getUint8(at)],
};
const MOST_HEADER = 2 ** 24;

/** Bytes that can be read in parts: a file of this browser, a reply, or a file of the server. */
export interface Bytes {
  size: number;
  /** Some of the bytes; of bytes that are in memory a view, not a copy. */
  read(from: number, to: number): Promise<Uint8Array<ArrayBuffer>>;
}

/** The bytes of a file or a blob. */
export const ofBlob = (blob: Blob): Bytes => ({ size: blob.size, read: async (from, to) => new Uint8Array(await blob.slice(from, to).arrayBuffer()) });

/** The bytes of a reply. */
export const ofBuffer = (buffer: ArrayBuffer): Bytes => ({
  size: buffer.byteLength,
  read: (from, to) => Promise.resolve(new Uint8Array(buffer).subarray(from, to)),
});

interface Place {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

/** An opened safetensors file. */
export interface TensorFile {
  entries: Partial<Record<string, string>>;
  shapes: Record<string, number[]>;
  /** Read rows `from` to before `to` of the first dimension; default: all. Throws an Error for a broken file. */
  read(name: string, from?: number, to?: number): Promise<Tensor>;
}

const viewOf = ({ buffer, byteOffset, byteLength }: Uint8Array) => new DataView(buffer, byteOffset, byteLength);

/** Open a safetensors file. Only its header is read. Throws an Error for bytes that are none. */
export async function openTensors(bytes: Bytes): Promise<TensorFile> {
  const head = viewOf(await bytes.read(0, 8));
  const length = head.byteLength === 8 ? Number(head.getBigUint64(0, true)) : NaN;
  if (!(length <= Math.min(MOST_HEADER, bytes.size - 8))) throw new Error("This is not a safetensors file.");
  const text = new TextDecoder().decode(await bytes.read(8, 8 + length));
  const { __metadata__: entries = {}, ...places } = JSON.parse(text) as { __metadata__?: Partial<Record<string, string>> } & Record<string, Place>;
  return {
    entries,
    shapes: Object.fromEntries(Object.entries(places).map(([name, { shape }]) => [name, shape])),
    read: async (name, from = 0, to = Infinity) => {
      const { dtype, shape, data_offsets: [start, end] } = places[name];
      const [size, number] = READ[dtype] ?? [0, () => 0];
      if (!size) throw new Error(`${name} has dtype ${dtype}; expected one of ${Object.keys(READ).join(", ")}.`);
      const cells = shape.reduce((a, b) => a * b, 1);
      if (end - start !== cells * size || 8 + length + end > bytes.size) throw new Error("The file is not complete.");
      const rows = shape.length ? shape[0] : 1;
      const step = rows ? (cells / rows) * size : 0;
      const last = Math.min(to, rows);
      const raw = await bytes.read(8 + length + start + from * step, 8 + length + start + last * step);
      const kept = shape.length ? [last - from, ...shape.slice(1)] : [];
      if (dtype === "F32" && raw.byteLength % 4 === 0) return { shape: kept, data: raw.byteOffset % 4 ? new Float32Array(raw.slice().buffer) : new Float32Array(raw.buffer, raw.byteOffset, raw.byteLength / 4) };
      const view = viewOf(raw);
      return { shape: kept, data: Float32Array.from({ length: raw.byteLength / size }, (_, i) => number(view, i * size)) };
    },
  };
}
