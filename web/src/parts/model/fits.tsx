/** What a model has had fitted to texts: lenses, steering vectors and probes, listed, fitted with their progress, and removed. */

import { useEffect, useRef, useState } from "preact/hooks";
import { call } from "../../server/api";
import type { ApiRequest, ProblemDocument } from "../../server/api";
import type { Body } from "../../server/tensors";
import { useLoaded } from "../../page/context";
import { short } from "../../numbers/format";
import { Remover, useWork } from "../work";
import { Button } from "../ui";

const ONE = { lenses: "lens", vectors: "vector", probes: "probe" } as const;
export type FitKind = keyof typeof ONE;

/** The path of one. */
const PATHS: Record<FitKind, (id: string) => string> = {
  lenses: (id) => `v1/lenses/${id}`,
  vectors: (id) => `v1/vectors/${id}`,
  probes: (id) => `v1/probes/${id}`,
};

/** The fields that every fit has. */
export interface Fit {
  id: string;
  state: "fitting" | "ready";
  progress: number;
}

export interface Fits<T extends Fit> {
  all: T[];
  ready: T[];
  /** They are known. */
  listed: boolean;
  /** Why they cannot be listed. */
  unlisted: ProblemDocument | null;
  busy: boolean;
  problem: ProblemDocument | null;
  done: ReturnType<typeof useWork>["done"];
  /** Fit one; `then` takes it, and says what was done. */
  fit: (body: Body, then: (made: T) => string) => void;
  /** Stop the fit of one, or remove it. */
  end: (id: string) => void;
}

const REPORTS_S = 1; // seconds between two reports of a fit

/** The fits of a model. `ended` is told which one was stopped or removed. */
export function useFits<T extends Fit>(model: string, kind: FitKind, ended: (id: string) => void): Fits<T> {
  const [round, ask] = useState(0);
  const { busy, problem, done, run } = useWork();
  const path = `v1/models/${encodeURIComponent(model)}/${kind}`;
  const { value, problem: unlisted } = useLoaded(`${model}/${round}`, (signal) => call<Record<FitKind, T[]>>("GET", path, undefined, signal));
  const all = value?.[kind] ?? [];
  const fitting = busy || all.some(({ state }) => state === "fitting");
  useEffect(() => {
    if (!fitting) return;
    const timer = setInterval(() => ask((times) => times + 1), 1000 * REPORTS_S);
    return () => clearInterval(timer);
  }, [fitting]);
  const stopped = useRef("");
  const remove = async (id: string) => {
    const request: ApiRequest = { method: "DELETE", path: PATHS[kind](id) };
    stopped.current = id;
    await call(request.method, request.path);
    ask((times) => times + 1);
    ended(id);
    return { text: `Deleted the ${ONE[kind]}.`, request };
  };
  return {
    all, listed: value !== null, unlisted, busy, problem, done,
    ready: all.filter(({ state }) => state === "ready"),
    fit: (body, then) => run(async () => {
      const request: ApiRequest = { method: "POST", path, body };
      const isStopped = (of: T | null) => of !== null && stopped.current === of.id;
      let made: T | null = null;
      stopped.current = "";
      try {
        // One that was stopped between two reports is not asked for again, which would begin it anew.
        do made = await call<T>("POST", path, { ...body, wait_s: made ? REPORTS_S : 0 });
        while (made.state === "fitting" && !isStopped(made));
      } catch (fault) {
        if (!isStopped(made)) throw fault;
      } finally {
        ask((times) => times + 1);
      }
      if (made === null || isStopped(made)) return { text: "Stopped the fit.", request: { method: "DELETE", path: PATHS[kind](stopped.current) } };
      return { text: then(made), request };
    }),
    // A fit that is stopped is awaited by `fit`, which tells of it.
    end: (id) => (all.some((each) => each.id === id && each.state === "fitting") ? void remove(id).catch(() => undefined) : run(() => remove(id))),
  };
}

/** The state of one, with the progress of its fit. */
export const FitState = ({ of }: { of: Fit }) => of.state === "ready" ? <>ready</> : <span class="actions"><progress value={of.progress} max={1} aria-label={`Fitting ${short(of.id)}`} /> {Math.round(100 * of.progress)} %</span>;

interface FitActionsProps {
  of: Fit;
  /** What choosing it is called. */
  word: string;
  chosen: boolean;
  choose: () => void;
  end: (id: string) => void;
}

/** Choose one, remove it, or stop its fit. */
export const FitActions = ({ of, word, chosen, choose, end }: FitActionsProps) => (
  <span class="actions">
    {of.state === "fitting" ? <Button class="quiet" aria-label={`Stop the fit of ${short(of.id)}`} onClick={() => end(of.id)}>Stop</Button> : <>
      <Button class="quiet" aria-label={`${word} ${short(of.id)}`} disabled={chosen} onClick={choose}>{word.split(" ")[0]}</Button>
      <Remover name={short(of.id)} remove={() => end(of.id)} />
    </>}
  </span>
);
