/** Decoding: a text by a whole model, or a module's session step by step. */

import { usePage } from "../../page/context";
import { Choice } from "../../parts/ui";
import { Generation } from "./generation";
import { SessionSteps } from "./session_steps";

const MODULE = "module";

export function Decode() {
  const { params, go, models } = usePage();
  const able = (models ?? []).filter(({ generates, refused, takes }) => generates && !refused && takes.includes("text"));
  const [kind, name] = (params.source ?? "").split(/:(.*)/s);
  const steps = params.decode !== undefined || kind === "module";
  const model = able.find(({ id }) => kind === "model" && id === name) ?? able[0];
  if (!models) return <p class="empty">Opening…</p>;
  const chosen = steps || !able.length ? MODULE : `model:${model.id}`;
  const choose = (value: string) => (value === MODULE ? go({ decode: params.decode ?? "-" }) : go({ decode: "", source: value, layer: "", head: "", image: "", knocked: "" }));
  return (
    <>
      <div class="fields subject">
        <Choice wide label="Decode with" value={chosen} set={choose} options={[...able.map(({ id }): [string, string] => [`model:${id}`, `${id}: a text, token by token`]), [MODULE, "a module: random vectors, step by step"]]} />
      </div>
      {chosen === MODULE ? <SessionSteps /> : <Generation key={model.id} model={model} />}
    </>
  );
}
