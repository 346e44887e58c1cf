/** The state of the page: a view and its parameters, all of them in the fragment of the URL. */

/** Parameters by name; texts, as in an address. */
export type Params = Partial<Record<string, string>>;

export interface State {
  view: string;
  params: Params;
}

export const FIRST: State = { view: "overview", params: {} };

/** Read a fragment such as `#/head?source=builtin:cat&layer=2`. */
export function parse(hash: string): State {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split(/\?(.*)/s);
  return { view: path || FIRST.view, params: Object.fromEntries(new URLSearchParams(search)) };
}

/** Write a state as a fragment; empty parameters are left out. */
export function format({ view, params }: State): string {
  const kept = Object.entries(params).filter((each): each is [string, string] => Boolean(each[1])).sort(([a], [b]) => (a < b ? -1 : 1));
  const search = new URLSearchParams(kept).toString();
  return `#/${view}${search ? `?${search}` : ""}`;
}

/** A change of parameters; a number becomes text, an empty text removes the parameter. */
export type Patch = Record<string, string | number | undefined>;

/** Apply a change. */
export function changed(state: State, patch: Patch): State {
  const { view, ...rest } = patch;
  const params = { ...state.params };
  for (const [name, value] of Object.entries(rest)) {
    if (value === undefined || value === "") Reflect.deleteProperty(params, name);
    else params[name] = String(value);
  }
  return { view: view === undefined ? state.view : String(view), params };
}

/** Read a whole number from `low` to `high`; text that is none gives `otherwise`. */
export function integer(text: string | undefined, otherwise: number, low = 0, high = Number.MAX_SAFE_INTEGER): number {
  const value = text === undefined || text.trim() === "" ? NaN : Number(text);
  return Number.isInteger(value) ? Math.min(high, Math.max(low, value)) : otherwise;
}

/** Read a number from `low` to `high`; text that is none gives `otherwise`. */
export function decimal(text: string | undefined, otherwise: number, low: number, high: number): number {
  const value = Number.parseFloat(text ?? "");
  return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : otherwise;
}
