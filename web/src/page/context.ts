/** The page's shared context: its state and changes of it, the theme, and announcements for screen readers. */

import { createContext } from "preact";
import { useContext, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Theme } from "../drawing/colour";
import { NO_ANSWER, problemOf } from "../server/api";
import type { ProblemDocument } from "../server/api";
import type { Params, Patch } from "./state";
import type { ModelInfo, ModuleInfo, RecordingSummary } from "../server/types";

/** What a change leaves for undo: a step; one step for all that a slider passes; or none, since it replaces. */
export type Change = "step" | "slide" | "replace";

export interface Page {
  view: string;
  params: Params;
  theme: Theme;
  go: (patch: Patch, how?: Change) => void;
  /** Announce a text to screen readers. */
  announce: (text: string) => void;
  /** Whole models; null until they are known. */
  models: ModelInfo[] | null;
  /** Ask the server again for its whole models. */
  refreshModels: () => Promise<ModelInfo[]>;
  modules: ModuleInfo[];
  /** The modules are known. */
  listed: boolean;
  /** Recordings that the server stores. */
  recordings: RecordingSummary[];
  /** Ask the server again for its modules and recordings. */
  refresh: () => Promise<void>;
}

export const PageContext = createContext<Page | null>(null);

export function usePage(): Page {
  const page = useContext(PageContext);
  if (!page) throw new Error("no page");
  return page;
}

export interface Loaded<T> {
  /** The last value; while `busy`, that of an earlier key. */
  value: T | null;
  /** Why there is no value of this key. */
  problem: ProblemDocument | null;
  /** A newer value is under way. */
  busy: boolean;
}

const MOST_TRIALS = 3; // of a request that the server refused for now
const SLOW_MS = 500; // after which a problem that is tried again is no longer shown

/**
 * Run asynchronous work again whenever the key changes; where the server did not answer until it does, and a few times
 * where it refused for now. The last value stays until the next one is there. The signal aborts when nobody waits for
 * the work any more.
 */
export function useLoaded<T>(key: string, work: (signal: AbortSignal) => Promise<T>): Loaded<T> {
  const [loaded, setLoaded] = useState<Loaded<T> & { key: string }>({ key, value: null, problem: null, busy: true });
  const [trial, setTrial] = useState({ of: key, times: 0 });
  const newest = useRef(work);
  newest.current = work;
  useEffect(() => {
    let current = true;
    const ending = new AbortController();
    const times = trial.of === key ? trial.times : 0;
    let timer = setTimeout(() => setLoaded((old) => (old.problem ? { ...old, problem: null } : old)), SLOW_MS);
    const failed = (fault: unknown) => {
      if (!current) return;
      const problem = problemOf(fault);
      const retrying = problem.retry_s !== undefined && (problem.code === NO_ANSWER || times < MOST_TRIALS);
      clearTimeout(timer);
      setLoaded({ key, value: null, problem: { ...problem, retrying, again: () => setTrial({ of: key, times: 0 }) }, busy: false });
      if (retrying) timer = setTimeout(() => setTrial({ of: key, times: times + 1 }), 1000 * (problem.retry_s ?? 0));
    };
    const came = (value: T) => {
      clearTimeout(timer);
      if (current) setLoaded({ key, value, problem: null, busy: false });
    };
    setLoaded((old) => ({ ...old, busy: true }));
    newest.current(ending.signal).then(came, failed);
    return () => {
      current = false;
      ending.abort();
      clearTimeout(timer);
    };
  }, [key, trial]);
  const { value, problem, busy } = loaded;
  return loaded.key === key ? { value, problem, busy } : { value, problem: null, busy: true };
}

/** Take a click on a link in this page, unless it asks for another tab or window. */
export const follow = (take: () => void) => (event: MouseEvent) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  take();
};

/** Key presses that are meant for the page: those outside fields, and without Ctrl, Meta and Alt. */
export function isShortcut({ target, ctrlKey, metaKey, altKey }: KeyboardEvent): boolean {
  return !ctrlKey && !metaKey && !altKey && !(target instanceof HTMLElement && target.matches("input, select, textarea"));
}

/** `[` and `]` choose the head before and after this one, `{` and `}` the layer. `heads`: of each layer. */
export function useHeadKeys(heads: number[], layer: number, head: number): void {
  const { params, go } = usePage();
  useLayoutEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (!isShortcut(event) || params.shortcuts === "off") return;
      const nextHead = head + Number(event.key === "]") - Number(event.key === "[");
      const nextLayer = layer + Number(event.key === "}") - Number(event.key === "{");
      if (nextHead !== head && nextHead >= 0 && nextHead < heads[layer]) go({ layer, head: nextHead });
      if (nextLayer !== layer && nextLayer >= 0 && nextLayer < heads.length) go({ layer: nextLayer });
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [heads.join(), layer, head, params.shortcuts, go]);
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

/** The height of the screen in CSS pixels, as it changes; not by the bars that a phone's browser hides. */
export function useHeight(): number {
  const [height, setHeight] = useState(document.documentElement.clientHeight);
  useEffect(() => {
    const follow = () => setHeight(document.documentElement.clientHeight);
    follow();
    addEventListener("resize", follow);
    return () => removeEventListener("resize", follow);
  }, []);
  return height;
}

/** Correct parameters of the address that ask for what is not there, such as a layer 99, to what is shown. */
export function useCorrected(shown: Record<string, number>): void {
  const { params, go } = usePage();
  const wrong = Object.entries(shown).filter(([name, value]) => params[name] !== undefined && params[name] !== String(value));
  const patch = JSON.stringify(Object.fromEntries(wrong));
  useEffect(() => {
    if (patch !== "{}") go(JSON.parse(patch) as Patch, "replace");
  }, [patch, go]);
}
