/** Work, peak memory and time over the sequence length: of one attention, of two compared, or of a whole model. */

import type { ComponentChildren } from "preact";
import { Problem, call, of } from "../../server/api";
import { useLoaded, usePage } from "../../page/context";
import { chartScene } from "../../drawing/drawings";
import type { Line } from "../../drawing/drawings";
import { bytes, count, duration, real, whole } from "../../numbers/format";
import type { Scene } from "../../drawing/scene";
import { integer } from "../../page/state";
import type { Params } from "../../page/state";
import type { Body } from "../../server/tensors";
import type { ComplexityReply, Cost as Costs, Crossover } from "../../server/types";
import { Check, Choice, Commands, Drawing, Export, Faulty, Field, ProblemBox, Table, Waiting } from "../../parts/ui";
import { ModelCost } from "./model_cost";

const LENGTHS = "64 128 256 512 1024 2048 4096 8192";
const VARIANTS: [string, string, Body | null][] = [
  ["", "none", null],
  ["causal", "causal", { spec: { masks: [{ name: "causal" }] } }],
  ["window", "sliding window of 256", { spec: { masks: [{ name: "causal" }, { name: "sliding_window", left: 256 }] } }],
  ["mqa", "one key/value head", { num_kv_heads: 1 }],
  ["half", "float16", { dtype: "float16" }],
  ["materialized", "kernel materialized", { kernel: "materialized" }],
  ["linear", "linear attention", { spec: { method: { name: "linear" } } }],
];

/** Stands for raw attention in the address; no module has this name. */
const RAW = "-";
/** The beginning of what stands for a whole model, in the address and in a source. */
const MODEL = "model:";

/** What costs are asked of: a module, a whole model, or raw attention (""). By default the model that the page shows. */
export function costTarget({ cost, source }: Params): string {
  const chosen = cost ?? (source?.startsWith(MODEL) ? source : RAW);
  return chosen === RAW ? "" : chosen;
}

export function costBody(params: Params): { target: string; body: Body } {
  const target = costTarget(params);
  const values = (params.lengths ?? LENGTHS).split(/[\s,]+/).filter(Boolean).map(Number).sort((a, b) => a - b);
  if (values.length < 2 || values.some((value) => !Number.isInteger(value) || value < 1)) {
    throw new Problem({ title: "Lengths", detail: "Expected two or more whole numbers, at least 1.", param: "sweep.values" });
  }
  const body: Body = { shape: { batch: integer(params.batch, 1, 1), queries: values[0] }, sweep: { dimension: "length", values } };
  const variant = VARIANTS.find(([name]) => name === (params.against ?? ""))?.[2];
  if (variant) body.compare = [{ label: VARIANTS.find(([name]) => name === params.against)?.[1], ...variant }];
  if (target) return { target, body };
  Object.assign(body, { num_heads: integer(params.num_heads, 8, 1), head_dim: integer(params.head_dim, 64, 1) });
  if (params.cost_causal) body.spec = { masks: [{ name: "causal" }] };
  return { target, body };
}

type Read = (cost: Costs) => number | null | undefined;

const line = (label: string, costs: Costs[], read: Read, dashed = false): Line => ({
  label,
  dashed,
  points: costs.map((cost): [number, number] => [cost.shape.queries, read(cost) ?? 0]),
});

function charts(reply: ComplexityReply, theme: "light" | "dark"): Scene[] {
  const { costs, compared = [], crossovers = [] } = reply;
  const marks = (kind: Crossover["of"]) => crossovers.filter((each) => each.of === kind && each.at !== null).map((each) => ({ x: each.at ?? 0, label: `${each.cheaper ?? ""} from ${whole(each.at ?? 0)}` }));
  const common = { theme, across: "length, tokens" };
  const timed = (label: string, list: Costs[], dashed = false): Line => ({
    ...line(label, list, (cost) => cost.predicted.forward.median_ms, dashed),
    band: list.map((cost) => [cost.shape.queries, cost.predicted.forward.low_ms, cost.predicted.forward.high_ms]),
  });
  if (compared.length > 1) {
    const each = (read: Read) => compared.map(({ label, costs: list }, i) => line(label, list, read, i > 0));
    return [
      chartScene(each((cost) => cost.executed_flops), { ...common, title: "FLOPs of a forward pass", unit: count, marks: marks("flops") }),
      chartScene(each((cost) => cost.peak_bytes.request), { ...common, title: "Peak memory", unit: bytes, binary: true, marks: marks("peak_bytes") }),
      chartScene(compared.map(({ label, costs: list }, i) => timed(label, list, i > 0)), { ...common, title: "Predicted time, nine of ten runs", unit: duration, marks: marks("time") }),
    ];
  }
  return [
    chartScene([line("all pairs", costs, (cost) => cost.forward.dense.total), line("allowed pairs", costs, (cost) => cost.forward.masked.total, true)], { ...common, title: "FLOPs of a forward pass", unit: count }),
    chartScene([line("materialized", costs, (cost) => cost.peak_bytes.materialized), ...(costs[0].peak_bytes.fused ? [line("fused", costs, (cost) => cost.peak_bytes.fused, true)] : [])], { ...common, title: "Peak memory", unit: bytes, binary: true }),
    chartScene([timed("median; the band holds nine of ten runs", costs)], { ...common, title: "Predicted time of a forward pass", unit: duration }),
  ];
}

const COLUMNS = [
  { head: "length", header: true, number: true, cell: (cost: Costs) => whole(cost.shape.queries) },
  { head: "pairs allowed", number: true, cell: (cost: Costs) => count(cost.allowed_pairs) },
  { head: "FLOPs", number: true, title: "forward, over the pairs that the masks allow", cell: (cost: Costs) => count(cost.forward.masked.total) },
  { head: "backward", number: true, title: "FLOPs of the gradients", cell: (cost: Costs) => count(cost.backward.masked.total) },
  { head: "fused", number: true, title: "peak bytes without the weights", cell: ({ peak_bytes: { fused } }: Costs) => bytes(fused) },
  { head: "materialized", number: true, title: "peak bytes with the whole of scores and weights", cell: (cost: Costs) => bytes(cost.peak_bytes.materialized) },
  { head: "kv cache", number: true, cell: (cost: Costs) => bytes(cost.kv_cache_bytes) },
  { head: "kernel", cell: (cost: Costs) => cost.kernel },
  { head: "predicted", number: true, cell: (cost: Costs) => duration(cost.predicted_ms) },
  { head: "nine of ten", number: true, title: "between which times nine of ten runs should lie", cell: ({ predicted: { forward } }: Costs) => `${duration(forward.low_ms)} – ${duration(forward.high_ms)}` },
];

function Limits({ limits: { free_bytes: free, forward, gradients } }: ComplexityReply) {
  const fits = ({ longest, largest_batch: batch }: typeof forward) =>
    `up to ${whole(longest.size)} tokens${longest.kernel ? ` (${longest.kernel})` : ""}, or ${whole(batch.size)} sequences of the first length`;
  return <p>The free memory, {bytes(free)}, is enough for <b>{fits(forward)}</b>{gradients ? `; for gradients ${fits(gradients)}.` : "."}</p>;
}

function Growth({ growth: { time_order: time, memory_order: memory, flops_exponent: flops, peak_bytes_exponent: peak, letters } }: ComplexityReply) {
  const power = (exponent: number | null | undefined) => (exponent === undefined || exponent === null ? "nothing" : <b>n<sup>{real(exponent, 2)}</sup></b>);
  return (
    <p>
      Between the two largest lengths, work grows as {power(flops)} and memory of the chosen kernel as {power(peak)}; the asymptotic orders are {time} and {memory}.{" "}
      <span class="hint">{Object.entries(letters).map(([letter, meaning]) => `${letter}: ${meaning}`).join("; ")}</span>
    </p>
  );
}

export function Cost() {
  const { params, go, modules, models } = usePage();
  const target = costTarget(params);
  const options = [
    [RAW, "raw attention"],
    ...(models ?? []).filter(({ refused }) => !refused).map(({ id, architecture }) => [MODEL + id, `${id} · whole model${architecture ? `, ${architecture}` : ""}`]),
    ...modules.map((each) => [each.name, `${each.name} · ${each.config.d_model} wide, ${each.config.num_heads} heads`]),
  ] as [string, string][];
  const known = options.some(([name]) => name === (target || RAW));
  const choice = <Choice wide label="Cost of" value={target || RAW} set={(cost) => go({ cost })} options={known ? options : [[target, target.replace(MODEL, "")], ...options]} />;
  return target.startsWith(MODEL) ? <ModelCost key={target} id={target.slice(MODEL.length)} choice={choice} /> : <AttentionCost target={target} choice={choice} />;
}

function AttentionCost({ target, choice }: { target: string; choice: ComponentChildren }) {
  const { params, go, theme, announce } = usePage();
  const relevant = ["lengths", "batch", "num_heads", "head_dim", "cost_causal", "against"].map((name) => params[name] ?? "").concat(target).join("\u0000");
  const { value, problem, busy } = useLoaded(relevant, async () => {
    const { target, body } = costBody(params);
    const path = of(target, "complexity");
    const reply = await call<ComplexityReply>("POST", path, body);
    announce(`Costs of ${reply.costs.length} lengths.`);
    return { reply, request: { method: "POST" as const, path, body } };
  });
  const drawn = value ? charts(value.reply, theme) : [];
  const power = (name: string, otherwise: number, most: number) => {
    const now = integer(params[name], otherwise, 1);
    return { type: "range" as const, min: 0, max: most, step: 1, value: Math.round(Math.log2(now)), hint: String(now), live: true, set: (each: string) => go({ [name]: 2 ** Number(each) }, "slide") };
  };
  const lengths = (params.lengths ?? LENGTHS).split(/[\s,]+/).filter(Boolean);
  const longest = Math.round(Math.log2(Number(lengths.at(-1)) || 8192));
  return (
    <Faulty problem={problem}>
      <form onSubmit={(event) => event.preventDefault()}>
        <div class="fields">
          {choice}
          <Choice label="Compare with" value={params.against ?? ""} set={(against) => go({ against })} options={VARIANTS.map(([name, label]) => [name, label])} />
          {!target && <Check label="Causal" value={Boolean(params.cost_causal)} set={(each) => go({ cost_causal: each ? "1" : "" })} />}
        </div>
        <div class="fields">
          {!target && <Field label="Heads h" param="num_heads" {...power("num_heads", 8, 7)} />}
          {!target && <Field label="Head width d" param="head_dim" {...power("head_dim", 64, 9)} />}
          <Field label="Batch" param="shape.batch" {...power("batch", 1, 10)} />
          <Field label="Longest n" type="range" min={8} max={20} step={1} value={longest} hint={whole(2 ** longest)} live set={(each) => go({ lengths: Array.from({ length: 8 }, (_, i) => 2 ** Math.max(0, Number(each) - 7 + i)).join(" ") }, "slide")} />
          <Field wide label="Lengths" value={params.lengths ?? LENGTHS} param="sweep.values" set={(each) => go({ lengths: each })} />
        </div>
      </form>
      <ProblemBox problem={problem} />
      {!value && busy && <Waiting what="Asking the server for the costs" />}
      {value && (
        <div class="answer" aria-busy={busy}>
          <Growth {...value.reply} />
          <Limits {...value.reply} />
          {(value.reply.crossovers ?? []).length > 0 && <Table caption="Crossovers" rows={value.reply.crossovers ?? []} columns={[
            { head: "of", header: true, cell: (each) => each.of.replace("_", " ") },
            { head: "between", cell: (each) => each.between.join(" and ") },
            { head: "cheaper in the end", cell: (each) => each.cheaper ?? "the same" },
            { head: "from length", number: true, cell: (each) => (each.at === null ? (each.cheaper ? "always" : "—") : whole(each.at)) },
            { head: "perhaps from", number: true, cell: (each) => (each.low === null ? "—" : whole(each.low)) },
            { head: "surely from", number: true, cell: (each) => (each.high === null ? "—" : whole(each.high)) },
          ]} />}
          <div class="side">
            {drawn.map((scene, i) => (
              <div key={scene.title}>
                <Drawing scene={scene} fit />
                <Export of={{ name: `cost-${i}`, label: scene.title, scene: () => scene, rows: () => [["length", "flops", "peak bytes", "median ms", "low ms", "high ms"], ...value.reply.costs.map((cost) => [cost.shape.queries, cost.forward.masked.total, cost.peak_bytes.request, cost.predicted.forward.median_ms, cost.predicted.forward.low_ms, cost.predicted.forward.high_ms])], json: () => value.reply }} />
              </div>
            ))}
          </div>
          <Table caption={`Cost by length, on ${value.reply.device_name}`} rows={value.reply.costs} columns={COLUMNS} />
          <Commands calls={[value.request]} />
        </div>
      )}
    </Faulty>
  );
}
