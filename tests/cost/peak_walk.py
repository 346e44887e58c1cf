"""Random combinations of what is registered, and how far their estimates of peak memory are from what is measured.

``python -m tests.cost.peak_walk --draws 200`` prints the errors by pass and kernel with the worst cases;
``--show 17 backward fused`` what one of them holds when it holds most, beside the phases that are counted.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tests.cost.peaks import DTYPES, Request, Run, held_at_peak, peaks
from tests.cost.test_peaks import ALL_TAPS, KERNELS, SLACK, module, raw

from attention_contract.spec import AnyOf, GlobalTokens, SlidingWindow
from attention_service.core.kernels import unsuitable
from attention_service.core.normalizers import has_lse
from attention_service.cost import Workload, gradient_phases, memory_phases
from attention_service.cost.gradient_memory import names_of
from attention_service.cost.memory_phases import Phase, peak_of
from attention_service.runtime.calibration.specs import Lengths, draw_spec

EDITED_TAPS = ("q", "k", "v", "scores", "capped_scores", "masked_scores", "weights", "context")


@dataclass(frozen=True)
class Pass:
    """One pass over one request."""

    number: int
    """Of the draw."""
    way: str
    kernel: str
    work: Workload
    run: Run

    @property
    def estimate(self) -> int:
        """Bytes."""
        return peak_of(self.phases)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is held in each."""
        if self.way in {"forward", "tapped", "edited"}:
            return memory_phases(self.work, self.kernel)
        names = names_of(self.work, taps=self.way in {"taps", "edited taps"})
        phases = gradient_phases(self.work, self.kernel, names, twice=self.way == "second")
        return tuple(phase for phase in phases if phase.name != "taps again")  # which these passes don't return


def drawn(rng: np.random.Generator) -> Workload:
    """A request of some MiB: its spec drawn from the registries, and what else a request may bring."""
    batch, kv_heads, head_dim = (int(rng.choice(some)) for some in ([1, 2, 3], [1, 2, 4], [32, 64]))
    heads, itemsize, past = kv_heads * int(rng.choice([1, 2])), int(rng.choice([2, 4, 4, 8])), int(rng.choice([0, 130]))
    queries = int(rng.integers(200, 500))
    spec = draw_spec(rng, "materialized", Lengths(batch, queries, queries, past))
    projected = rng.random() < 0.5
    if projected and rng.random() < 0.15:
        apart = GlobalTokens(positions=[*range(int(rng.integers(1, 9)))], projections="separate")
        spec, past = spec.model_copy(update={"masks": [AnyOf(of=[SlidingWindow(left=40, right=40), apart])]}), 0
    keys = queries + past + spec.add_bias_kv + spec.add_zero_attn
    more: dict[str, object] = {"padded": rng.random() < 0.2}
    if rng.random() < 0.15:
        offsets = tuple(int(past + each) for each in rng.integers(-40, 40, batch))
        more |= {"batched_offsets": True, "batched_places": True, "offsets": offsets}
    if rng.random() < 0.15 and not spec.add_zero_attn:
        more |= {"request_mask_elements": queries * keys, "bool_mask": rng.random() < 0.5}
    if rng.random() < 0.1:
        more["dropped"] = True
    sizes = {"batch": batch, "queries": queries, "keys": keys, "past": past, "heads": heads, "kv_heads": kv_heads}
    more |= sizes | {"itemsize": itemsize, "spec": spec}
    if projected:
        return module(heads * head_dim, **more)
    return raw(head_dim=head_dim, value_dim=int(rng.choice([32, 64])), **more)


def tapped(rng: np.random.Generator, work: Workload) -> Workload:
    """The same with some taps returned, of some heads and queries or of all."""
    known = sorted(ALL_TAPS - {"output"} - (set() if has_lse(work.spec.normalizer) else {"lse"}))
    taps = {str(tap) for tap in rng.choice(known, int(rng.integers(1, 4)), replace=False)}
    heads = int(rng.integers(1, work.heads + 1)) if rng.random() < 0.5 else None
    queries = int(rng.integers(1, work.queries)) if rng.random() < 0.5 else None
    return replace(work, taps=frozenset({"output", *taps}), selected_heads=heads, selected_queries=queries)


def edited(rng: np.random.Generator, work: Workload) -> Workload:
    """The same with one tap edited."""
    tap, does = str(rng.choice(EDITED_TAPS)), str(rng.choice(["set", "scale", "value", "renormalize"]))
    if does == "renormalize":
        tap = "weights"
    return replace(work, edits=((tap, does),))


def passes(draws: int, seed: int = 0) -> Iterator[Pass]:
    """The same ones every time."""
    for number in range(draws):
        yield from passes_over(number, seed)


def passes_over(number: int, seed: int) -> Iterator[Pass]:
    """Those over one request."""
    rng = np.random.default_rng((seed, number))
    work = drawn(rng)
    request, looking = Request(work), Request(tapped(rng, work))
    for kernel in KERNELS:
        if unsuitable(kernel, work.spec, DTYPES[work.itemsize], dropout=work.dropped):
            continue
        yield Pass(number, "forward", kernel, work, partial(request.forward, kernel))
        yield Pass(number, "backward", kernel, work, partial(request.backward, kernel))
        yield Pass(number, "tapped", kernel, looking.work, partial(looking.forward, kernel))
    only = "materialized"
    yield Pass(number, "taps", only, work, partial(request.backward, only, taps=True))
    yield Pass(number, "second", only, work, partial(request.backward, only, twice=True))
    changed = edited(rng, work)
    edits = Request(changed)
    yield Pass(number, "edited", only, changed, partial(edits.forward, only))
    yield Pass(number, "edited back", only, changed, partial(edits.backward, only))
    yield Pass(number, "edited taps", only, changed, partial(edits.backward, only, taps=True))


def described(work: Workload) -> str:
    """What differs from a plain request."""
    told = {name: getattr(work, name) for name in work.__dataclass_fields__ if name not in {"spec", "sizes", "threads"}}
    plain = {name: field.default for name, field in work.__dataclass_fields__.items()}
    text = " ".join(f"{k}={sorted(v) if isinstance(v, frozenset) else v}" for k, v in told.items() if v != plain[k])
    return f"{'module' if work.sizes else 'raw'} {text} {work.spec.model_dump(exclude_defaults=True)}"


def main() -> None:
    """Print the errors, or what one pass holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worst", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--show", nargs=3, metavar=("NUMBER", "WAY", "KERNEL"))
    given = parser.parse_args()
    if given.show:
        number, way, kernel = given.show
        for each in passes_over(int(number), given.seed):
            if (each.way, each.kernel) == (way, kernel):
                show(each)
        return
    every = [each for each in passes(given.draws, given.seed) if given.only in f"{each.way}|{each.kernel}"]
    table(every, peaks([each.run for each in every]), given.worst)


def off_by(each: Pass, actual: int) -> float:
    """How far an estimate is from what was measured, relative to that; what is small counts for nothing."""
    beyond = max(abs(each.estimate - actual) - SLACK, 0) / actual
    return beyond if each.estimate > actual else -beyond


def table(every: list[Pass], measured: list[int], worst: int) -> None:
    """By pass and kernel: how many are further off than allowed, the extremes, and the worst cases."""
    rows = defaultdict(list)
    for each, actual in zip(every, measured, strict=True):
        rows[each.way, each.kernel].append((off_by(each, actual), actual, each))
    for (way, kernel), errors in rows.items():
        errors.sort(key=lambda row: row[0])
        off = [row for row in errors if not -0.02 <= row[0] <= 0.05]
        low, high = errors[0][0], errors[-1][0]
        print(f"{way:9} {kernel:13} {len(off):4} of {len(errors):4} off, {low:+.3f} to {high:+.3f}")
        for error, actual, each in [*off[:worst], *off[max(worst, len(off) - worst) :]]:
            print(f"    {error:+.3f} of {actual:>10}  #{each.number} {described(each.work)}")


def show(each: Pass) -> None:
    """The largest allocations at the peak, and the phases."""
    held = held_at_peak(each.run)
    print(described(each.work))
    print(f"measured {sum(size for size, _ in held)}, estimated {each.estimate}")
    for size, name in sorted(held, reverse=True)[:30]:
        print(f"  {size:>10}  {name[:170]}")
    for phase in each.phases:
        print(f"{phase.name} {phase.bytes}: {dict(phase.tensors)}")


if __name__ == "__main__":
    main()
