/** Work, memory and time of a whole model: of a text, and of a generation after it; and what fits into the memory. */

import type { ComponentChildren } from "preact";
import { call } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { chartScene } from "../../drawing/drawings";
import type { Line } from "../../drawing/drawings";
import { bytes, count, duration, whole } from "../../numbers/format";
import type { Scene } from "../../drawing/scene";
import { integer } from "../../page/state";
import type { Body } from "../../server/tensors";
import type { ModelComplexityReply, ModelInfo } from "../../server/types";
import { Commands, Drawing, Export, Field, ProblemBox, Table, Waiting } from "../../parts/ui";

const LENGTH = 512; // of the text at first, if the model reads so many tokens
const SIDE = 224; // pixels of an image at first
const POINTS = 8; // lengths that are asked, each twice the one before

interface Point {
  tokens: number;
  cost: ModelComplexityReply;
}

function charts(points: Point[], generated: number, theme: "light" | "dark"): Scene[] {
  const line = (label: string, read: (cost: ModelComplexityReply) => number, dashed = false): Line => ({ label, dashed, points: points.map(({ tokens, cost }): [number, number] => [tokens, read(cost)]) });
  const common = { theme, across: "tokens of the text" };
  const token = (read: (cost: ModelComplexityReply) => number) => (points[0].cost.per_token.flops ? [line("one new token", read, true)] : []);
  return [
    chartScene([line("the text", ({ prefill }) => prefill.flops), ...token(({ per_token }) => per_token.flops)], { ...common, title: "FLOPs of a pass", unit: count }),
    chartScene([line("peak of the pass", ({ prefill }) => prefill.peak_bytes), line("keys and values kept", ({ cache_bytes }) => cache_bytes, true)], { ...common, title: "Memory beside the model", unit: bytes, binary: true }),
    chartScene([line("the text", ({ prefill }) => prefill.predicted_ms), ...token(({ per_token }) => per_token.predicted_ms), ...(generated ? [line(`with ${whole(generated)} new tokens`, ({ total_ms }) => total_ms)] : [])], { ...common, title: "Predicted time", unit: duration }),
  ];
}

const COLUMNS = [
  { head: "tokens", header: true, number: true, cell: ({ tokens }: Point) => whole(tokens) },
  { head: "FLOPs", number: true, title: "of the pass over the text", cell: ({ cost }: Point) => count(cost.prefill.flops) },
  { head: "bytes moved", number: true, title: "the least that is read and written", cell: ({ cost }: Point) => bytes(cost.prefill.bytes) },
  { head: "peak", number: true, title: "memory beside the model", cell: ({ cost }: Point) => bytes(cost.prefill.peak_bytes) },
  { head: "kv cache", number: true, title: "keys and values after the last token", cell: ({ cost }: Point) => bytes(cost.cache_bytes) },
  { head: "text", number: true, title: "predicted time of the pass over the text", cell: ({ cost }: Point) => duration(cost.prefill.predicted_ms) },
  { head: "one new token", number: true, cell: ({ cost }: Point) => duration(cost.per_token.predicted_ms) },
  { head: "in all", number: true, title: "the text and all new tokens", cell: ({ cost }: Point) => duration(cost.total_ms) },
  { head: "sequences that fit", number: true, cell: ({ cost }: Point) => whole(cost.max_batch) },
];

export function ModelCost({ id, choice }: { id: string; choice: ComponentChildren }) {
  const { params, go, theme, models, announce } = usePage();
  const model: Pick<ModelInfo, "takes" | "generates"> = models?.find((each) => each.id === id) ?? { takes: ["text"], generates: true };
  const sees = model.takes.includes("images");
  const reads = model.takes.includes("text") || !sees; // a model that hears has frames and words in place of a text
  const generated = model.generates ? integer(params.new_tokens, 0, 0) : 0;
  const batch = integer(params.batch, 1, 1);
  const side = sees ? integer(params.side, reads ? 0 : SIDE, 0) : 0;
  const key = [models !== null, id, params.length, generated, batch, side, reads].join("\u0000");
  const { value, problem, busy } = useLoaded(key, async (signal) => {
    if (models === null) return null; // what it reads is not known yet
    const path = `v1/models/${encodeURIComponent(id)}/complexity`;
    const common: Body = { batch, ...(generated ? { new_tokens: generated } : {}), ...(side ? { images: [{ width: side, height: side }] } : {}) };
    const ask = (length: number) => call<ModelComplexityReply>("POST", path, { length, ...common }, signal);
    const one = await ask(1); // also loads the model
    const most = reads ? Math.max(1, one.max_length - generated) : 1;
    const length = integer(params.length, Math.min(LENGTH, most), 1, most);
    const lengths = [...new Set(Array.from({ length: POINTS }, (_, i) => Math.ceil(length / 2 ** (POINTS - 1 - i))))];
    const points = await Promise.all(lengths.map(async (tokens): Promise<Point> => ({ tokens, cost: tokens === 1 ? one : await ask(tokens) })));
    announce(`Costs of ${whole(length)} tokens.`);
    return { points, most, request: { method: "POST" as const, path, body: { length, ...common } } };
  });
  const last = value?.points.at(-1);
  const drawn = value && reads ? charts(value.points, generated, theme) : [];
  const number = (name: string, now: number, low: number, more = {}) => ({ type: "number" as const, min: low, value: now, set: (each: string) => go({ [name]: each }), ...more });
  return (
    <>
      <div class="fields">
        {choice}
        {reads && <Field label={model.takes.includes("text") ? "Tokens of the text" : "Tokens or frames"} param="length" {...number("length", last?.tokens ?? integer(params.length, LENGTH, 1), 1, value ? { max: value.most } : {})} />}
        {model.generates && <Field label="New tokens" param="new_tokens" {...number("new_tokens", generated, 0)} />}
        <Field label={reads ? "Batch" : "Batches"} param="batch" {...number("batch", batch, 1)} />
        {sees && <Field label="Side of the image" hint={reads ? "pixels; 0 for none" : "pixels"} param="images" {...number("side", side, reads ? 0 : 1)} />}
      </div>
      <ProblemBox problem={problem} />
      {!value && busy && <Waiting what={`Asking ${id} for its costs`} />}
      {value && last && (
        <div class="answer" aria-busy={busy}>
          <p>
            {id} has {count(last.cost.parameters)} parameters in {bytes(last.cost.parameter_bytes)}{reads && <> and keeps {bytes(last.cost.cache_bytes_per_token)} of keys and values for each token</>}.{" "}
            {last.cost.images && <>The image is {whole(last.cost.images[0].tokens)} tokens in {whole(last.cost.images[0].crops)} crops. </>}
            There is memory for <b>{whole(last.cost.max_batch)}</b> {reads ? `texts of ${whole(last.tokens)} tokens` : "batches"}{generated > 0 && `, each with ${whole(generated)} new tokens,`} at once.
            {reads && <> {batch === 1 ? "A text" : `Each of ${whole(batch)} texts`} may have at most <b>{whole(last.cost.max_length)}</b> tokens{generated > 0 && ", new tokens included"}.</>}
          </p>
          <div class="side">
            {drawn.map((scene, i) => (
              <div key={scene.title}>
                <Drawing scene={scene} fit />
                <Export of={{ name: `model-cost-${i}`, label: scene.title, scene: () => scene, rows: () => [["tokens", "flops", "peak bytes", "cache bytes", "ms", "ms of a new token", "ms in all"], ...value.points.map(({ tokens, cost }) => [tokens, cost.prefill.flops, cost.prefill.peak_bytes, cost.cache_bytes, cost.prefill.predicted_ms, cost.per_token.predicted_ms, cost.total_ms])], json: () => value.points }} />
              </div>
            ))}
          </div>
          <Table caption={`Cost of ${id}`} rows={reads ? value.points : [last]} columns={COLUMNS} />
          <Commands calls={[value.request]} />
        </div>
      )}
    </>
  );
}
