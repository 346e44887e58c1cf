/** The page: header, views, the state in the URL, undo, keys and theme. */

import type { FunctionComponent, TargetedKeyboardEvent } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { NO_ANSWER, call, loadScript, problemOf } from "./server/api";
import type { Theme } from "./drawing/colour";
import { PageContext, follow, isShortcut, useLoaded } from "./page/context";
import type { Change, Page } from "./page/context";
import { whole } from "./numbers/format";
import { mostTokens } from "./page/limits";
import { keep, keptOf } from "./page/kept";
import { FIRST, changed, format, parse } from "./page/state";
import type { Patch, State } from "./page/state";
import { RECORDED } from "./server/recorded";
import { DEFAULT_RECORDING } from "./subjects/subject";
import { SharePointed } from "./drawing/pointed";
import { TourStrip } from "./parts/tour_strip";
import type { ModelInfo, ModuleInfo, RecordingSummary } from "./server/types";
import { Button, ProblemBox, Saving, Waiting } from "./parts/ui";
import { Overview } from "./views/look/overview";
import { WithSubject } from "./parts/with_subject";
import type { OfSubject } from "./parts/with_subject";
import type { Needs } from "./subjects/model_subject";

type Plain = FunctionComponent;

/** The views by what one wants of them. */
const GROUPS = ["Look", "Change", "Explain", "Cost", "Server"] as const;

interface View {
  id: string;
  group: (typeof GROUPS)[number];
  title: string;
  about: string;
  key: string;
  /** Loaded when it is first shown. */
  plain?: () => Promise<Plain>;
  subject?: () => Promise<OfSubject>;
  /** What it asks of a whole model at once: the weights, unless it has a question of its own. */
  needs?: Needs;
}

const VIEWS: View[] = [
  { id: "overview", group: "Look", title: "Overview", key: "o", about: "Every head of every layer. Sort by a statistic to find the heads worth a look.", subject: () => Promise.resolve(Overview) },
  { id: "head", group: "Look", title: "Head", key: "h", about: "The weights of one head. A row is a query and a column is a key.", subject: async () => (await import("./views/look/head")).Head },
  { id: "query", group: "Look", title: "Query", key: "q", about: "One query step by step: scores, mask, weights, and the weighted sum of the values.", subject: async () => (await import("./views/look/query")).Query },
  { id: "compare", group: "Look", title: "Compare", key: "p", about: "Two heads, modules or recordings side by side, and their difference.", subject: async () => (await import("./views/look/compare")).Compare },
  { id: "find", group: "Look", title: "Find heads", key: "n", about: "All heads of a model by what they do in many texts, and the passages in which one is strongest.", plain: async () => (await import("./views/look/find")).Find },
  { id: "text", group: "Look", title: "Text", key: "t", about: "Choose what to look at: a text or a chat, a recording, a module, or your own q, k and v.", plain: async () => (await import("./views/look/text")).Text },
  { id: "edit", group: "Change", title: "Edit", key: "e", about: "Knock out heads, tokens and cells, or change temperature and mask, and see the change of the output.", needs: "tokens", subject: async () => (await import("./views/change/edit")).Edit },
  { id: "effects", group: "Change", title: "Effects", key: "f", about: "Which head matters most: each head, query or key knocked out in turn, and the change of the prediction or of the output.", needs: "tokens", subject: async () => (await import("./views/change/effects")).Effects },
  { id: "decode", group: "Change", title: "Decode", key: "d", about: "The next token of a text, the tokens as they come, and what each head looked at for each of them.", plain: async () => (await import("./views/change/decode")).Decode },
  { id: "steer", group: "Change", title: "Steer", key: "v", about: "A text continued with a steering vector and without it, side by side. Vectors are fitted to texts of two sides.", plain: async () => (await import("./views/change/steer")).Steer },
  { id: "gradient", group: "Explain", title: "Gradient", key: "g", about: "Which weights matter to L: exact gradients from the server.", needs: "tokens", subject: async () => (await import("./views/explain/gradient")).Gradient },
  { id: "lens", group: "Explain", title: "Lens", key: "i", about: "What each layer would predict at each token if it were read out at once, and what each head adds.", needs: "tokens", subject: async () => (await import("./views/explain/lens")).Lens },
  { id: "probe", group: "Explain", title: "Probe", key: "b", about: "What the states of each layer tell: linear probes fitted to labelled texts, and their score at each token.", plain: async () => (await import("./views/explain/probe")).Probe },
  { id: "context", group: "Explain", title: "Context", key: "x", about: "Which sentences of a prompt made each sentence of an answer.", plain: async () => (await import("./views/explain/context")).Context },
  { id: "similarity", group: "Explain", title: "Similarity", key: "a", about: "How alike two texts are to a model, and which words make them so.", plain: async () => (await import("./views/explain/similarity")).Similarity },
  { id: "rollout", group: "Explain", title: "Rollout", key: "r", about: "From which tokens a state comes, over several layers.", subject: async () => (await import("./views/explain/rollout")).Rollout },
  { id: "circuits", group: "Explain", title: "Circuits", key: "s", about: "What the projections of each head compute together, whatever the tokens are.", plain: async () => (await import("./views/explain/circuits")).Circuits },
  { id: "tour", group: "Explain", title: "Tour", key: "u", about: "Five findings in the model that ships, each a click away.", plain: async () => (await import("./views/explain/tour")).Tour },
  { id: "learn", group: "Explain", title: "Learn", key: "l", about: "The formulas of the attention at hand, with its numbers.", subject: async () => (await import("./views/explain/learn")).Learn },
  { id: "cost", group: "Cost", title: "Cost", key: "c", about: "Work, peak memory and time over the sequence length. The server uses the same estimate to choose a kernel and to admit a request.", plain: async () => (await import("./views/cost/cost")).Cost },
  { id: "model", group: "Server", title: "Model", key: "m", about: "The server, its checkpoints, modules and sessions.", plain: async () => (await import("./views/server/model")).Model },
];

/** The views that are offered: at an exported page those that were recorded. Another address is shown too, and what it asks says that it was not recorded. */
const OFFERED = VIEWS.filter(({ id }) => RECORDED?.includes(id) ?? true);

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function useTheme(chosen: string | undefined): Theme {
  const [dark, setDark] = useState(systemDark.matches);
  useEffect(() => {
    const follow = () => setDark(systemDark.matches);
    systemDark.addEventListener("change", follow);
    return () => systemDark.removeEventListener("change", follow);
  }, []);
  const theme = chosen === "dark" || chosen === "light" ? chosen : dark ? "dark" : "light";
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  return theme;
}

/** The steps of this page in the browser's history: `depth` can be undone, and up to `furthest` can be redone. */
interface Steps {
  depth: number;
  furthest: number;
}
const FURTHEST = "furthest step"; // kept by the browser for this tab: a reload keeps what can be redone

/** What was listed, or the same as before where nothing of it changed. */
const newer = <T,>(listed: T) => (old: T) => (JSON.stringify(old) === JSON.stringify(listed) ? old : listed);

const depthOf = () => (history.state as { depth?: number } | null)?.depth;

/** Where the page stands in its steps. An entry that the browser made, for a link or a typed address, is a new step. */
function stepsOf(before: Steps | null): Steps {
  const known = depthOf();
  const depth = known ?? (before ? before.depth + 1 : 0);
  if (known === undefined) history.replaceState({ depth }, "");
  const furthest = known === undefined ? depth : Math.max(depth, before?.furthest ?? Number(keptOf(FURTHEST)));
  keep(FURTHEST, furthest);
  return { depth, furthest };
}

/** Milliseconds within which changes of the same parameters, as a slider makes them, are one step. */
const ONE_STEP = 1000;

/** What is shown first: the model that ships with the server; without transformers, a recording. */
function firstSource(models: ModelInfo[] | null): string {
  if (!models) return "";
  return models.some(({ id, refused }) => id === "tiny" && !refused) ? "model:tiny" : DEFAULT_RECORDING;
}

export function App() {
  const [state, setState] = useState(() => parse(location.hash));
  const [modules, setModules] = useState<ModuleInfo[] | null>(null);
  const [recordings, setRecordings] = useState<RecordingSummary[]>([]);
  const [models, setModels] = useState<ModelInfo[] | null>(null);
  const [health, setHealth] = useState("connecting…");
  const [announcement, announce] = useState("");
  const [{ depth, furthest }, setSteps] = useState(() => stepsOf(null));
  const newest = useRef(state);
  newest.current = state;
  const writing = useRef<ReturnType<typeof setTimeout>>(undefined);
  const slid = useRef({ names: "", at: 0 });
  const theme = useTheme(state.params.theme);

  useEffect(() => {
    const read = () => {
      clearTimeout(writing.current);
      slid.current.names = "";
      newest.current = parse(location.hash);
      setState(newest.current);
      setSteps(stepsOf);
    };
    addEventListener("popstate", read);
    addEventListener("hashchange", read);
    return () => {
      removeEventListener("popstate", read);
      removeEventListener("hashchange", read);
    };
  }, []);

  const go = useCallback((patch: Patch, how: Change = "step") => {
    const next = changed(newest.current, patch);
    if (format(next) === format(newest.current)) return;
    const names = how === "slide" ? Object.keys(patch).join() : "";
    const same = names !== "" && names === slid.current.names && Date.now() - slid.current.at < ONE_STEP;
    const before = format(newest.current);
    newest.current = next;
    clearTimeout(writing.current);
    const write = () => {
      history.replaceState(history.state, "", format(newest.current));
      writing.current = undefined;
    };
    // Browsers refuse many changes of the URL in a short time.
    if (how === "replace" || same) writing.current = setTimeout(write, 200);
    else {
      if (writing.current) history.replaceState(history.state, "", before); // what still waited to be written
      const depth = (depthOf() ?? 0) + 1;
      history.pushState({ depth }, "", format(next));
      keep(FURTHEST, depth);
      setSteps({ depth, furthest: depth });
      writing.current = undefined;
    }
    if (how !== "replace") slid.current = { names, at: Date.now() };
    setState(next);
  }, []);

  const refresh = useCallback(async () => {
    setModules(newer<ModuleInfo[] | null>((await call<{ modules: ModuleInfo[] }>("GET", "v1/modules")).modules));
    setRecordings(newer((await call<{ recordings: RecordingSummary[] }>("GET", "v1/recordings")).recordings));
  }, []);

  const refreshModels = useCallback(async () => {
    const { data } = await call<{ data: ModelInfo[] }>("GET", "v1/models");
    setModels(newer<ModelInfo[] | null>(data));
    return data;
  }, []);

  useEffect(() => {
    let away = true; // this page, or the server: models may have come and gone meanwhile
    const look = async () => {
      if (document.hidden) {
        away = true;
        return;
      }
      if (away) {
        refreshModels().catch((fault: unknown) => {
          if (problemOf(fault).retry_s === undefined) setModels((old) => old ?? []);
          else away = true;
        });
      }
      away = false;
      try {
        setHealth((await call<{ status: string }>("GET", "health/ready")).status);
        await refresh();
      } catch (fault) {
        away = true;
        setHealth((problemOf(fault).code ?? NO_ANSWER).replaceAll("_", " "));
      }
    };
    const now = () => void look();
    now();
    const timer = setInterval(now, 5000);
    document.addEventListener("visibilitychange", now);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", now);
    };
  }, [refresh, refreshModels]);

  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const inField = event.target instanceof HTMLElement && event.target.matches("input, select, textarea");
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !inField) {
        event.preventDefault();
        if (event.shiftKey) history.forward();
        else if (depthOf()) history.back();
      }
      const view = isShortcut(event) && newest.current.params.shortcuts !== "off" && OFFERED.find(({ key }) => key === event.key);
      if (view) go({ view: view.id });
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [go]);

  const page: Page = useMemo(
    () => ({ view: state.view, params: { ...state.params, source: state.params.source ?? firstSource(models) }, theme, go, announce, modules: modules ?? [], listed: modules !== null, recordings, refresh, models, refreshModels }),
    [state, theme, go, modules, recordings, refresh, models, refreshModels],
  );
  const known = VIEWS.find(({ id }) => id === state.view);
  useEffect(() => {
    if (!known) go({ view: FIRST.view }, "replace");
  }, [known, go]);
  const view = known ?? VIEWS.find(({ id }) => id === FIRST.view);
  if (!view) return null;
  const most = mostTokens(view.id, models?.find(({ id }) => page.params.source === `model:${id}`));
  const embedded = state.params.embed === "true"; // in another page: the view alone
  return (
    <PageContext.Provider value={page}>
      {!embedded && <a class="skip" href="#main" onClick={skip}>Skip to the map</a>}
      {!embedded && <header class="page">
        <div class="title">
          <h1>Attention service</h1>
          <p class="what"><a href={format({ view: "tour", params: state.params })} onClick={follow(() => go({ view: "tour" }))}>Tour<i> of five findings</i></a></p>
        </div>
        <div class="tools">
          <p class="health" data-state={health} role="status">{health}</p>
          <Button class="quiet" title="Ctrl+Z" disabled={depth === 0} onClick={() => history.back()}>Undo</Button>
          <Button class="quiet" title="Ctrl+Shift+Z" disabled={depth >= furthest} onClick={() => history.forward()}>Redo</Button>
          <Button class="quiet" onClick={() => go({ theme: theme === "dark" ? "light" : "dark" })}>{theme === "dark" ? "Light" : "Dark"}</Button>
          <Documents />
        </div>
        <Views view={view} state={state} go={go} />
      </header>}
      <TourStrip />
      <main id="main" tabIndex={-1}>
        <Saving key={view.id} intro={<><h2>{view.title}</h2><p>{view.about}{most ? ` Texts of at most ${whole(most)} tokens.` : ""}</p></>}>
          <SharePointed>
            {view.subject && !page.params.source ? <Waiting what="Asking the server for its models" /> : view.subject ? <WithSubject load={view.subject} needs={view.needs ?? "weights"} /> : view.plain && <Loaded load={view.plain} />}
          </SharePointed>
        </Saving>
      </main>
      {embedded ? <p class="small"><a href={format({ view: view.id, params: { ...state.params, embed: undefined } })} target="_blank" rel="noreferrer">{view.title} on the whole page</a></p> : <footer>
        <p class="documents small"><Documents /></p>
        <details>
          <summary>Keys</summary>
          <p class="small">{OFFERED.map(({ title, key }) => `${key} ${title}`).join(" · ")} · [ and ] head · {"{ and }"} layer · Ctrl+Z undo</p>
          <label class="check"><input type="checkbox" checked={state.params.shortcuts !== "off"} onChange={(event) => go({ shortcuts: event.currentTarget.checked ? "" : "off" })} /> Letters choose a view</label>
        </details>
      </footer>}
      <p class="hidden" role="status">{announcement}</p>
    </PageContext.Provider>
  );
}

/** What the first map of a view can be: a heat map, small maps, a grid of readings, or heads in a scatter. */
const MAPS = ".stage canvas, .multiples a, .lens button, .scatter g[tabindex='0']";

/** Go to the first map of the view, past everything that stands above it; to the view where it has none. */
function skip(event: MouseEvent): void {
  event.preventDefault();
  const main = document.getElementById("main");
  (main?.querySelector<HTMLElement>(MAPS) ?? main)?.focus();
}

/** What a server tells about itself. */
const Documents = () => RECORDED ? null : <><a href="docs">API docs</a> <a href="openapi.json">OpenAPI</a> <a href="metrics">Metrics</a></>;

/** The way of an arrow key through the rows of links. */
const ARROWS: Partial<Record<string, [number, number]>> = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

interface ViewsProps {
  view: View;
  state: State;
  go: Page["go"];
}

/** Two rows of links: the groups, each to the view of it that was open last, and the views of the group at hand. */
function Views({ view, state, go }: ViewsProps) {
  const rows = useRef<HTMLElement>(null);
  const last = useRef<Partial<Record<string, string>>>({});
  last.current[view.group] = view.id;
  const move = (event: TargetedKeyboardEvent<HTMLElement>) => {
    const way = ARROWS[event.key];
    if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
    const links = Array.from(rows.current?.querySelectorAll("ul") ?? [], (each) => Array.from(each.querySelectorAll("a")));
    const row = links.findIndex((each) => each.some((link) => link === document.activeElement));
    const next = way[0] ? links[row + way[0]]?.find((link) => link.ariaCurrent) : links[row]?.at((links[row].findIndex((link) => link === document.activeElement) + way[1]) % links[row].length);
    event.preventDefault();
    next?.focus();
  };
  const link = (to: View, text: string, current: "page" | "true" | undefined, title: string) => (
    <li key={text}><a href={format({ view: to.id, params: state.params })} title={title} aria-current={current}
      onClick={follow(() => go({ view: to.id }))}>{text}</a></li>
  );
  const hint = ({ about, key, id }: View) => `${about}${mostTokens(id) ? ` Texts of at most ${whole(mostTokens(id) ?? 0)} tokens.` : ""} Key ${key}`;
  const of = (group: string) => OFFERED.filter((each) => each.group === group);
  const groups = GROUPS.filter((group) => of(group).length);
  return (
    <nav ref={rows} aria-label="Views" onKeyDown={move}>
      <ul class="groups">{groups.map((group) => link(of(group).find(({ id }) => id === last.current[group]) ?? of(group)[0], group, group !== view.group ? undefined : of(group).length > 1 ? "true" : "page", of(group).map(({ title }) => title).join(", ")))}</ul>
      {of(view.group).length > 1 && <ul aria-label={view.group}>{of(view.group).map((each) => link(each, each.title, each === view ? "page" : undefined, hint(each)))}</ul>}
    </nav>
  );
}

function Loaded({ load }: { load: () => Promise<Plain> }) {
  const { value, problem } = useLoaded("", async () => ({ Component: await loadScript(load) }));
  return value ? <value.Component /> : problem ? <ProblemBox problem={problem} /> : <Waiting what="Loading this view" />;
}
