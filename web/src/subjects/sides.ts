/** Texts of two sides, one a line, to which a steering vector is fitted. */

import { textsOf } from "./survey";

export const POSITIONS: [string, string][] = [["last", "the last token"], ["mean", "the mean over the tokens"], ["answer", "the mean over an answer"]];
export const METHODS: [string, string][] = [["mean_difference", "difference of means"], ["pca", "first component of the differences of pairs"]];

export interface Sides {
  positive: string;
  negative: string;
  position: string;
  method: string;
}

export const FIRST_SIDES: Sides = { positive: "the park\nthe garden", negative: "the house\nthe school", position: "mean", method: "mean_difference" };

type SideTexts = string[] | { text: string; answer: string }[];

const CUT = "|"; // between a text and its answer
const LEAST_PAIRS = 2;

/** The texts of one side; with answers, each line is cut at its last `|`. */
function sideOf(lines: string, answers: boolean): SideTexts {
  if (!answers) return textsOf(lines);
  return lines.split(/\r?\n/).filter((line) => line.trim()).map((line) => {
    const at = line.lastIndexOf(CUT);
    return { text: line.slice(0, Math.max(0, at)).trim(), answer: at < 0 ? "" : line.slice(at + 1).trimEnd() };
  });
}

/** The texts of both sides as fields of a request, and what is still missing; an empty text if nothing is. */
export function readSides({ positive, negative, position, method }: Sides): { body: { positive: SideTexts; negative: SideTexts; position: string; method: string }; missing: string } {
  const answers = position === "answer";
  const [one, other] = [sideOf(positive, answers), sideOf(negative, answers)];
  const incomplete = [...one, ...other].some((each) => typeof each !== "string" && (!each.text || !each.answer));
  const missing =
    !one.length || !other.length ? "Write at least one text on each side."
    : incomplete ? "Write a text, | and its answer on each line."
    : method !== "pca" ? ""
    : one.length !== other.length ? `Pairs need as many texts on both sides: there are ${one.length} and ${other.length}.`
    : one.length < LEAST_PAIRS ? `Write at least ${LEAST_PAIRS} pairs.`
    : "";
  return { body: { positive: one, negative: other, position, method }, missing };
}
