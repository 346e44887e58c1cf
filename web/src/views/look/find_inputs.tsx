/** What goes through a model to find its heads: the texts that ship, one's own, or files of sounds or images with a text for each. */

import { useState } from "preact/hooks";
import { call, problemOf } from "../../server/api";
import type { ProblemDocument } from "../../server/api";
import { whole } from "../../numbers/format";
import { SOUND_FILES, pictures, readPicture, readSound, remember, sounds } from "../../subjects/media";
import type { MediaInput, Medium } from "../../subjects/survey";
import type { ModelInfo } from "../../server/types";
import { Area, Button, ProblemBox } from "../../parts/ui";

/** The fields of a request for each kind of file. */
const FIELDS = { sounds: "audio", images: "images" } as const;
const FILES = { sounds: SOUND_FILES, images: "image/png,image/jpeg,image/webp,image/gif" };
const MEDIA: Medium[] = ["sounds", "images"];

/** The kinds of files that a model reads. */
export const mediaOf = ({ takes }: Pick<ModelInfo, "takes">): Medium[] => MEDIA.filter((kind) => takes.includes(FIELDS[kind]));

/** The field of the text that goes with a file; none of a model that reads files alone. */
const besideOf = ({ takes }: Pick<ModelInfo, "takes">): "target" | "text" | undefined => (["target", "text"] as const).find((name) => takes.includes(name));

/** The inputs of these files, with a text for each or for none; none where their numbers differ. */
export function inputsOf(model: Pick<ModelInfo, "takes">, kind: Medium, files: string[], texts: string[]): MediaInput[] {
  const beside = besideOf(model);
  if (beside && texts.length && texts.length !== files.length) return [];
  const all = { sounds, images: pictures }[kind];
  return files.flatMap((file, at) => {
    const kept = all.get(file);
    const text = beside && texts.length ? texts[at] : "";
    return kept ? [{ file, shown: text ? `${file}: ${text}` : file, body: { [FIELDS[kind]]: [{ base64: kept.base64 }], ...(beside && text && { [beside]: text }) } }] : [];
  });
}

interface FilesProps {
  model: ModelInfo;
  kind: Medium;
  files: string[];
  choose: (files: string[]) => void;
  written: string;
  write: (text: string) => void;
}

/** The files of a survey, and their texts. */
export function Files({ model, kind, files, choose, written, write }: FilesProps) {
  const [problem, setProblem] = useState<ProblemDocument | null>(null);
  const [busy, setBusy] = useState(0);
  const beside = besideOf(model);
  const take = async (list: File[]) => {
    setProblem(null);
    try {
      const names: string[] = [];
      for (const file of list) names.push(kind === "sounds" ? remember(sounds, await readSound(file)) : remember(pictures, await readPicture(file)));
      if (names.length) choose(names);
    } catch (fault) {
      setProblem(problemOf(fault));
    }
  };
  /** Have the model write down every sound: these are then the texts. */
  const transcribe = async () => {
    setProblem(null);
    try {
      const lines: string[] = [];
      for (const name of files) {
        setBusy(lines.length + 1);
        const { text } = await call<{ text: string }>("POST", "v1/audio/transcriptions", { model: model.id, file: { base64: sounds.get(name)?.base64 } });
        lines.push(text.replace(/\s+/g, " ").trim());
      }
      write(lines.join("\n"));
    } catch (fault) {
      setProblem(problemOf(fault));
    }
    setBusy(0);
  };
  return (
    <>
      <div class="fields">
        <label><span>{kind === "sounds" ? "Sounds" : "Images"} <span class="hint">{files.length ? files.join(", ") : "several files at once"}</span></span>
          <input type="file" multiple accept={FILES[kind]} onChange={({ currentTarget }) => { void take([...(currentTarget.files ?? [])]); currentTarget.value = ""; }} /></label>
        {beside && <Area label={beside === "target" ? "Transcripts" : "Texts"} hint={`one a line for each of ${whole(files.length)} files in their order, or none`} value={written} set={write} rows={4} />}
        {kind === "sounds" && beside === "target" && model.generates && files.length > 0 && <Button disabled={busy > 0} onClick={() => void transcribe()}>{busy ? `Listening to ${busy} of ${files.length}…` : "Transcribe all"}</Button>}
      </div>
      <ProblemBox problem={problem} />
    </>
  );
}
