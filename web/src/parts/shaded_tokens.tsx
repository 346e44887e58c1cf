/** A text whose tokens are coloured by numbers: orange above 0 and blue below, or the darker the larger. */

import type { ComponentChildren } from "preact";
import { SCALES, colour, step } from "../drawing/colour";
import type { Theme } from "../drawing/colour";
import { usePage } from "../page/context";
import { precise } from "../numbers/format";

/** The background of a token, whose letters stay readable. */
export function paint(theme: Theme, value: number, most: number, signed: boolean): { background: string } {
  const share = value / (most || 1);
  return { background: signed ? SCALES.differences[theme].css[step(0.5 + share / 4)] : colour(theme, 0.35 * share) };
}

interface ShadedTokensProps {
  tokens: { name: string; value: number }[];
  /** The end of the colours. */
  most: number;
  signed: boolean;
  /** What follows the last token. */
  children?: ComponentChildren;
}

export function ShadedTokens({ tokens, most, signed, children }: ShadedTokensProps) {
  const { theme } = usePage();
  return <p class="generated dependence">{tokens.map(({ name, value }, i) => <span key={i} title={precise(value)} style={paint(theme, value, most, signed)}>{name}</span>)}{children}</p>;
}
