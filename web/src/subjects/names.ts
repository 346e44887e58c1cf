/** Names of stored recordings in menus: their model and their text, and more where that is not enough. */

import { bytes, clip } from "../numbers/format";
import type { RecordingSummary } from "../server/types";

const MOST_TEXT = 48; // characters

/** A name for each recording by its id; no two have the same. */
export function recordingNames(recordings: RecordingSummary[]): Map<string, string> {
  const short = ({ model, text }: RecordingSummary) => `${model.split("/").at(-1) ?? model}: “${clip(text, MOST_TEXT)}”`;
  const longer = (each: RecordingSummary) => `${short(each)}, ${bytes(each.bytes)}`;
  const many = (list: string[]) => list.reduce((seen, each) => seen.set(each, (seen.get(each) ?? 0) + 1), new Map<string, number>());
  const [shorts, longers] = [many(recordings.map(short)), many(recordings.map(longer))];
  return new Map(recordings.map((each) => {
    if (shorts.get(short(each)) === 1) return [each.id, short(each)];
    return [each.id, longers.get(longer(each)) === 1 ? longer(each) : `${longer(each)}, ${each.id.slice(0, 6)}`];
  }));
}
