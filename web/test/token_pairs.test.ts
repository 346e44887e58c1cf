import { describe, expect, it } from "vitest";
import { linking, readPairs, textLayers, writePairs } from "../src/subjects/token_pairs";

describe("pairs of tokens", () => {
  it("come back from their text, each once", () => {
    expect(readPairs("3-7, 10 → 12\n3-7;")).toEqual({ pairs: [[3, 7], [10, 12]], fault: "" });
    expect(readPairs(writePairs([[3, 7], [1, 1]])).pairs).toEqual([[3, 7], [1, 1]]);
  });
  it("tell the first fault", () => {
    expect([readPairs("3-7, 4", 9).fault, readPairs("3-9", 9).fault, readPairs("-1", 9).pairs]).toEqual(["“4” is no pair: write the numbers of a query and a key, as in 3-7.", "There is no token 9: the last one is 8.", []]);
  });
});

describe("heads that link pairs", () => {
  const pairs = (share: number[], first: number[]) => ({ pairs: { share, first } });
  it("are ranked over all layers", () => {
    const heads = linking({ layers: [{ layer: 0, statistics: pairs([0.1, 0.3], [1, 0]) }, { layer: "encoder.1", statistics: pairs([0.2], [0.5]) }] }, "share");
    expect(heads.map(({ name, row, values }) => [name, row, values.first])).toEqual([["L0H1", 0, 0], ["encoder.1 H0", 1, 0.5], ["L0H0", 0, 1]]);
  });
  it("are those of layers that read the text", () => {
    const of = (...names: (string | number)[]) => textLayers({ layers: names.map((layer) => ({ layer, heads: 1 })) });
    expect([of(0, 1), of("vision.0", 0), of("encoder.0", "decoder.0", "cross.0")]).toEqual([null, [0], ["encoder.0"]]);
  });
});
