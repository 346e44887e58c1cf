// The service's HTTP interface: one call, its problem documents, and the equivalent shell command.

import { el } from "./dom.js";

const ROOT = new URL("..", import.meta.url);

/** A problem document of the service (RFC 9457). */
export class Problem extends Error {
  constructor(document) {
    super(document.detail ?? document.title ?? "The request failed");
    this.document = document;
  }
}

/** Send one request and parse the reply. Throws Problem. */
export async function call(method, path, body) {
  const request = { method, headers: { Accept: "application/json" } };
  if (body !== undefined) {
    request.headers["Content-Type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(new URL(path, ROOT), request);
  } catch {
    throw new Problem({ title: "The server does not answer", detail: `Nothing answered at ${ROOT.host}.` });
  }
  const text = await response.text();
  let reply;
  try {
    reply = text ? JSON.parse(text) : null;
  } catch {
    reply = null;
  }
  if (response.ok) return reply;
  throw new Problem(reply ?? { title: `Status ${response.status}`, detail: text.slice(0, 300), status: response.status });
}

/** Return the path of a module, or of raw attention if the name is empty. */
export const of = (name, question) =>
  name ? `v1/modules/${encodeURIComponent(name)}/${question}` : `v1/attention/${question}`;

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Return the request as a curl command. */
export function curl(method, path, body) {
  const parts = ["curl -s", method === "GET" || (method === "POST" && body) ? "" : `-X ${method}`, quoted(new URL(path, ROOT).href)];
  if (body !== undefined) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(JSON.stringify(body))}`);
  return parts.filter(Boolean).join(" ");
}

async function copy(text, source) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Insecure contexts have no clipboard: select the text for the copy key.
    source.closest("details").open = true;
    getSelection().selectAllChildren(source);
    return false;
  }
}

/** Show the equivalent commands, each with a copy button. Calls are `[method, path, body]`. */
export function commands(...calls) {
  return el(
    "div",
    { class: "commands" },
    calls.map(([method, path, body]) => {
      const line = curl(method, path, body);
      const code = el("code", {}, line);
      const button = el("button", { type: "button", class: "quiet" }, "Copy");
      button.addEventListener("click", async () => {
        button.textContent = (await copy(line, code)) ? "Copied" : "Selected";
        setTimeout(() => (button.textContent = "Copy"), 2000);
      });
      const summary = el("summary", {}, el("span", { class: "verb" }, "curl"), ` ${method} /${path}`);
      return el("div", { class: "command" }, el("details", {}, summary, el("pre", { tabindex: 0 }, code)), button);
    }),
  );
}

/** Show a problem as text, and mark its field. */
export function showProblem(place, error, form) {
  const problem = error instanceof Problem ? error.document : { title: "This page failed", detail: String(error) };
  const field = problem.param && mark(form, problem.param);
  place.replaceChildren(
    el(
      "div",
      { class: "problem", role: "alert" },
      el("strong", {}, problem.title ?? "The request failed"),
      el("p", {}, problem.detail ?? ""),
      el(
        "p",
        { class: "small" },
        [
          problem.param && `field ${problem.param}`,
          problem.code && `code ${problem.code}`,
          problem.status && `status ${problem.status}`,
          problem.request_id && `request ${problem.request_id}`,
        ].filter(Boolean).join(" · "),
      ),
    ),
  );
  field?.focus();
}

function mark(form, param) {
  const fields = [...(form?.querySelectorAll("[data-param]") ?? [])].filter((field) => field.offsetParent !== null);
  const exact = fields.filter((field) => field.dataset.param === param);
  const near = ({ dataset: { param: own } }) => param.startsWith(`${own}.`) || own.startsWith(`${param}.`);
  const found = exact.length ? exact : fields.filter(near);
  for (const field of found) field.setAttribute("aria-invalid", "true");
  return found[0];
}

/** Remove the marks of an earlier problem. */
export function unmark(form) {
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
}

/** Run a form's request, one at a time, with a busy button. Problems appear in place of the answer. */
export function onSubmit(form, place, work) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button.primary");
    if (button.disabled) return;
    unmark(form);
    button.disabled = true;
    try {
      await work();
    } catch (error) {
      showProblem(place, error, form);
    } finally {
      button.disabled = false;
    }
  });
}
