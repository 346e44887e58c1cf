/** More models: a few of the Hugging Face hub and a free field, the fetch with its progress, then the model itself. */

import { useEffect, useRef, useState } from "preact/hooks";
import { call, problemOf } from "../server/api";
import type { ProblemDocument } from "../server/api";
import { useLoaded, usePage } from "../page/context";
import { bytes } from "../numbers/format";
import type { CheckpointInfo, FetchProgress, HubInfo, ServerInfo } from "../server/types";
import { Button, Choice, Faulty, Field, ProblemBox } from "./ui";

interface Fetch {
  repository: string;
  progress: FetchProgress | null;
  stop: AbortController;
}

const REPORTS_S = 1; // seconds between two reports of a fetch

/** `loaded` gets the name of the model once its checkpoint is there. */
export function MoreModels({ loaded }: { loaded: (id: string) => void }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="more models" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>More models</summary>
      {open && <Offered loaded={loaded} />}
    </details>
  );
}

function Offered({ loaded }: { loaded: (id: string) => void }) {
  const { value: info, problem } = useLoaded("", () => call<ServerInfo>("GET", "v1"));
  if (!info) return <ProblemBox problem={problem} />;
  const { hub } = info;
  return hub.problem ? <p class="small">{hub.problem[0].toUpperCase() + hub.problem.slice(1)}.</p> : <Fetching hub={hub} loaded={loaded} />;
}

function Fetching({ hub, loaded }: { hub: HubInfo; loaded: (id: string) => void }) {
  const { announce, refreshModels } = usePage();
  const [chosen, choose] = useState(hub.models[0]?.repository ?? "");
  const [other, write] = useState("");
  const [fetch, setFetch] = useState<Fetch | null>(null);
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const newest = useRef<Fetch | null>(null);
  newest.current = fetch;

  const begin = async (repository: string) => {
    const now: Fetch = { repository, progress: null, stop: new AbortController() };
    const revision = hub.models.find((each) => each.repository === repository)?.revision;
    setFetch(now);
    setProblem(null);
    try {
      const body = { repository, wait_s: REPORTS_S, ...(revision && { revision }) };
      let found = await call<CheckpointInfo>("POST", "v1/checkpoints", body, now.stop.signal);
      while (found.fetch) {
        const progress = found.fetch;
        setFetch({ ...now, progress });
        found = await call<CheckpointInfo>("POST", "v1/checkpoints", body, now.stop.signal);
      }
      announce(`Fetched ${repository}.`);
      const model = (await refreshModels()).find(({ checkpoint }) => checkpoint === repository);
      loaded(model?.id ?? repository); // the server says why there is no model of it
    } catch (fault) {
      if (!now.stop.signal.aborted) setProblem(problemOf(fault));
    }
    setFetch(null);
  };
  const cancel = ({ repository, stop }: Fetch) => {
    stop.abort();
    const path = repository.split("/").map(encodeURIComponent).join("/");
    void call("DELETE", `v1/checkpoints/${path}`).catch(() => undefined); // it is there already
  };
  useEffect(() => {
    if (hub.fetching[0]) void begin(hub.fetching[0]); // begun before the page was loaded
    return () => newest.current?.stop.abort(); // the server goes on
  }, []);

  if (fetch) {
    const { bytes: came = 0, total_bytes: total } = fetch.progress ?? {};
    return (
      <div class="fields">
        <progress {...(total ? { value: came / total } : {})} max={1} aria-label={`Fetching ${fetch.repository}`} />
        <span>{fetch.repository}: {total ? `${bytes(came)} of ${bytes(total)}` : "the hub is asked"}</span>
        <Button onClick={() => cancel(fetch)}>Cancel</Button>
      </div>
    );
  }
  const repository = (chosen || other).trim();
  return (
    <Faulty problem={problem}>
      <form class="fields" onSubmit={(event) => { event.preventDefault(); void begin(repository); }}>
        <Choice wide label="From the Hugging Face hub" value={chosen} set={choose}
          options={[...hub.models.map((each): [string, string] => [each.repository, `${each.repository}: ${each.about} · ${bytes(each.bytes)} · ${each.license}`]), ["", "another repository"]]} />
        {!chosen && <Field label="Repository" param="repository" value={other} live set={write} placeholder="org/model" />}
        <button type="submit" disabled={!repository}>Fetch and load</button>
      </form>
      <ProblemBox problem={problem} />
    </Faulty>
  );
}
