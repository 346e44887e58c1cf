import { describe, expect, it } from "vitest";
import { continuationOf, parting } from "../src/subjects/continuations";
import { FIRST_SIDES, readSides } from "../src/subjects/sides";

const said = (tokens: string[]) => continuationOf({ finish_reason: "length", logprobs: { tokens, token_logprobs: tokens.map(() => -1), top_logprobs: tokens.map((token) => ({ other: -2, [token]: -1 })) } });

describe("continuations", () => {
  it("are read alike from completions and from chats", () => {
    const chat = continuationOf({ finish_reason: "length", logprobs: { content: [{ token: "a", logprob: -1, top_logprobs: [{ token: "other", logprob: -2 }, { token: "a", logprob: -1 }] }] } });
    expect(chat).toEqual(said(["a"]));
    expect(chat.tokens[0].likeliest).toEqual([["a", -1], ["other", -2]]);
  });
  it("have the scores and the reason of a probe that ended them", () => {
    const stopped = { probe: "p", score: 3, token: 0 };
    const made = continuationOf({ finish_reason: "stop", stop_reason: stopped, attention: [{ scores: { p: 3 } }], logprobs: { tokens: ["a"], token_logprobs: [-1] } });
    expect([made.stopped, made.tokens[0].scores, made.finish]).toEqual([stopped, { p: 3 }, "stop"]);
  });
  it("part at the first token in which they differ, or where one goes on", () => {
    expect([parting(said(["a", "b"]), said(["a", "c"])), parting(said(["a"]), said(["a", "c"])), parting(said(["a", "c"]), said(["a"])), parting(said(["a"]), said(["a"]))]).toEqual([1, 1, 1, null]);
  });
});

describe("texts of two sides", () => {
  const of = (positive: string, negative: string, position = "last", method = "mean_difference") => readSides({ positive, negative, position, method });
  it("are one a line", () => {
    expect(readSides(FIRST_SIDES)).toEqual({ missing: "", body: { ...FIRST_SIDES, positive: ["the park", "the garden"], negative: ["the house", "the school"] } });
  });
  it("have their answers behind the last stroke, with the space before them", () => {
    expect(of("a | b is | c\n", "d|e", "answer")).toEqual({ missing: "", body: { positive: [{ text: "a | b is", answer: " c" }], negative: [{ text: "d", answer: "e" }], position: "answer", method: "mean_difference" } });
  });
  it("tell what is missing", () => {
    expect([of("", "a"), of("a", "b", "answer"), of("a\nb", "c", "last", "pca"), of("a", "c", "last", "pca")].map(({ missing }) => missing)).toEqual([
      "Write at least one text on each side.", "Write a text, | and its answer on each line.", "Pairs need as many texts on both sides: there are 2 and 1.", "Write at least 2 pairs."]);
  });
});
