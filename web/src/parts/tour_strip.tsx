/** The stop of the tour at hand, above the view that shows it, with the way to the next. */

import { follow, usePage } from "../page/context";
import { FINDINGS, addressOf, paramsOf, stopOf } from "../page/tour";
import { Button } from "./ui";

/** Go to a stop of the tour, or out of it. */
export function useTour(): (stop: number) => void {
  const { go, params } = usePage();
  return (stop) => {
    const away = Object.fromEntries(Object.keys(params).map((name) => [name, ""]));
    if (stop) go({ ...away, ...paramsOf(stop, params), view: FINDINGS[stop - 1].at.view });
    else go({ tour: "" });
  };
}

export function TourStrip() {
  const { view, params } = usePage();
  const visit = useTour();
  const stop = stopOf(params);
  if (!stop) return null;
  const { title, about, at } = FINDINGS[stop - 1];
  const here = view === at.view && Object.entries(at.params).every(([name, value]) => (params[name] ?? "") === value);
  return (
    <section class="tour-strip" aria-label="Tour">
      <p><b>{stop} of {FINDINGS.length}: {title}.</b> <span>{about}</span></p>
      <div class="fields">
        {!here && <Button onClick={() => visit(stop)}>Show it again</Button>}
        {stop > 1 && <Button class="quiet" onClick={() => visit(stop - 1)}>Back</Button>}
        {stop < FINDINGS.length && <a class="next" href={addressOf(stop + 1, params)} onClick={follow(() => visit(stop + 1))}>Next</a>}
        <Button class="quiet" onClick={() => visit(0)}>{stop < FINDINGS.length ? "End the tour" : "Look for yourself"}</Button>
      </div>
    </section>
  );
}
