/** The service's HTTP interface: one call, its problem documents, and the equivalent commands. */

import { OWN_SERVER, RECORDED, replyFile } from "./recorded";
import { ofBuffer, openTensors, toJson } from "./tensors";
import type { Body, Bytes, Tensor } from "./tensors";

export const ROOT = new URL(/* @vite-ignore */ "..", import.meta.url);
/** The server that the commands name. */
const SERVER = OWN_SERVER ? new URL(OWN_SERVER) : ROOT;
const JSON_REPLY = { Accept: "application/json" };
const SAFETENSORS = { Accept: "application/vnd.safetensors" };

export interface ProblemDocument {
  title?: string | undefined;
  detail?: string | undefined;
  status?: number | undefined;
  code?: string | undefined;
  param?: string | undefined;
  request_id?: string | undefined;
  /** Seconds after which the same request may succeed. */
  retry_s?: number | undefined;
  /** The page asks again by itself. */
  retrying?: boolean;
  /** Nothing went wrong: the page waits for its reader. */
  waits?: boolean;
  /** Ask again. */
  again?: () => void;
}

/** A problem document of the service (RFC 9457), or a problem of the page's own in the same form. */
export class Problem extends Error {
  constructor(readonly document: ProblemDocument) {
    super(document.detail ?? document.title ?? "The request failed");
  }
}

/** The code of the page's own problem of a server that did not answer. */
export const NO_ANSWER = "no_answer";
const RETRY_S = 2; // after which a server that did not answer is asked again

const noAnswer = (title: string, detail: string) => new Problem({ title, detail, code: NO_ANSWER, retry_s: RETRY_S });

/** Load a script of the page. Throws Problem where it cannot be loaded now. */
export async function loadScript<T>(load: () => Promise<T>): Promise<T> {
  try {
    return await load();
  } catch (fault) {
    await call("GET", "v1"); // a server that refuses this browser says why
    const reason = fault instanceof Error ? fault.message : String(fault);
    throw noAnswer("This view could not be loaded", `${reason}.`);
  }
}

/** A fault as a problem document. */
export const problemOf = (fault: unknown): ProblemDocument =>
  fault instanceof Problem
    ? fault.document
    : { title: "This page failed", detail: fault instanceof Error ? fault.message : String(fault) };

export type Method = "GET" | "POST" | "DELETE";

/** A request, as the page shows it in commands. */
export interface ApiRequest {
  method: Method;
  path: string;
  body?: Body | undefined;
}

/** A reply, or its body. Throws Problem if none comes, if it breaks off, or if nobody waits for it any more. */
async function arrived<T>(coming: Promise<T>, signal?: AbortSignal): Promise<T> {
  try {
    return await coming;
  } catch {
    if (signal?.aborted) throw new Problem({ title: "Cancelled", detail: "Nothing is waited for any more.", code: "cancelled" });
    throw noAnswer("The server does not answer", `No answer came from ${ROOT.host}, or it broke off.`);
  }
}

async function send({ method, path, body }: ApiRequest, headers: Record<string, string>, signal?: AbortSignal): Promise<Response> {
  const request: RequestInit = { method, headers, signal: signal ?? null };
  const sent = body === undefined ? "" : toJson(body);
  const file = RECORDED && replyFile(method, path, sent);
  if (file) return recorded(file, signal);
  if (sent) {
    request.headers = { ...headers, "Content-Type": "application/json" };
    request.body = sent;
  }
  const response = await arrived(fetch(new URL(path, ROOT), request), signal);
  if (response.ok) return response;
  const text = await arrived(response.text(), signal);
  let problem: ProblemDocument | null = null;
  try {
    const parsed = JSON.parse(text) as ProblemDocument & { error?: OpenAIFault };
    problem = parsed.error && !parsed.detail ? { ...ofOpenAI(parsed.error), status: response.status } : parsed;
  } catch {
    // A proxy answers in its own words.
  }
  const retry_s = Number(response.headers.get("Retry-After") ?? NaN);
  throw new Problem({ ...(problem ?? { title: `Status ${response.status}`, detail: text.slice(0, 300), status: response.status }), ...(retry_s > 0 && { retry_s }) });
}

/** A recorded reply. Throws Problem where there is none. */
async function recorded(file: string, signal?: AbortSignal): Promise<Response> {
  const response = await arrived(fetch(new URL(file, ROOT), { signal: signal ?? null }), signal);
  if (response.ok) return response;
  throw new Problem({ title: "This was not recorded", detail: "This page has no server and shows recorded replies alone; in a checkout of the project, make serve starts a server whose page answers any question.", waits: true });
}

/** Send one request and parse the JSON reply. Throws Problem. */
export async function call<T>(method: Method, path: string, body?: Body, signal?: AbortSignal): Promise<T> {
  const response = await send({ method, path, body }, JSON_REPLY, signal);
  const text = await arrived(response.text(), signal);
  return (text ? JSON.parse(text) : null) as T;
}

/** A reply with tensors: its JSON part, and the tensors by dotted name. */
export interface TensorReply<T> {
  reply: T;
  tensors: Record<string, Tensor>;
}

/** Send one request, a GET without a body, and read the reply's tensors as they lie in memory. Throws Problem. */
export async function callTensors<T>(path: string, body?: Body, signal?: AbortSignal): Promise<TensorReply<T>> {
  const response = await send({ method: body ? "POST" : "GET", path, body }, SAFETENSORS, signal);
  const file = await openTensors(ofBuffer(await arrived(response.arrayBuffer(), signal)));
  const names = Object.keys(file.shapes);
  const read = await Promise.all(names.map((name) => file.read(name)));
  return { reply: JSON.parse(file.entries.reply ?? "{}") as T, tensors: Object.fromEntries(names.map((name, i) => [name, read[i]])) };
}

/** The bytes of a file on the server, read by ranges; the first range also brings the header's usual length. */
export async function bytesOf(path: string, ahead = 49_152): Promise<Bytes> {
  const range = async (from: number, to: number) => {
    const response = await send({ method: "GET", path }, { Range: `bytes=${from}-${to - 1}` });
    const buffer = await arrived(response.arrayBuffer());
    const total = /\/(\d+)$/.exec(response.headers.get("content-range") ?? "")?.[1];
    return { buffer: response.status === 206 ? buffer : buffer.slice(from, to), size: Number(total ?? buffer.byteLength) };
  };
  const first = await range(0, ahead);
  return {
    size: first.size,
    read: async (from, to) => (to <= first.buffer.byteLength ? new Uint8Array(first.buffer).subarray(from, to) : new Uint8Array((await range(from, to)).buffer)),
  };
}

/** The path of a module's operation, or of raw attention's if the name is empty. */
export const of = (name: string, question: string) =>
  name ? `v1/modules/${encodeURIComponent(name)}/${question}` : `v1/attention/${question}`;

const quoted = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;
const FEW = 20_000;

/** The JSON text of a body: with nested lists if it is short, else with base64. */
function bodyText(body: Body): string {
  const compact = toJson(body);
  if (compact.length > FEW) return compact;
  const lists = toJson(body, true);
  return lists.length <= FEW ? lists : compact;
}

/** Return the request as a curl command. */
export function curl({ method, path, body }: ApiRequest): string {
  const verb = method === "GET" || (method === "POST" && body) ? "" : `-X ${method}`;
  const parts = ["curl -s", verb, quoted(new URL(path, SERVER).href)];
  if (body !== undefined) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(bodyText(body))}`);
  return parts.filter(Boolean).join(" ");
}

/** The methods of the client whose keywords are the fields of a request: the path, and the group of calls. */
const METHODS: [RegExp, string][] = [
  [/^v1\/modules\/([^/]+)\/(forward|weights|gradients|attribution|effects|circuits|complexity)$/, ""],
  [/^v1\/models\/([^/]+)\/(forward|weights|gradients|complexity|similarity|context|effects|lens)$/, "models."],
  [/^v1\/attention()\/(forward|weights|gradients|attribution|effects|rollout|similarity|complexity)$/, "attention."],
];
/** Fields that are words of Python. */
const RESERVED = new Set(["return", "with", "from"]);

/** A value of JSON as Python writes it. */
function literal(value: unknown): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${literal(name)}: ${literal(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** Return the request as Python: a call of the client, or, where it has another form there, with httpx. */
export function python({ method, path, body }: ApiRequest): string {
  const own = method === "POST" && body !== undefined ? METHODS.find(([form]) => form.test(path)) : undefined;
  if (!own) return withHttpx({ method, path, body });
  const [, name, question] = own[0].exec(path) as unknown as [string, string, string];
  const fields = Object.entries(JSON.parse(bodyText(body as Body)) as object);
  const given = fields.map(([field, value]) => `${field}${RESERVED.has(field) ? "_" : ""}=${literal(value)}`);
  if (name) given.unshift(literal(decodeURIComponent(name)));
  const client = `with Client(${literal(SERVER.href.replace(/\/$/, ""))}) as client:`;
  return `from attention_client import Client\n\n${client}\n    print(client.${own[1]}${question}(${given.join(", ")}))\n`;
}

function withHttpx({ method, path, body }: ApiRequest): string {
  const url = JSON.stringify(new URL(path, SERVER).href);
  const sent = body === undefined ? "" : ", json=body";
  const lines = ["import httpx\n\n"];
  if (body !== undefined) lines.push(`body = ${literal(JSON.parse(bodyText(body)))}\n`);
  lines.push(`reply = httpx.request("${method}", ${url}${sent})\nreply.raise_for_status()\n`);
  lines.push(method === "DELETE" ? "" : "print(reply.json())\n");
  return lines.join("");
}

/** Send one request and yield the server-sent events of its reply as they come. Throws Problem, also for an event that is one. */
export async function* events<T>(path: string, body: Body, signal: AbortSignal): AsyncGenerator<Awaited<T>> {
  const response = await send({ method: "POST", path, body: { ...body, stream: true } }, JSON_REPLY, signal);
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (reader) {
    const { value, done } = await arrived(reader.read(), signal);
    text += value ?? "";
    const parts = text.split("\n\n");
    text = parts.pop() ?? "";
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data) as T & { error?: OpenAIFault };
      if (event.error) throw new Problem(ofOpenAI(event.error));
      yield event as Awaited<T>;
    }
    if (done) return;
  }
}

interface OpenAIFault {
  message: string;
  code: string | null;
  param: string | null;
}

/** A fault in OpenAI's form as a problem document. */
const ofOpenAI = ({ message, code, param }: OpenAIFault): ProblemDocument => ({ title: "The request failed", detail: message, code: code ?? undefined, param: param ?? undefined });
