/** Seeded standard normal numbers, so that results are repeatable. */

function uniform(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Return `rows` × `columns` normal numbers with three decimals, row by row (mulberry32, Box and Muller 1958). */
export function normal(rows: number, columns: number, seed: number): Float32Array {
  const next = uniform(seed);
  const draw = () => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
  return Float32Array.from({ length: rows * columns }, () => Math.round(draw() * 1000) / 1000);
}
