/** The page's shared context: its state and changes of it, the theme, and announcements for screen readers. */

import { createContext } from "preact";
import { useContext, useEffect, useRef, useState } from "preact/hooks";
import type { Theme } from "./colour";
import { problemOf } from "./api";
import type { ProblemDocument } from "./api";
import type { Patch } from "./state";
import type { Params, Subject } from "./subject";
import type { ModelInfo, ModuleInfo } from "./types";

export interface Page {
  view: string;
  params: Params;
  theme: Theme;
  /** Change the state; a change that replaces leaves no step for undo. */
  go: (patch: Patch, replace?: boolean) => void;
  /** Announce a text to screen readers. */
  announce: (text: string) => void;
  /** Whole models; null until they are known. */
  models: ModelInfo[] | null;
  /** Ask the server again for its whole models. */
  refreshModels: () => Promise<void>;
  modules: ModuleInfo[];
  /** Ask the server again for its modules. */
  refresh: () => Promise<void>;
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (!page) throw new Error("no page");
  return page;
}

export interface Loaded<T> {
  value: T | null;
  problem: ProblemDocument | null;
  /** A newer value is under way. */
  busy: boolean;
}

/** Run asynchronous work again whenever the key changes. The last value stays until the next one is there. */
export function useLoaded<T>(key: string, work: () => Promise<T>): Loaded<T> {
  const [loaded, setLoaded] = useState<Loaded<T>>({ value: null, problem: null, busy: true });
  const newest = useRef(work);
  newest.current = work;
  useEffect(() => {
    let current = true;
    setLoaded((old) => ({ ...old, busy: true }));
    newest.current().then(
      (value) => current && setLoaded({ value, problem: null, busy: false }),
      (fault: unknown) => current && setLoaded({ value: null, problem: problemOf(fault), busy: false }),
    );
    return () => {
      current = false;
    };
  }, [key]);
  return loaded;
}

/** The width of an element in CSS pixels, as it changes. */
export function useWidth(): [{ current: HTMLDivElement | null }, number] {
  const place = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const observer = new ResizeObserver(([{ contentRect }]) => setWidth(Math.floor(contentRect.width)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [place, width];
}

/** What views of a subject get. */
export interface SubjectProps {
  subject: Subject;
  layer: number;
  head: number;
}
