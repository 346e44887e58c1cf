/** What the pointer or the cursor is at: a query, a key or both, and a head. All drawings of a view share it and mark it. */

import { createContext } from "preact";
import type { ComponentChildren } from "preact";
import { useContext, useEffect, useLayoutEffect, useMemo, useState } from "preact/hooks";

export interface Pointed {
  query: number | null;
  key: number | null;
  /** `layer/head` of the head, where a drawing of several heads was pointed at. */
  head?: string;
}

export const NOWHERE: Pointed = { query: null, key: null };

/** What is pointed at, and who hears of it. */
export class Pointing {
  now = NOWHERE;
  private readonly listeners = new Set<() => void>();

  set(next: Pointed): void {
    const { query, key, head } = this.now;
    if (next.query === query && next.key === key && next.head === head) return;
    this.now = next;
    for (const each of this.listeners) each();
  }

  /** Call a function at each change, until what this returns is called. */
  heard(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => void this.listeners.delete(listener);
  }
}

const Shared = createContext(new Pointing());

/** Let the drawings inside share what they are pointed at. */
export const SharePointed = ({ children }: { children: ComponentChildren }) => <Shared.Provider value={useMemo(() => new Pointing(), [])}>{children}</Shared.Provider>;

/** What the drawings of this view share; of a drawing `alone`, whose rows or columns are no tokens of the view, its own. */
export function usePointing(alone = false): Pointing {
  const shared = useContext(Shared);
  const own = useMemo(() => new Pointing(), []);
  return alone ? own : shared;
}

/** What is pointed at now, or a part of it; the component is drawn again when that changes. */
export function usePointed<T = Pointed>(pointing: Pointing, part: (now: Pointed) => T = (now) => now as T): T {
  const [now, set] = useState(() => part(pointing.now));
  useLayoutEffect(() => {
    const take = () => set(() => part(pointing.now));
    take();
    return pointing.heard(take);
  }, [pointing]);
  return now;
}

/** Point nowhere once these values change: other tokens have other places. */
export function useNowhere(...values: unknown[]): void {
  const pointing = usePointing();
  useEffect(() => () => pointing.set(NOWHERE), [pointing, ...values]);
}
