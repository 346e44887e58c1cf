/** Tokens coloured by a number of each, which is read where the pointer or the focus is. */

import type { ComponentChildren, TargetedKeyboardEvent } from "preact";
import { usePage } from "../../page/context";
import { paint } from "../shaded_tokens";

export interface ReadToken {
  name: string;
  /** Its number, for the colour; NaN for none. */
  value: number;
  /** What is read of it. */
  said: string;
  /** The part that it plays: `query` or `key` of a pair. */
  mark?: string | undefined;
}

interface ReadTokensProps {
  label: string;
  tokens: ReadToken[];
  /** The number from which on colours are the last one. */
  most: number;
  signed?: boolean;
  /** The token that is read; also that of another row. */
  at: number | null;
  read: (at: number) => void;
  /** Called with a token that was clicked. */
  pick?: (at: number) => void;
  /** What follows the last token. */
  children?: ComponentChildren;
}

const WAYS: Partial<Record<string, number>> = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

/** A row of tokens. Arrow keys go from one to the next. */
export function ReadTokens({ label, tokens, most, signed = false, at, read, pick, children }: ReadTokensProps) {
  const { theme } = usePage();
  const last = tokens.length - 1;
  const stop = Math.min(at ?? 0, last); // where Tab comes in
  const shown = at === null ? undefined : tokens.at(at);
  const move = (event: TargetedKeyboardEvent<HTMLElement>) => {
    const way = WAYS[event.key];
    if (way === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.currentTarget.querySelectorAll("button")[Math.min(last, Math.max(0, stop + way))].focus();
  };
  const background = (value: number) => (Number.isFinite(value) ? paint(theme, Math.min(most, Math.max(-most, value)), most, signed) : {});
  return (
    <div class="read">
      <div class="generated" role="group" aria-label={label} onKeyDown={move}>
        {tokens.map(({ name, value, said, mark }, i) => (
          <button key={i} type="button" tabIndex={i === stop ? 0 : -1} class={[i === at && "at", mark].filter(Boolean).join(" ") || undefined} style={background(value)} aria-label={`${name}: ${said}`}
            onPointerEnter={() => read(i)} onFocus={() => read(i)} onClick={pick && (() => pick(i))}>{name}</button>
        ))}
        {children}
      </div>
      <p class="readout" aria-hidden="true">{shown ? <><b>{shown.name}</b><span>{shown.said}</span></> : at === null ? "Point at a token." : ""}</p>
    </div>
  );
}
