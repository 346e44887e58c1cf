/** The most tokens of views that ask the server for all pairs of them, several times. The page says so before they are asked. */
export const MOST_TOKENS = { edit: 1024, effects: 512, gradient: 512, rollout: 1024, logits: 512 } as const;

/** The most tokens of a view, where it has a limit. */
export const mostTokens = (view: string): number | undefined => (MOST_TOKENS as Partial<Record<string, number>>)[view];
