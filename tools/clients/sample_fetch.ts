// Ask for attention by openapi-fetch with the types of openapi-typescript, and print the one number of the output.
import createClient from "openapi-fetch";
import type { components, paths } from "./api";

type Tensor = components["schemas"]["Tensor"];

async function main(): Promise<void> {
  const client = createClient<paths>({ baseUrl: process.argv[2] });
  const query: Tensor = [[1, 0]];
  const body = { query, key: [[0, 0], [0, 0]], value: { dtype: "float64" as const, shape: [2, 1], data: [1, 3] } };
  const { data, error } = await client.POST("/v1/attention/forward", { body });
  if (error !== undefined || data === undefined) throw new Error(JSON.stringify(error));
  const reply = data as components["schemas"]["ForwardReply"]; // what Accept asks for: JSON, by default
  if (!reply.ran.kernel || !Array.isArray(reply.output)) throw new Error("no output");
  console.log((reply.output as number[][])[0][0]);
}

void main();
