/** The import of layers of a checkpoint as modules. */

import { call } from "./api";
import type { ApiRequest } from "./api";
import type { Body } from "./tensors";
import type { CheckpointAttention, ModuleInfo } from "./types";

/** Ask for the attention layers of a checkpoint. */
export async function layersOf(checkpoint: string): Promise<CheckpointAttention[]> {
  const encoded = checkpoint.split("/").map(encodeURIComponent).join("/");
  return (await call<{ attentions: CheckpointAttention[] }>("GET", `v1/checkpoints/${encoded}`)).attentions;
}

/** Import layers, one after another. `came` is called after each. */
export async function importLayers(checkpoint: string, layers: CheckpointAttention[], came?: () => Promise<void>): Promise<{ text: string; names: string[]; request: ApiRequest }> {
  const names: string[] = [];
  let body: Body = {};
  for (const { layer, part, stack } of layers) {
    body = { checkpoint, layer, part, ...(stack ? { stack } : {}) };
    names.push((await call<ModuleInfo>("POST", "v1/modules/import", body)).name);
    await came?.();
  }
  return { text: `Imported ${names.join(", ")}.`, names, request: { method: "POST", path: "v1/modules/import", body } };
}
