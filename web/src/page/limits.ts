/** The most tokens of views that ask the server for all pairs of them, several times. The page says so before they are asked. */

import type { ModelInfo } from "../server/types";

export const MOST_TOKENS = { edit: 1024, effects: 512, gradient: 512, rollout: 1024, logits: 512 } as const;
/** The most cells of one request or reply with the weights of all heads. */
export const MOST_CELLS = 4_000_000;

/** The most tokens of a rollout over layers with so many heads together: the page sends all their weights. */
export const mostOfRollout = (heads: number): number => Math.min(MOST_TOKENS.rollout, Math.floor(Math.sqrt(MOST_CELLS / Math.max(1, heads))));

/** The layers that read the text of a model. */
const ofText = ({ layer }: ModelInfo["layers"][number]) => !/^(vision|audio|cross)\./.test(String(layer));

/** The most tokens of a view, where it has a limit; `model`: the one that is asked. */
export function mostTokens(view: string, model?: ModelInfo): number | undefined {
  if (view === "rollout" && model) return mostOfRollout(model.layers.filter(ofText).reduce((sum, { heads }) => sum + heads, 0));
  return (MOST_TOKENS as Partial<Record<string, number>>)[view];
}
