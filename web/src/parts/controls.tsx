/** The choices of a view, which fold to one line on a small screen. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";

/** Less than 960 pixels wide, as a laptop's screen is at 150 %, or less than 640 high. The style sheet has the same. */
const NARROW = matchMedia("(max-width: 60rem), (max-height: 40rem)");

export function useNarrow(): boolean {
  const [narrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const follow = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", follow);
    return () => NARROW.removeEventListener("change", follow);
  }, []);
  return narrow;
}

interface ControlsProps {
  /** What the line says while they are folded. */
  summary: string;
  class?: string;
  children: ComponentChildren;
}

export function Controls({ summary, class: kind, children }: ControlsProps) {
  const fields = <div class={kind ? `fields ${kind}` : "fields"}>{children}</div>;
  if (!useNarrow()) return fields;
  return <details class="controls"><summary>{summary}</summary>{fields}</details>;
}
