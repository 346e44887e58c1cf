// The section "Modules": a table of resident modules, with forms to create and to delete one.

import { call, commands, onSubmit, showProblem } from "./api.js";
import { announce, el, table } from "./dom.js";
import { bytes, describe, short, whole } from "./format.js";

const place = document.getElementById("module-table");
const answer = document.getElementById("modules-answer");
const form = document.getElementById("create");
let modules = [];

/** Return the module of this name from the latest list. */
export const moduleNamed = (name) => modules.find((module) => module.name === name);

/** List the modules again, and update every selection of modules. */
export async function refreshModules() {
  modules = (await call("GET", "v1/modules")).modules;
  const listed = modules.length ? table("Resident modules", COLUMNS, modules) : EMPTY;
  place.replaceChildren(listed);
  for (const select of document.querySelectorAll("select[name=target]")) offer(select);
}

const EMPTY = el("p", { class: "empty" }, "No module is resident. Create one below, or use raw attention.");

function offer(select) {
  const before = select.value;
  select.replaceChildren(
    el("option", { value: "" }, "raw attention: your own q, k and v"),
    ...modules.map((module) => el("option", { value: module.name }, `${module.name} · ${module.config.d_model} wide, ${module.config.num_heads} heads`)),
  );
  select.value = moduleNamed(before) ? before : "";
  if (select.value !== before) select.dispatchEvent(new Event("change"));
}

/** Choose a module in a section. */
function choose(section, name) {
  const select = document.querySelector(`#${section} select[name=target]`);
  select.value = name;
  select.dispatchEvent(new Event("change"));
  return select;
}

function goTo(section, name) {
  const select = choose(section, name);
  document.getElementById(section).scrollIntoView();
  select.focus({ preventScroll: true });
}

const heads = ({ num_heads: all, num_kv_heads: kv }) => (kv && kv !== all ? `${all} / ${kv}` : String(all));
const source = (from) => (from ? `${from.checkpoint}, layer ${from.layer}${from.part === "cross" ? ", cross" : ""}` : "created here");

const COLUMNS = [
  { head: "name", header: true, cell: (m) => m.name },
  { head: "d_model", number: true, cell: (m) => String(m.config.d_model) },
  { head: "heads", number: true, title: "query heads, and key/value heads where they are fewer", cell: (m) => heads(m.config) },
  { head: "computes", cell: (m) => describe(m.config.spec) },
  { head: "version", cell: (m) => el("code", { title: m.version }, short(m.version)) },
  { head: "device", cell: (m) => m.device },
  { head: "bytes", number: true, cell: (m) => bytes(m.bytes) },
  { head: "source", cell: (m) => source(m.source) },
  { head: el("span", { class: "hidden" }, "actions"), cell: actions },
];

function actions(module) {
  const go = (section, text) =>
    el("button", { type: "button", class: "quiet", "aria-label": `${text} at ${module.name}`, onclick: () => goTo(section, module.name) }, text);
  return el("span", { class: "actions" }, go("look", "Look"), go("cost", "Cost"), remover(module));
}

function remover(module) {
  const button = el("button", { type: "button", class: "quiet danger", "aria-label": `Delete ${module.name}` }, "Delete");
  const rest = () => {
    button.textContent = "Delete";
    delete button.dataset.sure;
    button.setAttribute("aria-label", `Delete ${module.name}`);
  };
  button.addEventListener("blur", rest);
  button.addEventListener("click", async () => {
    if (!button.dataset.sure) {
      button.dataset.sure = "yes";
      button.textContent = "Really?";
      button.setAttribute("aria-label", `Really delete ${module.name}?`);
      return;
    }
    const path = `v1/modules/${encodeURIComponent(module.name)}`;
    try {
      await call("DELETE", path);
      await changed();
      say(`Deleted ${module.name}.`, ["DELETE", path]);
      place.focus();
    } catch (error) {
      showProblem(answer, error);
    }
  });
  return button;
}

function say(text, command) {
  answer.replaceChildren(el("p", {}, text), commands(command));
  announce(text);
}

let changed = async () => {};

const integer = (text) => (text.trim() === "" ? undefined : Number(text));

/** Connect the form. `afterwards` runs after a change of the modules. */
export function startModules(afterwards) {
  changed = async () => {
    await refreshModules();
    await afterwards();
  };
  onSubmit(form, answer, async () => {
    const { name, d_model, num_heads, seed, causal } = form.elements;
    const config = { d_model: integer(d_model.value), num_heads: integer(num_heads.value) };
    if (causal.checked) config.spec = { masks: [{ name: "causal" }] };
    const body = { name: name.value.trim(), config, seed: integer(seed.value) };
    const made = await call("POST", "v1/modules", body);
    await changed();
    choose("look", made.name);
    choose("cost", made.name);
    say(`Created ${made.name}: ${whole(made.parameter_count)} parameters, ${bytes(made.bytes)}. It is selected below.`, ["POST", "v1/modules", body]);
  });
}
