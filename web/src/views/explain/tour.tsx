/** The findings of the tour, each with a link that shows it at once. */

import { follow, usePage } from "../../page/context";
import { FINDINGS, addressOf } from "../../page/tour";
import { useTour } from "../../parts/tour_strip";
import { Button } from "../../parts/ui";

export function Tour() {
  const { params } = usePage();
  const visit = useTour();
  return (
    <>
      <Button class="primary" onClick={() => visit(1)}>Begin</Button>
      <ol class="tour">
        {FINDINGS.map(({ title, about }, i) => (
          <li key={title}>
            <a href={addressOf(i + 1, params)} onClick={follow(() => visit(i + 1))}>{title}</a>
            <p>{about}</p>
          </li>
        ))}
      </ol>
    </>
  );
}
