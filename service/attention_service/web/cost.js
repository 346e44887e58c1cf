// The section "Cost": a sweep over the length, as two charts and a table.

import { Problem, call, commands, of, onSubmit } from "./api.js";
import { logChart } from "./chart.js";
import { announce, el, scroll, table } from "./dom.js";
import { bytes, count, milliseconds, real, whole } from "./format.js";
import { showOnly } from "./look.js";

const form = document.getElementById("cost-form");
const answer = document.getElementById("cost-answer");
const fields = form.elements;

function requestBody(target) {
  const values = fields.lengths.value.split(/[\s,]+/).filter(Boolean).map(Number);
  if (values.length < 2 || values.some((value) => !Number.isInteger(value) || value < 1)) {
    throw new Problem({ title: "Lengths", detail: "Expected two or more whole numbers, at least 1.", param: "sweep.values" });
  }
  values.sort((a, b) => a - b);
  const body = { shape: { batch: Number(fields.batch.value), queries: values[0] }, sweep: { dimension: "length", values } };
  if (target) return body;
  const raw = { num_heads: Number(fields.num_heads.value), head_dim: Number(fields.head_dim.value) };
  return { ...body, ...raw, ...(fields.causal.checked ? { spec: { masks: [{ name: "causal" }] } } : {}) };
}

function charts(costs) {
  const line = (label, read, style) => ({ label, style, points: costs.map((cost) => [cost.shape.queries, read(cost)]) });
  return el(
    "div",
    { class: "charts" },
    logChart("FLOPs of a forward pass", count, [
      line("all pairs", (cost) => cost.forward.dense.total, "one"),
      line("allowed pairs", (cost) => cost.forward.masked.total, "two"),
    ]),
    logChart("Peak memory", bytes, [
      line("materialized", (cost) => cost.peak_bytes.materialized, "one"),
      ...(costs[0].peak_bytes.fused === undefined ? [] : [line("fused", (cost) => cost.peak_bytes.fused, "two")]),
    ], 2),
    logChart("Predicted time of a forward pass", milliseconds, [
      line("median", (cost) => cost.predicted.forward.median_ms, "one"),
      line("19 of 20 take less", (cost) => cost.predicted.forward.high_ms, "two"),
    ]),
  );
}

const COLUMNS = [
  { head: "length", header: true, number: true, cell: (cost) => whole(cost.shape.queries) },
  { head: "pairs allowed", number: true, cell: (cost) => count(cost.allowed_pairs) },
  { head: "FLOPs", number: true, title: "forward, over the pairs that the masks allow", cell: (cost) => count(cost.forward.masked.total) },
  { head: "backward", number: true, title: "FLOPs of the gradients", cell: (cost) => count(cost.backward.masked.total) },
  { head: "fused", number: true, title: "peak bytes without the weights", cell: ({ peak_bytes: { fused } }) => (fused === undefined ? "–" : bytes(fused)) },
  { head: "materialized", number: true, title: "peak bytes with the whole of scores and weights", cell: (cost) => bytes(cost.peak_bytes.materialized) },
  { head: "kv cache", number: true, cell: (cost) => bytes(cost.kv_cache_bytes) },
  { head: "kernel", cell: (cost) => cost.kernel },
  { head: "predicted", number: true, cell: (cost) => milliseconds(cost.predicted_ms) },
  {
    head: "nine of ten",
    number: true,
    title: "between which times nine of ten runs should lie",
    cell: ({ predicted: { forward } }) => `${milliseconds(forward.low_ms)} – ${milliseconds(forward.high_ms)}`,
  },
];

function limitsText({ free_bytes: free, forward, gradients }) {
  const fits = ({ longest, largest_batch: batch }) =>
    `up to ${whole(longest.size)} tokens${longest.kernel ? ` (${longest.kernel})` : ""}, or ${whole(batch.size)} sequences of the first length`;
  return el(
    "p",
    {},
    `The free ${bytes(free)} hold `, el("b", {}, fits(forward)),
    gradients ? `; for gradients ${fits(gradients)}.` : ".",
  );
}

function growthText({ time_order: time, memory_order: memory, flops_exponent: flops, peak_bytes_exponent: peak, letters }) {
  const power = (exponent) => (exponent === undefined ? "nothing" : el("b", {}, "n", el("sup", {}, real(exponent, 2))));
  return el(
    "p",
    {},
    "Between the two largest lengths, work grows as ", power(flops), " and memory of the chosen kernel as ", power(peak),
    `; the asymptotic orders are ${time} and ${memory}. `,
    el("span", { class: "hint" }, Object.entries(letters).map(([letter, meaning]) => `${letter}: ${meaning}`).join("; ")),
  );
}

async function estimate() {
  const target = fields.target.value;
  const body = requestBody(target);
  const asked = ["POST", of(target, "complexity"), body];
  const reply = await call(...asked);
  const caption = "Cost by length";
  announce(`Costs of ${reply.costs.length} lengths.`);
  answer.replaceChildren(growthText(reply.growth), limitsText(reply.limits), charts(reply.costs), scroll(caption, table(caption, COLUMNS, reply.costs)), commands(asked));
}

/** Connect the form. */
export function startCost() {
  fields.target.addEventListener("change", () => {
    showOnly(form, fields.target.value);
    answer.replaceChildren();
  });
  showOnly(form, "");
  onSubmit(form, answer, estimate);
}
