/** What a tab keeps over a reload, as JSON. Nothing where the browser has no room, or refuses it in a frame. */

export function keep(name: string, value: unknown): void {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
  } catch {
    forgetKept(name);
  }
}

export function keptOf(name: string): unknown {
  try {
    return JSON.parse(sessionStorage.getItem(name) ?? "null") as unknown;
  } catch {
    return null;
  }
}

export function forgetKept(name: string): void {
  try {
    sessionStorage.removeItem(name);
  } catch {
    // It was never kept.
  }
}
