// The section "Look": sends two requests, weights and forward, and shows pictures and tables.

import { Problem, call, commands, of, onSubmit } from "./api.js";
import { announce, el } from "./dom.js";
import { moduleNamed } from "./modules.js";
import { normal } from "./random.js";
import { headFigures } from "./heads.js";
import { outputTable, ranTable, statisticsTable } from "./results.js";

const MOST_TOKENS = 512;
const form = document.getElementById("look-form");
const answer = document.getElementById("look-answer");
const fields = form.elements;
let drawn = "";

/** Show the fields of the chosen target, which `data-only` names. */
export function showOnly(form, target) {
  for (const part of form.querySelectorAll("[data-only]")) part.hidden = (part.dataset.only === "module") !== Boolean(target);
}

const words = (text) => text.split(/[\s,]+/).filter(Boolean);

function randomize() {
  const module = moduleNamed(fields.target.value);
  if (!module) return;
  const labels = words(fields.labels.value);
  if (labels.length) fields.tokens.value = String(labels.length);
  const length = Math.min(MOST_TOKENS, Math.max(1, Math.trunc(Number(fields.tokens.value)) || 1));
  fields.tokens.value = String(length);
  const numbers = normal(length, module.config.d_model, Number(fields.seed.value) || 0);
  fields.query.value = `[${numbers.map((row) => `[${row.join(", ")}]`).join(",\n ")}]`;
  drawn = fields.query.value;
}

function targetChanged() {
  const module = moduleNamed(fields.target.value);
  showOnly(form, fields.target.value);
  answer.replaceChildren();
  if (!module) return;
  document.getElementById("query-hint").textContent = `tokens × ${module.config.d_model}, as nested lists; also used as key and value`;
  if (!fields.query.value.trim() || fields.query.value === drawn) randomize();
}

function parsed(field, param, what = param) {
  try {
    return JSON.parse(field.value);
  } catch (fault) {
    throw new Problem({ title: "This is not JSON", detail: `${what}: ${fault.message}`, param });
  }
}

function rawBody() {
  const body = { query: parsed(fields["raw-query"], "query"), key: parsed(fields["raw-key"], "key"), value: parsed(fields["raw-value"], "value") };
  const spec = { score: { name: fields.score.value } };
  if (fields.normalizer.value !== "softmax") spec.normalizer = { name: fields.normalizer.value };
  if (fields.causal.checked) spec.masks = [{ name: "causal" }];
  if (fields.num_heads.value) body.num_heads = Number(fields.num_heads.value);
  return { ...body, spec };
}

function requestBody(target) {
  const body = target ? { query: parsed(fields.query, "query") } : rawBody();
  if (!fields.further.value.trim()) return body;
  const further = parsed(fields.further, undefined, "further request fields");
  if (further?.spec && body.spec) further.spec = { ...body.spec, ...further.spec };
  return { ...body, ...further };
}

/** Return weights as `[sequence][head][query][key]`, for any dimensions of the request. */
function sequences(weights) {
  let value = weights;
  for (let depth = rank(weights); depth < 4; depth += 1) value = [value];
  return value;
}

const rank = (value) => (Array.isArray(value) ? 1 + (value.length ? rank(value[0]) : 0) : 0);

function inSequence(value, weightsRank, sequence) {
  if (weightsRank === 4) return value[sequence];
  return weightsRank === 2 ? [value] : value;
}

async function look() {
  const target = fields.target.value;
  const body = requestBody(target);
  const calls = [["POST", of(target, "weights"), body], ["POST", of(target, "forward"), body]];
  const [seen, made] = await Promise.all(calls.map((asked) => call(...asked)));
  const all = sequences(seen.weights);
  const depth = rank(seen.weights);
  const labels = { queries: words(fields.labels.value), keys: words(fields.key_labels.value) };
  if (!labels.keys.length) labels.keys = labels.queries;
  const shown = el("div", {});
  const show = (sequence) => {
    const statistics = Object.fromEntries(
      Object.entries(seen.statistics).map(([name, value]) => [name, inSequence(value, depth, sequence)]),
    );
    const output = depth === 4 ? made.output[sequence] : made.output;
    shown.replaceChildren(headFigures(all[sequence], labels), statisticsTable(statistics, seen.queries, sequence), outputTable(output, labels.queries));
  };
  announce(`Weights of ${all[0].length} heads, ${all[0][0].length} queries by ${all[0][0][0]?.length ?? 0} keys.`);
  const chooser = all.length > 1 && sequenceChooser(all.length, show);
  show(0);
  answer.replaceChildren(...[chooser, shown, ranTable({ weights: seen.ran, forward: made.ran }), commands(...calls)].filter(Boolean));
}

function sequenceChooser(many, show) {
  const options = Array.from({ length: many }, (_, i) => el("option", { value: i }, `${i + 1} of ${many}`));
  return el("label", { class: "chooser" }, "Sequence ", el("select", { onchange: (event) => show(Number(event.target.value)) }, options));
}

/** Offer the registered scores and normalizers. */
async function offerVariants() {
  const { variants } = await call("GET", "v1/variants");
  for (const [kind, first] of [["score", "scaled_dot"], ["normalizer", "softmax"]]) {
    const known = variants.filter((variant) => variant.kind === kind);
    if (!known.length) continue;
    fields[kind].replaceChildren(...known.map((v) => el("option", { value: v.name, title: v.summary, selected: v.name === first }, v.name)));
  }
}

/** Connect the form. `afterwards` runs after each answered request. */
export function startLook(afterwards) {
  fields.score.replaceChildren(...["scaled_dot", "dot"].map((name) => el("option", { value: name }, name)));
  fields.normalizer.replaceChildren(el("option", { value: "softmax" }, "softmax"));
  fields.target.addEventListener("change", targetChanged);
  fields.random.addEventListener("click", randomize);
  fields.tokens.addEventListener("change", randomize);
  showOnly(form, "");
  onSubmit(form, answer, async () => {
    await look();
    await afterwards();
  });
  offerVariants().catch(() => {});
}
