// The section "Recordings": opens a stored recording or a file, and shows the weights of one layer.

import { Problem, call, commands, showProblem } from "./api.js";
import { announce, el, facts } from "./dom.js";
import { bytes } from "./format.js";
import { headFigures } from "./heads.js";
import { openFile } from "./recording_file.js";

const MOST_CELLS = 400_000;
const form = document.getElementById("recordings-form");
const answer = document.getElementById("recordings-answer");
const fields = form.elements;
let opened = null; // {facts, names of tensors, heads(layer, first, last), command(layer, first, last)}
let listed = "";

const short = (text) => (text.length > 60 ? `${text.slice(0, 60)}…` : text);

/** List the stored recordings again. */
export async function refreshRecordings() {
  const { recordings } = await call("GET", "v1/recordings");
  if (listed === JSON.stringify(recordings)) return;
  listed = JSON.stringify(recordings);
  const chosen = fields.recording.value;
  const none = el("option", { value: "" }, recordings.length ? "choose one" : "none is stored");
  const choices = recordings.map((each) => el("option", { value: each.id }, `${each.model}: ${short(each.text)} (${bytes(each.bytes)})`));
  fields.recording.replaceChildren(none, ...choices);
  fields.recording.value = recordings.some((each) => each.id === chosen) ? chosen : "";
}

async function openStored(id) {
  const whole = `v1/recordings/${encodeURIComponent(id)}`;
  const path = (layer, first, last) => `${whole}?${new URLSearchParams({ layer, heads: `${first}:${last}` })}`;
  const described = await call("GET", whole);
  return {
    facts: described,
    names: described.tensors.map(({ name }) => name),
    heads: async (...part) => (await call("GET", path(...part))).value,
    command: (...part) => ["GET", path(...part)],
  };
}

async function openLocal(file) {
  try {
    const { facts: told, names, heads } = await openFile(file);
    return { facts: told, names, heads: (layer, first, last) => heads(`${layer}.weights`, first, last) };
  } catch (fault) {
    throw new Problem({ title: "This file cannot be opened", detail: fault.message });
  }
}

/** Return the tokens of an attention, as in `layers.0` or `decoder.0.cross`: `{queries, keys}`. */
function labels(layer) {
  const { tokens } = opened.facts;
  const [stack] = layer.split(".");
  return { queries: tokens[stack], keys: tokens[layer.endsWith(".cross") ? "encoder" : stack] };
}

async function show() {
  const layer = fields.layer.value;
  const axes = labels(layer);
  const { heads: names } = opened.facts.attentions.find(({ name }) => name === layer);
  const most = Math.max(1, Math.floor(MOST_CELLS / (axes.queries.length * axes.keys.length)));
  const first = Math.min(names.length - 1, Math.max(0, Math.trunc(Number(fields.head.value)) || 0));
  const last = Math.min(names.length, first + most);
  const weights = await opened.heads(layer, first, last);
  const { model, text, target, versions } = opened.facts;
  const told = [["model", model], ["text", text], target && ["target", target], ["heads", `${names[first]} to ${names[last - 1]} of ${names.length}`], ...Object.entries(versions)];
  const maps = headFigures(weights, axes, names.slice(first, last));
  const command = opened.command && commands(opened.command(layer, first, last));
  answer.replaceChildren(...[el("dl", { class: "facts" }, facts(told.filter(Boolean))), maps, command].filter(Boolean));
  announce(`${layer}: weights of ${weights.length} heads, ${axes.queries.length} queries by ${axes.keys.length} keys.`);
}

async function open(opening) {
  opened = await opening;
  const layers = opened.facts.attentions.map(({ name }) => name).filter((name) => opened.names.includes(`${name}.weights`));
  if (!layers.length) throw new Problem({ title: "Nothing to show", detail: "The recording holds no weights." });
  fields.layer.replaceChildren(...layers.map((name) => el("option", { value: name }, name)));
  form.querySelector("[data-opened]").hidden = false;
  await show();
}

/** Connect the form. */
export function startRecordings() {
  const attempt = (work) => work().catch((error) => showProblem(answer, error, form));
  const local = (file) => file && attempt(() => open(openLocal(file)));
  form.addEventListener("submit", (event) => event.preventDefault());
  fields.recording.addEventListener("focus", () => attempt(refreshRecordings));
  fields.recording.addEventListener("change", ({ target }) => target.value && attempt(() => open(openStored(target.value))));
  fields.file.addEventListener("change", ({ target }) => local(target.files[0]));
  for (const field of [fields.layer, fields.head]) field.addEventListener("change", () => attempt(show));
  form.addEventListener("dragover", (event) => event.preventDefault());
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    local(event.dataTransfer.files[0]);
  });
}
