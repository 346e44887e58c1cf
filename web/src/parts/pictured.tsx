/** A picture and its facts: one above the other, and side by side on a wide screen. */

import type { ComponentChildren } from "preact";

interface PicturedProps {
  picture: ComponentChildren;
  /** The columns of cells of the picture, where they need less than its half of the screen. */
  columns?: number;
  /** Facts that stand above the picture on a narrow screen. */
  first?: ComponentChildren;
  children: ComponentChildren;
}

const CELL = 44; // the widest cell of a map
const LABELS = 200; // beside the cells
const LEAST = 420;

export const Pictured = ({ picture, columns, first, children }: PicturedProps) => (
  <div class="pictured" style={columns ? { "--picture": `${Math.max(LEAST, columns * CELL + LABELS)}px` } : {}}>
    {first && <div class="told">{first}</div>}
    <div class="picture">{picture}</div>
    <div class="told">{children}</div>
  </div>
);
