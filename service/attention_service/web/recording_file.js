// A recording in a safetensors file of this browser. Only the header and the asked heads are read.

const READ = {
  F64: [8, (view, at) => view.getFloat64(at, true)],
  F32: [4, (view, at) => view.getFloat32(at, true)],
  F16: [2, (view, at) => half(view.getUint16(at, true))],
  BF16: [2, (view, at) => brain(view.getUint16(at, true))],
};
const MOST_HEADER = 2 ** 24;
const pad = new DataView(new ArrayBuffer(4));

function brain(bits) {
  pad.setUint32(0, bits * 2 ** 16);
  return pad.getFloat32(0);
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : (2 ** -14 * fraction) / 1024);
}

/** Read the facts and the places of the tensors. Throws an Error for a file that holds no recording. */
export async function openFile(file) {
  const head = new DataView(await file.slice(0, 8).arrayBuffer());
  const length = head.byteLength === 8 ? Number(head.getBigUint64(0, true)) : NaN;
  if (!(length <= Math.min(MOST_HEADER, file.size - 8))) throw new Error("This is not a safetensors file.");
  const header = JSON.parse(await file.slice(8, 8 + length).text());
  const told = header.__metadata__?.recording;
  if (told === undefined) throw new Error("This safetensors file holds no recording.");
  const facts = JSON.parse(told);
  delete header.__metadata__;
  return { facts, names: Object.keys(header), heads: (name, first, last) => readHeads(file, header[name], 8 + length, first, last) };
}

/** Return the heads from `first` to before `last` of a tensor `[head][query][key]` as nested lists. */
async function readHeads(file, { dtype, shape, data_offsets: [start, end] }, base, first, last) {
  const [heads, queries, keys] = shape;
  const [size, read] = READ[dtype] ?? [];
  if (!read) throw new Error(`The weights have dtype ${dtype}; expected one of ${Object.keys(READ).join(", ")}.`);
  if (end - start !== heads * queries * keys * size || base + end > file.size) throw new Error("The file is not complete.");
  const step = queries * keys * size;
  const part = file.slice(base + start + first * step, base + start + Math.min(last, heads) * step);
  const view = new DataView(await part.arrayBuffer());
  const many = (count, make) => Array.from({ length: count }, (_, i) => make(i));
  return many(view.byteLength / step, (head) =>
    many(queries, (query) => many(keys, (key) => read(view, head * step + (query * keys + key) * size))),
  );
}
