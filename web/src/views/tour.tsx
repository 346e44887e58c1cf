/** Five findings in the model that ships, each with a link that shows it at once. */

import { follow, usePage } from "../context";
import { format } from "../state";
import type { State } from "../state";

interface Finding {
  title: string;
  about: string;
  /** Where it is seen. */
  at: State;
}

const REPEATED = "Kate met Tamiro in the park. Then Tamiro met Kate in the park. Then Kate met Tamiro";
const tiny = (view: string, params: State["params"]): State => ({ view, params: { source: "model:tiny", ...params } });

const FINDINGS: Finding[] = [
  { title: "A head looks one token back", about: "Every token looks at the one before it, so that the next layer knows what stood there: the line below the diagonal is dark.", at: tiny("head", { layer: "0", head: "0" }) },
  { title: "A head looks at its own token", about: "Beside it, head 1 looks at the token itself: the diagonal is dark.", at: tiny("head", { layer: "0", head: "1" }) },
  { title: "Induction: a head looks behind the last time", about: "In a text that repeats, it looks at what followed the same token before, and the model goes on in the same way (Olsson et al. 2022). Of all heads it comes first, sorted by induction.", at: tiny("overview", { text: REPEATED, sort: "induction" }) },
  { title: "A sink: a head that rests on the first token", about: "A head that has nothing to look for puts its weight on the first token (Xiao et al. 2024): its column is dark.", at: tiny("head", { layer: "2", head: "3" }) },
  { title: "Without the induction head the name is lost", about: "The text ends in the middle of a name that it has had before. With the induction head knocked out, the model no longer knows how the name goes on: see the likeliest next tokens, and press its button to bring it back.", at: tiny("decode", { layer: "1", head: "0", knocked: "1.0" }) },
];

export function Tour() {
  const { go, params } = usePage();
  // Nothing of the subject at hand comes along but how the page looks.
  const kept = { theme: params.theme, shortcuts: params.shortcuts };
  const away = Object.fromEntries(Object.keys(params).map((name) => [name, ""]));
  return (
    <ol class="tour">
      {FINDINGS.map(({ title, about, at }) => (
        <li key={title}>
          <a href={format({ view: at.view, params: { ...at.params, ...kept } })} onClick={follow(() => go({ ...away, ...kept, ...at.params, view: at.view }))}>{title}</a>
          <p>{about}</p>
        </li>
      ))}
    </ol>
  );
}
