/** Colours of heads in one drawing: six that differ by normal and by colour-blind eyes, then the same with dashes. */

import type { Theme } from "./colour";

/** The contrast with the paper is at least 3. Every two are 0.24 apart in OKLab, and 0.12 as eyes without one kind of cones see them. */
export const HEAD_COLOURS: Record<Theme, readonly string[]> = {
  light: ["#1949c5", "#e44919", "#1e3603", "#499688", "#86155c", "#ba66e9"],
  dark: ["#457cfd", "#fe8160", "#057918", "#cef034", "#b02e9a", "#55d7f6"],
};

const DASHES: readonly number[][] = [[], [6, 3], [2, 3], [9, 3, 2, 3]];

/** How the lines of a head of a layer are drawn. The 24 first heads differ. */
export function headStroke(theme: Theme, head: number): { ink: string; dash: number[] } {
  const colours = HEAD_COLOURS[theme];
  return { ink: colours[head % colours.length], dash: DASHES[Math.floor(head / colours.length) % DASHES.length] };
}
