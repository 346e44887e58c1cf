/** The whole model of a view with its own texts. */

import type { ComponentChildren } from "preact";
import { usePage } from "../page/context";
import type { ModelInfo } from "../server/types";
import { modelLabel } from "./sentence";
import { Choice, Waiting } from "./ui";

interface ModelChoiceProps {
  /** True for a model that the view can ask. */
  able: (model: ModelInfo) => boolean;
  /** The sentence that is shown where there is no model. */
  none: string;
  /** Parameters of one model, which another has not. */
  own?: string[];
  children: (model: ModelInfo) => ComponentChildren;
}

/** A choice of the models that can be asked, and what follows from it. */
export function ModelChoice({ able, none, own = [], children }: ModelChoiceProps) {
  const { params, go, models } = usePage();
  if (!models) return <Waiting what="Asking the server for its models" />;
  const found = models.filter((each) => !each.refused && able(each));
  if (!found.length) return <p class="empty">{none}</p>;
  const model = found.find(({ id }) => params.source === `model:${id}`) ?? found[0];
  return (
    <>
      <div class="fields subject">
        <Choice wide label="Model" value={model.id} set={(id) => go({ source: `model:${id}`, layer: "", head: "", ...Object.fromEntries(own.map((name) => [name, ""])) })} options={found.map((each) => [each.id, modelLabel(each)] as const)} />
      </div>
      {children(model)}
    </>
  );
}
