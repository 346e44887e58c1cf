/** A chat that a whole model reads: turns with roles, in the address of the page and in requests. */

import type { Params } from "../page/state";

export const ROLES = ["system", "user", "assistant"] as const;

/** One turn, with the fields of a message of a request. */
export interface Turn {
  role: string;
  content: string;
}

const isTurn = (value: unknown): value is Turn => typeof value === "object" && value !== null && "role" in value && "content" in value && typeof value.role === "string" && typeof value.content === "string";

/** The chat of an address; null where it has none. */
export function chatOf({ messages }: Params): Turn[] | null {
  if (!messages) return null;
  try {
    const turns: unknown = JSON.parse(messages);
    return Array.isArray(turns) && turns.length && turns.every(isTurn) ? turns.map(({ role, content }) => ({ role, content })) : null;
  } catch {
    return null;
  }
}

export const writeChat = (turns: Turn[]) => JSON.stringify(turns);

/** The turn that follows: the other speaker's. */
export const nextTurn = (turns: Turn[]): Turn => ({ role: turns.at(-1)?.role === "user" ? "assistant" : "user", content: "" });

/** A chat on one line. */
export const shownChat = (turns: Turn[]) => turns.map(({ role, content }) => `${role}: ${content}`).join(" · ");
