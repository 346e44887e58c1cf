// llama.cpp by node-llama-cpp: texts share its batches. node node_llama.mjs MODULES FILE PORT THREADS TEXTS
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [modules, file, port, threads, texts] = process.argv.slice(2);
const found = createRequire(`${modules}/`).resolve("node-llama-cpp");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(found).href);
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.warn, maxThreads: Number(threads) });
const model = await llama.loadModel({ modelPath: file, useMmap: true });
const context = await model.createContext({
  sequences: Number(texts), contextSize: 1024, batchSize: 512, threads: Number(threads), batching: { dispatchSchedule: "nextCycle" },
});
const free = Array.from({ length: Number(texts) }, () => context.getSequence());

async function generate({ ids, max_new_tokens: most }, came) {
  const sequence = free.pop();
  try {
    await sequence.clearHistory();
    for await (const token of sequence.evaluate(ids, { temperature: 0, yieldEogToken: true })) {
      came(token);
      if (--most <= 0) break;
    }
  } finally {
    free.push(sequence);
  }
}

createServer((request, response) => {
  if (request.method === "GET") return void response.end("ready");
  const parts = [];
  request.on("data", (part) => parts.push(part)).on("end", async () => {
    const asked = JSON.parse(Buffer.concat(parts));
    const made = [];
    await generate(asked, (token) => {
      made.push(token);
      if (asked.stream) response.write(`data: {"id": ${token}}\n\n`);
    });
    response.end(asked.stream ? "data: [DONE]\n\n" : JSON.stringify({ ids: made }));
  });
}).listen(Number(port), "127.0.0.1");
