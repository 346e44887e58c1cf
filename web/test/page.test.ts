import { describe, expect, it, vi } from "vitest";
import { Tiles, whole } from "../src/numbers/cells";
import { INKS, SCALES, UNCHOSEN, onDifference, rgb, step } from "../src/drawing/colour";
import { readChanges, wholeEdits } from "../src/subjects/edits";
import type { Edit } from "../src/subjects/edits";
import { bytes, cellText, clip, count, csvCell, describe as spec, duration, effect, fitted, isolated, placed, plainToken, precise, real, settled, waits } from "../src/numbers/format";
import { barScene, chartScene, endsOf, heatScene, lineScene, overlaid, ranged, scaleEnds, usualRange, wideness } from "../src/drawing/drawings";
import { HEAD_COLOURS, headStroke } from "../src/drawing/head_colours";
import { difference, divergence, largestShared, matrix, pooled, pyramid, spreadOf, statistics } from "../src/numbers/matrix";
import { layoutOf, placeAt, productScene, productsOf, scaleName } from "../src/drawing/products";
import { pairOf } from "../src/numbers/pair";
import { normal } from "../src/numbers/random";
import { toSvg } from "../src/drawing/scene";
import { changed, decimal, format, integer, parse } from "../src/page/state";
import { headName, headTitle, isScaledDot, remembered } from "../src/subjects/subject";
import type { Subject } from "../src/subjects/subject";
import { distribution, linesOf, means, strongest, textsOf } from "../src/subjects/survey";
import { FINDINGS, addressOf, ringed } from "../src/page/tour";
import { base64, fromNested, nested, ofBlob, openTensors, stacked, toJson } from "../src/server/tensors";

const of = (rows: number[][]) => matrix(rows.length, rows[0].length, Float32Array.from(rows.flat()));

/** A safetensors file of these tensors. */
function file(tensors: Record<string, { dtype: string; shape: number[]; raw: Uint8Array }>, entries = {}): Blob {
  let at = 0;
  const header: Record<string, unknown> = { __metadata__: entries };
  for (const [name, { dtype, shape, raw }] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [at, at + raw.length] };
    at += raw.length;
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const head = new DataView(new ArrayBuffer(8));
  head.setBigUint64(0, BigInt(text.length), true);
  return new Blob([head.buffer, text, ...Object.values(tensors).map(({ raw }) => Uint8Array.from(raw))]);
}

describe("the state in the URL", () => {
  it("comes back from its text, whatever the values hold", () => {
    const state = { view: "head", params: { k: "[[1, 2],\n [3, 4]]", labels: "a&b=c #1 é", source: "builtin:cat" } };
    expect(parse(format(state))).toEqual(state);
  });
  it("leaves out what is empty", () => {
    expect(format(changed({ view: "head", params: { head: "3" } }, { head: "", layer: 2 }))).toBe("#/head?layer=2");
  });
  it("opens at the overview", () => {
    expect(parse("")).toEqual({ view: "overview", params: {} });
  });
  it("reads numbers within bounds alone", () => {
    expect(["0.25", "-3", "9", "abc", "", undefined].map((text) => decimal(text, 1, 0, 2))).toEqual([0.25, 0, 2, 1, 1, 1]);
  });
  it("reads edits alone", () => {
    expect(readChanges({ edits: '[null,1,{"tap":"context","heads":3},{"tap":"context","heads":[3],"set":0}]', temperature: "-1" })).toEqual(
      { edits: [{ tap: "context", heads: [3], set: 0 }], temperature: 0.25, causal: false });
  });
  it("reads whole numbers within bounds alone", () => {
    expect([integer("7", 0), integer("-1", 0), integer("1.5", 4), integer("", 2), integer("99", 0, 0, 9)]).toEqual([7, 0, 4, 2, 9]);
  });
});

describe("statistics of a head", () => {
  it("are ln n, and the middle distance, for equal weights", () => {
    const found = statistics(of([[0.25, 0.25, 0.25, 0.25]]));
    expect(found.entropy).toBeCloseTo(Math.log(4), 6);
    expect(found.effective_keys).toBeCloseTo(4, 5);
    expect(found.signed_distance).toBeCloseTo(1.5, 6);
    expect(found.locality).toBeCloseTo(1, 6);
    expect(found.next_token).toBeCloseTo(0.25, 6);
    expect(found.mean_distance).toBeCloseTo(1.5, 6);
    expect(found.first_key).toBeCloseTo(0.25, 6);
  });
  it("average the effective keys of each query", () => {
    expect(statistics(of([[1, 0], [0.5, 0.5]])).effective_keys).toBeCloseTo(1.5, 6);
  });
  it("leave out queries that attend to nothing", () => {
    expect(statistics(of([[0, 0], [0, 1]])).own_position).toBe(1);
    expect(statistics(of([[0, 0]])).entropy).toBeNaN();
  });
  it("see a head that attends to the previous token", () => {
    expect(statistics(of([[1, 0, 0], [1, 0, 0], [0, 1, 0]])).previous_token).toBeCloseTo(2 / 3, 6);
  });
});

describe("alignment", () => {
  it("is 1 for a head that goes forward, -1 for one that goes back, and 0 for one that stays", () => {
    expect(statistics(of([[1, 0, 0], [0, 1, 0], [0, 0, 1]])).alignment).toBeCloseTo(1, 6);
    expect(statistics(of([[0, 0, 1], [0, 1, 0], [1, 0, 0]])).alignment).toBeCloseTo(-1, 6);
    expect(statistics(of([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])).alignment).toBeCloseTo(0, 6);
    expect(statistics(of([[1, 0, 0]])).alignment).toBeNaN();
  });
  it("is the mean over pairs of queries", () => {
    expect(statistics(of([[1, 0, 0], [0.25, 0.75, 0], [0, 1, 0]])).alignment).toBeCloseTo((0.75 + 1 + 0.25) / 3, 6);
  });
});

describe("induction", () => {
  it("is the share behind an earlier equal token", () => {
    const found = statistics(of([[1, 0, 0], [0.5, 0.5, 0], [0, 0.75, 0.25]]), { queries: ["a", "b", "a"], keys: ["a", "b", "a"] });
    expect(found.induction).toBeCloseTo(0.75 / 3, 6);
    expect(found.duplicate_token).toBeCloseTo(0, 6);
    expect(statistics(of([[1, 0], [1, 0]]), { queries: ["a", "b"], keys: ["a", "b"] }).induction).toBe(0);
  });
  it("knows equal tokens by their ids where there are some", () => {
    const tokens = ["a", "b", "a"];
    expect(statistics(of([[1, 0, 0], [0.5, 0.5, 0], [0, 0.75, 0.25]]), { queries: tokens, keys: tokens, ids: [5, 6, 7] }).induction).toBe(0);
  });
});

describe("a token", () => {
  it("of letters from right to left turns no other around, and is found by its letters", () => {
    expect(isolated("·שלום")).toBe("\u2068·שלום\u2069");
    expect(isolated("·the")).toBe("·the");
    expect([isolated("·שלום"), "·the", "·"].map(plainToken)).toEqual(["שלום", "the", "·"]);
  });
});

describe("bars", () => {
  it("are the 64 largest of many, in their order", () => {
    const values = Array.from({ length: 100 }, (_, i) => (i % 2 ? i : -i));
    const { places, title } = barScene({ theme: "light", title: "changes", labels: [], values });
    expect(places).toEqual(Array.from({ length: 64 }, (_, i) => i + 36));
    expect(title).toBe("changes, the 64 largest of 100");
  });
});

describe("colours of heads", () => {
  // sRGB as eyes without one kind of cones see it, in linear light (Machado, Oliveira and Fernandes 2009, severity 1).
  const EYES = {
    all: [1, 0, 0, 0, 1, 0, 0, 0, 1],
    noLong: [0.152286, 1.052583, -0.204868, 0.114503, 0.786281, 0.099216, -0.003882, -0.048116, 1.051998],
    noMiddle: [0.367322, 0.860646, -0.227968, 0.280085, 0.672501, 0.047413, -0.01182, 0.04294, 0.968881],
    noShort: [1.255528, -0.076749, -0.178779, -0.078411, 0.930809, 0.147602, 0.004733, 0.691367, 0.3039],
  };
  const times = (by: number[], [x, y, z]: number[]) => [0, 3, 6].map((at) => by[at] * x + by[at + 1] * y + by[at + 2] * z);
  const linear = (hex: string) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  const lab = (light: number[]) => times(
    [0.2104542553, 0.793617785, -0.0040720468, 1.9779984951, -2.428592205, 0.4505937099, 0.0259040371, 0.7827717662, -0.808675766],
    times([0.4122214708, 0.5363325363, 0.0514459929, 0.2119034982, 0.6806995451, 0.1073969566, 0.0883024619, 0.2817188376, 0.6299787005], light.map((each) => Math.min(1, Math.max(0, each)))).map(Math.cbrt),
  );
  const luminance = (hex: string) => linear(hex).reduce((sum, each, i) => sum + each * [0.2126, 0.7152, 0.0722][i], 0);
  for (const theme of ["light", "dark"] as const) {
    it(`differ for everybody and are seen on ${theme} paper`, () => {
      for (const [eyes, matrixOf] of Object.entries(EYES)) {
        const seen = HEAD_COLOURS[theme].map((each) => lab(times(matrixOf, linear(each))));
        seen.forEach((one, i) => seen.slice(0, i).forEach((other) => expect(Math.hypot(...one.map((each, at) => each - other[at]))).toBeGreaterThan(eyes === "all" ? 0.24 : 0.12)));
      }
      const paper = luminance(INKS[theme].paper);
      for (const each of HEAD_COLOURS[theme].map(luminance)) expect((Math.max(each, paper) + 0.05) / (Math.min(each, paper) + 0.05)).toBeGreaterThan(3);
    });
  }
  it("and dashes make 24 heads differ", () => {
    expect(new Set(Array.from({ length: 24 }, (_, head) => JSON.stringify(headStroke("light", head)))).size).toBe(24);
  });
});

describe("lines of heads", () => {
  const [one, two] = [of([[0.9, 0.1], [0.4, 0.6]]), of([[0.2, 0.8], [0, 1]])];
  const drawn = (options: object) => lineScene([{ of: one }, { of: two, name: "two" }], { theme: "light", title: "", queries: ["a", "b"], keys: ["a", "b"], least: 0.3, ...options }).shapes.flatMap(({ name }) => name ?? []);
  it("are those of at least the least weight, each by its head, query and key", () => {
    expect(drawn({})).toEqual(["0,0,0", "0,1,0", "0,1,1", "1,0,1", "1,1,1"]);
  });
  it("are of one query or one key alone, and of a pair the query's", () => {
    expect(drawn({ only: 1 })).toEqual(["0,1,0", "0,1,1", "1,1,1"]);
    expect(drawn({ onlyKey: 0 })).toEqual(["0,0,0", "0,1,0"]);
    expect(drawn({ only: 1, onlyKey: 0 })).toEqual(drawn({ only: 1 }));
  });
  it("are the strongest where there are too many", () => {
    const side = 64;
    const many = matrix(side, side, Float32Array.from({ length: side ** 2 }, (_, i) => (i + 1) / side ** 2));
    const tokens = Array.from({ length: side }, String);
    const scene = lineScene([{ of: many }], { theme: "light", title: "", queries: tokens, keys: tokens, least: 0 });
    expect([scene.drawn, scene.left]).toEqual([3000, side ** 2 - 3000]);
    expect(scene.shapes.some(({ name }) => name === "0,0,0")).toBe(false);
  });
});

describe("q · k by dimension", () => {
  const [q, k] = [Float32Array.of(1, -2, 3, 0), [Float32Array.of(0.5, 1, 2, 7), Float32Array.of(-1, 0, 1, 1)]];
  const scores = (scale: number) => Float32Array.of(4.5 * scale, 2 * scale);
  it("has parts that add up to the scores, whatever the scale", () => {
    for (const [scale, name] of [[0.5, "1/√4"], [1, ""], [-0.3, "−0.300"]] as const) {
      const made = productsOf(q, k, scores(scale), [0.9, 0.1]);
      expect(made?.parts.map((each) => each.reduce((a, b) => a + b, 0))).toEqual([expect.closeTo(4.5 * scale, 5), expect.closeTo(2 * scale, 5)]);
      expect(made && scaleName(made)).toBe(name);
    }
  });
  it("is not of scores that are no products", () => {
    expect(productsOf(q, k, Float32Array.of(4.5, 2.5), [0.9, 0.1])).toBeNull();
  });
  it("is drawn where the pointer finds it", () => {
    const made = productsOf(q, k, scores(1), [0.9, 0.1]);
    if (!made) throw new Error("no products");
    const layout = layoutOf(made, 700);
    const cells = productScene(made, layout, { theme: "light", title: "", query: "a", keys: ["b", "c"] }).shapes.filter((shape) => shape.kind === "rect");
    const places = cells.flatMap(({ x, y }) => placeAt(layout, made, x + 1, y + 1) ?? []);
    const row = (key: number) => [0, 1, 2, 3].map((dimension) => ({ key, dimension }));
    expect(places).toEqual([-1, 0, 0, 1, 1].flatMap(row)); // q, then of each key its vector and its products; no bar is a cell
    expect(placeAt(layout, made, 1, 1)).toBeNull();
  });
});

describe("two heads side by side", () => {
  /** Rows of shares, some of them exactly 0. */
  const shares = (side: number, seed: number) => {
    const made = matrix(side, side, normal(side, side, seed).map((each) => Math.max(0, each)));
    for (let i = 0; i < side; i += 1) {
      const row = made.data.subarray(i * side, (i + 1) * side);
      const total = row.reduce((a, b) => a + b, 0);
      row.forEach((each, j) => (row[j] = each / total));
    }
    return made;
  };
  it("are apart by the divergence's formula, also where their weights are nearly equal", () => {
    const [one, other] = [shares(40, 0), shares(40, 1)];
    for (const two of [other, matrix(40, 40, one.data.map((each, i) => each * (1 + (i % 7) / 50)))]) {
      const total = (of: Float32Array) => of.reduce((a, b) => a + b, 0);
      const expected = Array.from({ length: 40 }, (_, i) => {
        const [p, q] = [one, two].map(({ data }) => data.subarray(i * 40, (i + 1) * 40)).map((row) => Array.from(row, (each) => each / total(row)));
        return p.reduce((sum, each, j) => sum + (each && (each * Math.log((2 * each) / (each + q[j]))) / 2) + (q[j] && (q[j] * Math.log((2 * q[j]) / (each + q[j]))) / 2), 0);
      });
      divergence(one, two).rows.forEach((each, i) => expect(each).toBeCloseTo(expected[i], 6));
    }
  });
  it("of many weights have the pictures of those that are pooled step by step, and exact numbers", () => {
    const side = 1500;
    const [one, other] = [7919, 104729].map((step) => {
      const made = matrix(side, side);
      for (let i = 0; i < made.data.length; i += 1) made.data[i] = ((i * step) % 1009) / 1009;
      return made;
    });
    const pair = pairOf(one, other);
    expect(pair.pool).toBe(4);
    const same = (picture: Float32Array, expected: Float32Array) => expect(picture.length === expected.length && picture.every((each, i) => each === expected[i])).toBe(true);
    const picture = (of: typeof pair.one) => of.strips(0, 0, side)[0].of.data;
    same(picture(pair.one), pooled(pooled(one)).data);
    same(picture(pair.other), pooled(pooled(other)).data);
    const sizes = (of: Float32Array) => of.map(Math.abs); // of two equally large differences either may be shown
    same(sizes(pair.shown.data), sizes(pooled(pooled(difference(one, other))).data));
    same(picture(pair.less), pair.shown.data);
    expect(pair.less.value(700, 3)).toBe(one.data[700 * side + 3] - other.data[700 * side + 3]);
    expect(pair.one.most).toBe(Math.fround(1008 / 1009));
  }, 30_000);
});

describe("waits of a request to a whole model", () => {
  it("are told with their reasons once they are long", () => {
    expect(waits({ queue_ms: 40 })).toBe("");
    expect(waits({ queue_ms: 3100, load_ms: 0 })).toBe("3.10 s for other requests");
    expect(waits({ queue_ms: 3100, load_ms: 8000 })).toBe("8 s until the model was loaded, 3.10 s for other requests");
  });
});

describe("durations", () => {
  it("come in the unit that suits them", () => {
    expect([0, 0.0001, 0.1234, 12.34, 999, 1000, 10_000, 61_234, 125_000, 9_000_000].map(duration)).toEqual(["0 ms", "< 0.001 ms", "0.123 ms", "12.3 ms", "999 ms", "1 s", "10 s", "61.2 s", "2.08 min", "2.50 h"]);
  });
});

describe("changes", () => {
  it("that rounding makes are no effect", () => {
    expect([1e-7, -3e-7, 2e-6, 0.5].map((each) => effect(settled(each)))).toEqual(["no effect", "no effect", "2.000e−6", "0.5000"]);
    expect(effect(settled(40, 1e-7))).toBe("no effect");
  });
});

describe("matrices", () => {
  it("pool to the cell of the largest magnitude", () => {
    expect(Array.from(pooled(of([[1, -3, 0], [2, 0, 5]])).data)).toEqual([-3, 5]);
  });
  it("halve until they are small", () => {
    expect(pyramid(matrix(1000, 600), 256).map(({ rows, columns }) => [rows, columns])).toEqual([[1000, 600], [500, 300], [250, 150]]);
  });
  it("have no difference from themselves, and refuse other sizes", () => {
    const some = of([[0.1, 0.9]]);
    expect(Array.from(difference(some, some).data)).toEqual([0, 0]);
    expect(() => difference(some, of([[1]]))).toThrow("1 × 2 and 1 × 1");
  });
  it("diverge by ln 2 where their keys differ, and by 0 from themselves", () => {
    expect(divergence(of([[1, 0]]), of([[0, 1]])).mean).toBeCloseTo(Math.LN2, 6);
    expect(divergence(of([[0.3, 0.7]]), of([[0.3, 0.7]])).mean).toBe(0);
  });
});

describe("tensors", () => {
  it("stack along a new first dimension", () => {
    const [one, other] = [[[1, 2]], [[3, 4]]].map(fromNested);
    expect(nested(stacked([one, other]))).toEqual([[[1, 2]], [[3, 4]]]);
  });
  it("keep their shape and numbers in lists", () => {
    const lists = [[[1, 0.1], [-2.5, 1e-3]]];
    expect(nested(fromNested(lists))).toEqual(lists);
    for (const ragged of [[[1, 2], [3]], [[1, 2], [3], [4, 5, 6]]]) expect(() => fromNested(ragged)).toThrow("unequal lengths");
    expect(() => fromNested([[1], [[2]]])).toThrow("unequal depths");
    for (const other of [null, true, "1", {}]) expect(() => fromNested([1, other])).toThrow("is no number");
    expect(Array.from(fromNested(["NaN", "-Infinity"]).data)).toEqual([NaN, -Infinity]);
  });
  it("travel as base64, little-endian", () => {
    expect(base64(Float32Array.of(1))).toBe("AACAPw==");
    expect(toJson({ query: { shape: [1], data: Float32Array.of(1) } })).toBe('{"query":{"dtype":"float32","shape":[1],"base64":"AACAPw=="}}');
  });
  it("are read from a file in parts, with half precision", async () => {
    const raw = new Uint8Array([0, 0x3c, 0, 0xb8, 0xff, 0x7b, 0, 0x7c]); // 1, −0.5, 65504, ∞
    const opened = await openTensors(ofBlob(file({ w: { dtype: "F16", shape: [2, 2], raw } }, { recording: "{}" })));
    expect(opened.entries.recording).toBe("{}");
    expect(Array.from((await opened.read("w")).data)).toEqual([1, -0.5, 65504, Infinity]);
    expect(Array.from((await opened.read("w", 1, 2)).data)).toEqual([65504, Infinity]);
    const brain = new Uint8Array([0x80, 0x3f, 0, 0xc0]); // 1, −2
    expect(Array.from((await (await openTensors(ofBlob(file({ w: { dtype: "BF16", shape: [2], raw: brain } })))).read("w")).data)).toEqual([1, -2]);
  });
  it("are refused where the file is none, or is cut", async () => {
    await expect(openTensors(ofBlob(new Blob(["no tensors here"])))).rejects.toThrow("not a safetensors file");
    const whole = file({ w: { dtype: "F32", shape: [4], raw: new Uint8Array(16) } });
    const cut = await openTensors(ofBlob(whole.slice(0, whole.size - 4)));
    await expect(cut.read("w")).rejects.toThrow("not complete");
  });
});

describe("texts", () => {
  it("format numbers for readers", () => {
    expect([bytes(1536), count(1_070_000_000), real(-0.5), precise(0.00001234), real(NaN)]).toEqual(["1.50 KiB", "1.07 G", "−0.500", "1.234e−5", "—"]);
  });
  it("summarize a spec by its differences from the defaults", () => {
    expect(spec({ masks: [{ name: "causal" }], normalizer: { name: "softmax" } })).toBe("scaled_dot · causal");
  });
  it("are cells of CSV, whatever they hold", () => {
    expect([1.5, NaN, "a\rb", 'say "x", y', "plain"].map(csvCell)).toEqual(["1.5", "", '"a\rb"', '"say ""x"", y"', "plain"]);
  });
  it("are cut between two characters", () => {
    expect(clip("😀😀😀", 4)).toBe("😀…");
  });
  it("leave out of drawings what XML cannot hold", () => {
    const svg = toSvg({ width: 1, height: 1, title: "a\u0001", shapes: [{ kind: "text", x: 0, y: 0, text: "b\u001f\tc" }] }, "white", {});
    expect(svg).toContain("<title>a\ufffd</title>");
    expect(svg).toContain(">b\ufffd\tc<");
  });
  it("escape text in drawings", () => {
    const svg = toSvg({ width: 1, height: 1, title: "<b>", shapes: [{ kind: "text", x: 0, y: 0, text: "a<b&c" }] }, "white", { by: "</metadata>" });
    expect(svg).not.toMatch(/<b>|a<b|<\/metadata>.*<\/metadata>/s);
  });
});

describe("seeded numbers and colours", () => {
  it("are the same for a seed, and standard normal", () => {
    const many = normal(100, 100, 3);
    expect(normal(100, 100, 3)).toEqual(many);
    const mean = many.reduce((a, b) => a + b, 0) / many.length;
    const variance = many.reduce((a, b) => a + b * b, 0) / many.length;
    expect(Math.abs(mean)).toBeLessThan(0.04);
    expect(Math.abs(variance - 1)).toBeLessThan(0.06);
  });
  it("turn OKLab's white and black into sRGB", () => {
    expect([rgb([1, 0, 0]), rgb([0, 0, 0])]).toEqual([[255, 255, 255], [0, 0, 0]]);
  });
});

describe("edits of a whole model", () => {
  it("are the temperature, the mask as hidden keys, and the rest", () => {
    const hide: Edit = { tap: "context", heads: [1], set: 0 };
    expect(wholeEdits([hide], 1, false, 2, 2)).toEqual([hide]);
    expect(wholeEdits([hide], 2, true, 2, 3)).toEqual([
      { tap: "masked_scores", scale: 0.5 },
      { tap: "weights", queries: [0], keys: [2], set: 0, renormalize: true },
      hide,
    ]);
  });
});

describe("weights that can be computed again", () => {
  const query = { shape: [1, 2, 1], data: Float32Array.of(1, 2) };
  const key = { shape: [1, 2, 1], data: Float32Array.of(0, Math.log(3) / 2) };
  it("are softmax(q·k/√d) of their q and k", () => {
    expect(isScaledDot(of([[0.5, 0.5], [0.25, 0.75]]), query, key, false)).toBe(true);
    expect(isScaledDot(of([[0.5, 0.5], [0.3, 0.7]]), query, key, false)).toBe(false);
  });
});

describe("a head that a server pools", () => {
  it("shows the coarsest level until the strips in view are here", async () => {
    vi.useFakeTimers();
    const requested: [number, number, number][] = [];
    const read = (pool: number, first: number, last: number) => {
      requested.push([pool, first, last]);
      const made = matrix(Math.ceil((last - first) / pool), Math.ceil(2048 / pool));
      return Promise.resolve({ ...made, data: made.data.map((_, at) => first + pool * Math.floor(at / made.columns)) });
    };
    const tiles = await Tiles.open(2048, 2048, read);
    expect(requested).toEqual([[4, 0, 2048]]);
    expect([tiles.levels, tiles.most, tiles.bars.every]).toEqual([3, 2044, 4]);
    expect(tiles.strips(0, 300, 310).map(({ level }) => level)).toEqual([2]);
    expect(tiles.value(7, 0)).toBeUndefined();
    const settled = vi.fn();
    tiles.settled = settled;
    expect(tiles.waits).toBe(true);
    await vi.runAllTimersAsync();
    expect([tiles.waits, settled.mock.calls.length]).toEqual([false, 1]);
    expect(requested.slice(1)).toEqual([[1, 256, 512], [1, 7, 8]]);
    const [, strip] = tiles.strips(0, 300, 310);
    expect([strip.level, strip.top, strip.of.data[0]]).toEqual([0, 256, 256]);
    expect(tiles.value(7, 0)).toBe(7);
    vi.useRealTimers();
  });

  it.each([
    ["a view of more strips than are kept", 32_768, 32_768, (tiles: Tiles) => tiles.strips(0, 0, 1300)],
    ["a table of more rows than strips are kept", 30_000, 100, (tiles: Tiles) => Array.from({ length: 100 }, (_, i) => tiles.value(i, 0))],
  ])("reads each part of %s once", async (_what, rows, columns, look) => {
    vi.useFakeTimers();
    const requested: string[] = [];
    const read = (pool: number, first: number, last: number) => {
      requested.push(`${pool} ${first}`);
      return Promise.resolve(matrix(Math.ceil((last - first) / pool), Math.ceil(columns / pool)));
    };
    const tiles = await Tiles.open(rows, columns, read);
    tiles.changed = () => void look(tiles); // the page looks again when a strip came
    look(tiles);
    await vi.advanceTimersByTimeAsync(60_000);
    expect(requested.length).toBeGreaterThan(1);
    expect(new Set(requested).size).toBe(requested.length);
    vi.useRealTimers();
  });
});

describe("what is remembered by its key", () => {
  it("is asked for once, and again where it failed", async () => {
    const requested: number[] = [];
    const read = remembered((key: number) => (requested.push(key), requested.length === 1 ? Promise.reject(new Error("lost")) : Promise.resolve(2 * key)));
    await expect(read(3)).rejects.toThrow("lost");
    expect([await read(3), await read(3), await read(4)]).toEqual([6, 6, 8]);
    expect(requested).toEqual([3, 3, 4]);
  });
});

describe("a survey of heads", () => {
  const values = { entropy: Float32Array.from([1, NaN, 3, NaN, NaN, NaN, 2, NaN]) };
  const heads = [0, 1].map((head) => ({ layer: 0, ref: 0, head, name: `L0H${head}` }));
  const found = { model: "net", texts: ["a", "b", "c", "d"], heads, values };
  it("leaves texts without a number out", () => {
    expect(means(found, "entropy")).toEqual([2, NaN]);
    expect(strongest(found, 0, "entropy", 2)).toEqual([{ value: 3, text: 1 }, { value: 2, text: 3 }]);
    expect(strongest(found, 1, "entropy", 2)).toEqual([]);
  });
  it("has quartiles and equal bins", () => {
    const { mean, quantiles, counts } = distribution(found, 0, "entropy");
    expect(mean).toBe(2);
    expect(quantiles).toEqual([1, 1.5, 2, 2.5, 3]);
    expect([counts[0], counts[10], counts[19]]).toEqual([1, 1, 1]);
  });
  it("has a line for each file, which may be empty", () => {
    expect(linesOf(" one \r\n\n", 2)).toEqual(["one", ""]);
    expect(linesOf("one\ntwo\n", 2)).toEqual(["one", "two"]);
    expect(linesOf("\n", 2)).toEqual([]);
    expect(linesOf("one\ntwo", 1)).toEqual(["one", "two"]);
  });
  it("has a text for each line that is not empty", () => {
    expect(textsOf(" one \r\n\n two")).toEqual(["one", "two"]);
  });
});

describe("the range of colours", () => {
  const causal = matrix(3, 3, Float32Array.from([1, 0, 0, 0.6, 0.4, 0, 0.3, 0.3, 0.4]));

  it("leaves out queries with one key, whose weight is 1 whatever the head does", () => {
    expect(largestShared(causal)).toBeCloseTo(0.6);
    expect(whole(causal).spread.high).toBeCloseTo(0.6);
    expect(whole(causal).most).toBe(1);
    expect(endsOf({ low: 0.1, high: 0.6 }, "own", false, 1)).toEqual(["0", "≥ 0.600"]);
  });

  it("ends at the largest where every query has one key, and of numbers that are no weights", () => {
    expect(largestShared(matrix(2, 2, Float32Array.from([1, 0, 0, 1])))).toBe(1);
    expect(largestShared(matrix(2, 2, Float32Array.from([5, 0, 1, 2])))).toBe(5);
    expect(whole(matrix(2, 2, Float32Array.from([-5, 0, 1, 2])), true).spread).toEqual({ low: 0, high: 5 });
  });

  it("is logarithmic by itself above 64 tokens, on the page and in pictures", () => {
    expect([usualRange(64), usualRange(65)]).toEqual(["own", "log"]);
    const many = 100;
    const even = matrix(many, many);
    for (let i = 0; i < many; i += 1) even.data.fill(1 / (i + 1), i * many, i * many + i + 1);
    const names = Array.from({ length: many }, (_, i) => String(i));
    const { shapes } = heatScene(even, { theme: "light", title: "", queries: names, keys: names });
    const fills = shapes.flatMap((shape) => (shape.kind === "rect" && shape.fill ? [shape.fill] : []));
    const paper = fills[1]; // the first query's second key
    const seen = Array.from({ length: many }, (_, i) => fills.slice(i * many, i * many + i + 1)).flat();
    expect(seen.filter((fill) => fill === paper).length).toBe(0);
  });
});

describe("the range of colours of weights that are near each other", () => {
  const near = matrix(8, 100, Float32Array.from({ length: 800 }, (_, i) => 0.009 + 0.002 * ((i * 37) % 800) / 800)); // 0.009 to 0.011
  const even = matrix(4, 5, new Float32Array(20).fill(0.2));
  const sharp = of([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.001, 0.001, 0.998]]);

  it("begins at the least of them, and says so", () => {
    for (const range of ["own", "log"] as const) {
      const place = ranged(near, range, spreadOf(near), false);
      const places = Array.from(near.data, (value) => place(value, 0));
      expect(Math.min(...places)).toBeCloseTo(0.1, 1);
      expect(place(0, 0)).toBe(0);
      expect(Math.max(...places)).toBeGreaterThan(0.95);
      expect(endsOf(spreadOf(near), range, false)).toEqual(["≤ 0.00902", "0.0110"]);
    }
  });
  it("is in its middle for an even head, whose differences are rounding", () => {
    for (const range of ["own", "log"] as const) expect(ranged(even, range, spreadOf(even), false)(even.data[3], 0)).toBeCloseTo(0.55, 2);
    expect(endsOf(spreadOf(even), "own", false)).toEqual(["≤ 0.196", "0.204"]);
  });
  it("begins at 0 for a head with large and small weights", () => {
    expect(scaleEnds(spreadOf(sharp))[0]).toBe(0);
    expect(scaleEnds(spreadOf(matrix(2, 2)))).toEqual([0, 1]);
  });
  it("is the same over an image and over a sound", () => {
    const { place, ends } = overlaid([0.2, 0.21, 0.22], false);
    expect([0.2, 0.22].map(place)).toEqual([0, 1]);
    expect(ends).toEqual(["0.200", "0.220"]);
    expect(overlaid([0.2, 0.2], false).place(0.2)).toBeCloseTo(0.5);
    expect(overlaid([-1, 0.5], true).place(0.5)).toBe(0.5);
  });
});

describe("numbers in cells", () => {
  it("have as many digits as fit", () => {
    const wide = (most: number) => (value: number) => fitted(value, (text) => text.length <= most);
    expect([-6.82, 123.456, 1234.5, 0.25].map(wide(4))).toEqual(["−6.8", "123", "1235", ".25"]);
    expect([-6.82, -0.25, 0.013, 123_456].map(wide(3))).toEqual(["−7", "", ".01", ""]);
    expect(wide(4)(1_234_567)).toBe("");
    expect(wide(5)(1_234_567)).toBe("1.23M");
    expect(wide(4)(0)).toBe("");
  });
  it("stay inside their cells and their drawings", () => {
    const names = ["a", "b"];
    const { shapes } = heatScene(of([[-6.82, 6.82], [-1234.5, 0.01]]), { theme: "light", title: "", queries: names, keys: names, signed: true });
    const cell = shapes.flatMap((each) => (each.kind === "rect" && each.tip ? [each.w + 1] : []))[0];
    const written = shapes.flatMap((each) => (each.kind === "text" && each.size === 9 ? [each.text] : []));
    expect(written.length).toBe(4);
    for (const each of written) expect(wideness(each, 9)).toBeLessThan(cell);
    const [q, k] = [Float32Array.from([1e-5, 2e-5]), [Float32Array.from([-1e-5, -3.4e-5])]];
    const products = productsOf(q, k, Float32Array.from([-7.8e-10 / Math.sqrt(2)]), [1.23e-10]);
    if (!products) throw new Error("no products");
    const layout = layoutOf(products, 1000);
    const scene = productScene(products, layout, { theme: "light", title: "", query: "a", keys: ["b"] });
    for (const each of scene.shapes) if (each.kind === "text" && each.anchor === undefined) expect(each.x + wideness(each.text, each.size ?? 11)).toBeLessThan(scene.width);
  });
});

describe("words beside numbers", () => {
  it("writes nothing for exactly 0, and tells tiny numbers from it", () => {
    expect([0, 0.004, -0.004, 0.013, 0.5, 1, -0.25].map(cellText)).toEqual(["", "~0", "~0", ".01", ".50", "1.00", "−.25"]);
  });

  it("puts positions before tokens that come more than once", () => {
    expect(placed(["the", "cat", "the"])).toEqual(["0 the", "cat", "2 the"]);
  });

  it("has one name for a head", () => {
    expect([headName(1, 0), headName("1", 0), headName("decoder.1", 3), headName("", 3)]).toEqual(["L1H0", "L1H0", "decoder.1 H3", "H3"]);
    const of = (name: string, head: string) => ({ layers: [{ name, heads: [head] }] }) as unknown as Subject;
    expect(headTitle(of("layers.1", "L1H0"), 0, 0)).toBe("L1H0");
    expect(headTitle(of("decoder.1", "decoder.1 H0"), 0, 0)).toBe("decoder.1 H0");
    expect(headTitle(of("decoder.1.cross", "L1H0"), 0, 0)).toBe("decoder.1.cross H0");
    expect(headTitle(of("tiny-bert.1", "H3"), 0, 0)).toBe("tiny-bert.1 H3");
  });
});

describe("bars and charts", () => {
  it("fills a row at the number that is the whole alone", () => {
    const wide = (values: number[]) => barScene({ theme: "light", title: "", labels: ["a"], values, whole: 1 }).shapes.flatMap((each) => (each.kind === "rect" ? [each.w] : []))[0];
    expect(wide([0.22]) / wide([0.88])).toBeCloseTo(0.25);
    expect(wide([1])).toBeCloseTo(250);
  });

  it("gives long names of lines a row each, and cuts none", () => {
    const label = "a module with a long name, in the kernel materialized";
    const lines = [label, `${label} 2`].map((each) => ({ label: each, points: [[1, 1], [2, 2]] as [number, number][] }));
    const texts = chartScene(lines, { theme: "light", title: "", across: "length", unit: String }).shapes.flatMap((each) => (each.kind === "text" ? [each.text] : []));
    expect(texts).toContain(label);
    expect(texts).toContain(`${label} 2`);
  });
});

describe("the tour", () => {
  const tokens = ["<s>", "a", "b", "a"];
  it("rings the cells that each finding is about, of its head alone", () => {
    const rings = FINDINGS.map(({ head }, i) => ringed({ tour: String(i + 1) }, head, tokens, tokens));
    expect(rings[0]).toEqual([[1, 0], [2, 1], [3, 2]]);
    expect(rings[1]).toEqual([[1, 1], [2, 2], [3, 3]]);
    expect(rings[2]).toEqual([[3, 2]]);
    expect(rings[3]).toEqual([[1, 0], [2, 0], [3, 0]]);
    expect(ringed({ tour: "1" }, "L3H3", tokens, tokens)).toEqual([]);
    expect(ringed({}, "L0H0", tokens, tokens)).toEqual([]);
  });

  it("keeps how the page looks, and nothing else", () => {
    expect(addressOf(1, { theme: "dark", query: "3", sort: "entropy" })).toBe("#/head?head=0&layer=0&source=model%3Atiny&theme=dark&tour=1");
  });
});

it("numbers on a map of differences can be read at every point of its scale, in both themes", () => {
  const bytes = (css: string) => (css.match(/\d+/g) ?? []).map(Number);
  const linear = (byte: number) => (byte / 255 <= 0.04045 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (css: string) => bytes(css).reduce((sum, each, i) => sum + [0.2126, 0.7152, 0.0722][i] * linear(each), 0);
  for (const theme of ["light", "dark"] as const)
    for (let at = 0; at <= 1; at += 0.01) {
      const [one, other] = [SCALES.differences[theme].css[step(at)], onDifference(theme, at)].map(luminance);
      expect((Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)).toBeGreaterThan(3);
    }
});

describe("weights of either sign", () => {
  const signed = { ...of([[-4, 0], [1, -3]]), signed: true };
  it("have statistics of the shares |w| / Σ|w|", () => {
    const found = statistics(signed);
    expect(found.max_weight).toBeCloseTo((1 + 0.75) / 2);
    expect(found.own_position).toBeCloseTo((1 + 0.75) / 2);
    expect(found.entropy).toBeCloseTo(-(0.25 * Math.log(0.25) + 0.75 * Math.log(0.75)) / 2);
  });
  it("share the end of their scale by magnitude, also once they are pooled", () => {
    expect(largestShared(signed)).toBe(4);
    expect(pooled(signed)).toMatchObject({ data: Float32Array.from([-4]), signed: true });
    expect(whole(signed)).toMatchObject({ spread: { low: 0, high: 4 }, signed: true });
  });
  it("are drawn about zero, and as lines in the colours of the two ends", () => {
    const options = { theme: "light", title: "", queries: ["a", "b"], keys: ["a", "b"] } as const;
    const [first] = heatScene(signed, { ...options, queries: [...options.queries], keys: [...options.keys] }).shapes.filter(({ kind }) => kind === "rect");
    expect(first.fill).toBe(SCALES.differences.light.css[0]);
    const lines = lineScene([{ of: signed }], { ...options, queries: [...options.queries], keys: [...options.keys], least: 0.2 }).shapes.filter(({ kind }) => kind === "path");
    expect(lines.map(({ stroke }) => stroke)).toEqual([INKS.light.accent, INKS.light.second, INKS.light.accent]);
  });
});

describe("keys that a layer did not choose", () => {
  const chosen = { ...of([[1, 0], [0, 1]]), chosen: Uint8Array.from([1, 0, 1, 1]) };
  it("are drawn unlike a weight of zero, and named", () => {
    const { shapes } = heatScene(chosen, { theme: "light", title: "", queries: ["a", "b"], keys: ["a", "b"] });
    const cells = shapes.filter(({ kind, tip }) => kind === "rect" && tip !== undefined);
    expect(cells.map(({ fill }) => fill === INKS.light.faint)).toEqual([false, true, false, false]);
    expect(cells[1].tip).toContain("not chosen");
    expect(whole(chosen).chosen?.(0, 1)).toBe(false);
    expect(pooled(chosen).chosen).toEqual(Uint8Array.from([1]));
  });
  it("have the grey of the style sheet", () => {
    for (const theme of ["light", "dark"] as const) {
      const [r, g, b] = [UNCHOSEN[theme] & 255, (UNCHOSEN[theme] >> 8) & 255, (UNCHOSEN[theme] >> 16) & 255];
      expect(`#${[r, g, b].map((each) => each.toString(16).padStart(2, "0")).join("")}`).toBe(INKS[theme].faint);
    }
  });
});
