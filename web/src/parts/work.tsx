/** Requests that change the server: run one at a time, told, and asked once more where they remove something. */

import { useState } from "preact/hooks";
import { usePage } from "../page/context";
import { problemOf } from "../server/api";
import type { ApiRequest, ProblemDocument } from "../server/api";
import { Button, Commands, ProblemBox } from "./ui";

interface Done {
  text: string;
  request: ApiRequest;
}

/** Run requests one at a time, and keep what they did or their problem. */
export function useWork() {
  const { announce } = usePage();
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [done, setDone] = useState<Done | null>(null);
  const run = async (work: () => Promise<Done>) => {
    if (busy) return;
    setBusy(true);
    setProblem(null);
    try {
      const made = await work();
      setDone(made);
      announce(made.text);
    } catch (fault) {
      setProblem(problemOf(fault));
    } finally {
      setBusy(false);
    }
  };
  return { busy, problem, done, run: (work: () => Promise<Done>) => void run(work) };
}

/** What the last request did, or its problem. */
export function Answer({ problem, done }: { problem: ProblemDocument | null; done: Done | null }) {
  return (
    <div class="answer">
      <ProblemBox problem={problem} />
      {done && <><p>{done.text}</p><Commands calls={[done.request]} /></>}
    </div>
  );
}

/** A button that asks once more before it acts. */
export function Remover({ name, remove, word = "Delete" }: { name: string; remove: () => void; word?: string }) {
  const [sure, setSure] = useState(false);
  return (
    <Button class="quiet danger" aria-label={sure ? `Really ${word.toLowerCase()} ${name}?` : `${word} ${name}`} onBlur={() => setSure(false)}
      onClick={() => { if (sure) remove(); setSure(!sure); }}>{sure ? "Really?" : word}</Button>
  );
}
