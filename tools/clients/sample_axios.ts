// Ask for attention by the client that openapi-generator made for axios, and print the one number of the output.
import { Configuration, ForwardReply, RawAttentionApi, Tensor } from "./client";

async function main(): Promise<void> {
  const client = new RawAttentionApi(new Configuration({ basePath: process.argv[2] }));
  const query: Tensor = [[1, 0]];
  const { data } = await client.rawForward({ query, key: [[0, 0], [0, 0]], value: [[1], [3]] });
  const reply: ForwardReply = data;
  if (!reply.ran.kernel || !Array.isArray(reply.output)) throw new Error("no output");
  console.log(reply.output[0][0]);
}

void main();
