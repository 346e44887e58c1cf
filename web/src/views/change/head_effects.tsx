/** The effect of each head of a layer on one token that a whole model chose: its log-probability without the head. */

import { useState } from "preact/hooks";
import { callTensors } from "../../server/api";
import type { ApiRequest } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { barScene } from "../../drawing/drawings";
import { noHead } from "../../subjects/edits";
import type { Edit } from "../../subjects/edits";
import { effect, precise, real, settled } from "../../numbers/format";
import type { Body } from "../../server/tensors";
import { Commands, Drawing, Export, ProblemBox, Table } from "../../parts/ui";

interface HeadEffectsProps {
  model: string;
  layerRef: string;
  /** The names of the layer's heads. */
  heads: string[];
  /** The tokens before the one that was chosen. */
  tokens: number[];
  edits: Record<string, Edit[]>;
  chosen: { id: number; name: string; logprob: number };
}

/** log p of a token by the logits of its place. */
function logProbability(logits: Float32Array, id: number): number {
  const most = logits.reduce((best, each) => Math.max(best, each), -Infinity);
  return logits[id] - most - Math.log(logits.reduce((sum, each) => sum + Math.exp(each - most), 0));
}

const KEPT = 512;
/** log p without a head, by request. */
const known = new Map<string, number>();

export function HeadEffects({ model, layerRef, heads, tokens, edits, chosen }: HeadEffectsProps) {
  const { theme } = usePage();
  const [done, setDone] = useState(0);
  const path = `v1/models/${encodeURIComponent(model)}/forward`;
  const requestOf = (head: number): ApiRequest & { body: Body } => ({ method: "POST", path, body: { tokens, edits: { ...edits, [layerRef]: [...(edits[layerRef] ?? []), noHead(head)] }, return: ["logits"], top_k: 0 } });
  const key = JSON.stringify([model, layerRef, tokens, edits, chosen.id]);
  const { value, problem } = useLoaded(key, async (signal) => {
    const without: number[] = [];
    for (let head = 0; head < heads.length; head += 1) {
      setDone(head);
      const { body } = requestOf(head);
      const name = JSON.stringify([model, body, chosen.id]);
      const found = known.get(name) ?? logProbability((await callTensors(path, body, signal)).tensors.logits.data, chosen.id);
      if (known.size > KEPT) known.clear();
      known.set(name, found);
      without.push(found);
    }
    return { key, without };
  });
  if (problem) return <ProblemBox problem={problem} />;
  if (value?.key !== key) return <div class="fields" role="status"><progress value={done} max={heads.length} aria-label="Heads that were knocked out" /><span>{done} of {heads.length} heads</span></div>;
  const title = `change of log p(${chosen.name}) without a head`;
  const changes = value.without.map((each) => settled(each - chosen.logprob));
  return (
    <>
      <p class="small">Each head of layer {layerRef} adds nothing in turn, in all passes up to this token; log p is {real(chosen.logprob)} with all that are not knocked out above. A token that a head helps loses log p without it.</p>
      <Export of={{ name: "head_effects", label: title, scene: () => barScene({ theme, title, labels: heads, values: changes, signed: true }), rows: () => [["head", "log p without", "change"], ...heads.map((each, i) => [each, value.without[i], changes[i]])], json: () => ({ request: requestOf(0).body, token: chosen, heads, without: value.without, changes }) }} />
      <div class="side">
        <Drawing fit scene={barScene({ theme, title, labels: heads, values: changes, signed: true, written: effect })} />
        <Table caption={title} rows={heads} columns={[
          { head: "head", header: true, cell: (each) => each },
          { head: "log p without", number: true, cell: (_, i) => real(value.without[i]) },
          { head: "probability without", number: true, cell: (_, i) => precise(Math.exp(value.without[i]), 3) },
          { head: "change", number: true, cell: (_, i) => effect(changes[i]) },
        ]} />
      </div>
      <Commands calls={[requestOf(0)]} />
    </>
  );
}
