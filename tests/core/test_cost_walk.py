"""The peak estimates against measured ones over random combinations of what is registered."""

from bisect import bisect_left
from itertools import accumulate

import numpy as np
import pytest
from tests.core.test_cost_memory import DTYPES, KERNELS, SLACK, Request, module, raw
from torch.profiler import ProfilerActivity, profile, record_function

from attention_service.core.cost import Workload, gradient_peak_bytes, peak_bytes
from attention_service.core.kernels import unsuitable
from attention_service.runtime.calibration.specs import Lengths, draw_spec

DRAWN = 80
SMALLEST = 2**21
"""Bytes of a peak that is held to its estimate; in less, workspaces of threads and leftovers of tiles count."""
BOUNDS = {
    # Hidden layers of an additive score are counted as if each of its blocks were a full one.
    "materialized": (0.02, 0.08),
    # Half types: how much of keys and values a processor packs depends on its instructions and on idle threads.
    "fused": (0.12, 0.25),
    # The largest tile is taken to have both the most queries and the most keys; what masks leave may have no such tile.
    "blocked": (0.12, 0.35),
}
"""How far under and over what is measured, beyond the slack that indices and flags of rows have."""


def drawn(rng: np.random.Generator) -> Workload:
    """A request of some MiB: its spec drawn from the registries, and what else a request may bring."""
    batch, kv_heads, head_dim = (int(rng.choice(some)) for some in ([1, 2, 3], [1, 2, 4], [32, 64]))
    heads, itemsize, past = kv_heads * int(rng.choice([1, 2])), int(rng.choice([2, 4, 4, 8])), int(rng.choice([0, 130]))
    queries = int(rng.integers(200, 500))
    spec = draw_spec(rng, "materialized", Lengths(batch, queries, queries, past))
    keys = queries + past + spec.add_bias_kv + spec.add_zero_attn
    more: dict[str, object] = {"padded": rng.random() < 0.2, "batched_offsets": rng.random() < 0.15}
    if rng.random() < 0.15 and not spec.add_zero_attn:
        more |= {"request_mask_elements": queries * keys, "bool_mask": rng.random() < 0.5}
    if rng.random() < 0.1:
        more["dropped"] = True
    sizes = {"batch": batch, "queries": queries, "keys": keys, "past": past, "heads": heads, "kv_heads": kv_heads}
    more |= sizes | {"itemsize": itemsize, "spec": spec}
    if rng.random() < 0.5:
        return module(heads * head_dim, **more)
    return raw(head_dim=head_dim, value_dim=int(rng.choice([32, 64])), **more)


def walked() -> list[Workload]:
    """The same ones every time."""
    rng = np.random.default_rng(0)
    return [drawn(rng) for _ in range(DRAWN)]


@pytest.fixture(scope="module")
def measured() -> list[tuple[str, str, int, Workload]]:
    """Pass, kernel, the most bytes held at a time, and the workload."""
    runs = []
    for work in walked():
        request = Request(work)
        for kernel in KERNELS:
            if not unsuitable(kernel, work.spec, DTYPES[work.itemsize], dropout=work.dropped):
                runs += [("forward", kernel, work, request.forward), ("backward", kernel, work, request.backward)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, (_, kernel, _, run) in enumerate(runs):
            with record_function(f"pass|{number}"):
                run(kernel)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocated = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in allocated]
    found = []
    for event in events:
        if event.name().startswith("pass|"):
            inside = allocated[bisect_left(times, event.start_ns()) : bisect_left(times, event.end_ns())]
            way, kernel, work, _ = runs[int(event.name().split("|")[1])]
            found.append((way, kernel, max(accumulate(change.nbytes() for change in inside)), work))
    assert len(found) == len(runs)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_peak_of_any_combination_is_what_is_allocated(kernel, measured):
    under, over = BOUNDS[kernel]
    off = []
    for way, of, actual, work in measured:
        if of == kernel and actual >= SMALLEST:
            forward = way == "forward"
            estimate = peak_bytes(work, kernel) if forward else gradient_peak_bytes(work, taps=False, kernel=kernel)
            if not (1 - under) * actual - SLACK <= estimate <= (1 + over) * actual + SLACK:
                off.append((way, round(estimate / actual, 3), actual, work))
    assert not off
    assert sum(of == kernel and actual >= SMALLEST for _, of, actual, _ in measured) > DRAWN // 2


def test_the_walk_comes_by_every_kind_of_entry():
    specs = [work.spec for work in walked()]
    assert len({spec.score.name for spec in specs}) > 3
    assert len({spec.normalizer.name for spec in specs}) > 2
    assert len({spec.position.name for spec in specs}) > 3
    assert len({mask.name for spec in specs for mask in spec.masks}) > 3
    assert {work.itemsize for work in walked()} == {2, 4, 8}
