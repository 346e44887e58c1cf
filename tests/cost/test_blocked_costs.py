"""What the blocked kernel is said to do is what it does, and what the planner makes of it."""

from dataclasses import replace
from time import process_time

import pytest
import torch

from attention_contract.spec import (
    AnyOf,
    AttentionSpec,
    Causal,
    Entmax15,
    GlobalTokens,
    SlidingWindow,
    Strided,
)
from attention_service.core.kernels import KERNELS, blocked
from attention_service.core.kernels import query_blocks as counted
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.query_blocks import Cut, Layout, query_blocks, rehearsed_blocks
from attention_service.core.masks.rules import pattern_of
from attention_service.cost import (
    Rates,
    Roofline,
    Workload,
    gradient_peak_bytes,
    growth,
    memory_order,
    peak_bytes,
    time_order,
)
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.kernel_choice import Computation, choose_kernel

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=5e-5)
DEVICE = Device(torch.device("cpu"), "CPU", 2**40, Roofline(RATES))
RAW = Workload(1, 8192, 8192, 1, 1, 64, 64, 4)
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=512)])
LONGFORMER = AttentionSpec(masks=[AnyOf(of=[SlidingWindow(left=256, right=256), GlobalTokens(positions=[0, 1])])])
NO_ROOM, ROOM = 0, 2**62


@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}, {"normalizer": Entmax15()}], ids=["fused", "softcap", "rows"])
@pytest.mark.parametrize("real", [None, 8, 18])
def test_pairs_are_counted_as_the_kernel_cuts_them(more, real, every_mask, monkeypatch, make_problem):
    small = Cut(8, 2**8, cell=2)
    monkeypatch.setattr(blocked, "CUT", small)
    monkeypatch.setattr(cpu_blocks, "CUT", replace(small, shared=True))
    spec = AttentionSpec(masks=every_mask, **more)
    problem = make_problem(batch=3, queries=21, keys=19, spec=spec)
    work = Workload(3, 21, 19, 2, 1, 2, 3, 8, spec=spec)
    if real is not None:
        problem = replace(problem, key_lengths=torch.full((3,), real))
        work = replace(work, padded=True, real_keys=real)
    by_fused = cpu_blocks.takes(problem)
    assert by_fused == cpu_blocks.takes_sizes(work) == (bool(every_mask) and not more and real is None)
    cut = cpu_blocks.CUT if by_fused else small
    done = [
        block.problem.q.shape[0] * len(block.queries) * sum(len(span) for span in block.keys)
        for block in query_blocks(problem, cut)
    ]
    assert KERNELS["blocked"].make().executed(work).pairs == sum(done)


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(masks=[Causal()]), WINDOW, LONGFORMER], ids=str)
def test_beyond_counting_the_estimate_is_near_and_quick(spec, monkeypatch):
    work, kernel = replace(RAW, spec=spec), KERNELS["blocked"].make()
    exact = kernel.executed(work).pairs
    monkeypatch.setattr(counted, "_MOST_CELLS", 0)
    counted._few.cache_clear()
    assert kernel.executed(work).pairs == pytest.approx(exact, rel=0.15)
    started = process_time()
    largest = kernel.executed(replace(work, queries=2**31, keys=2**31))
    assert process_time() - started < 1
    assert 0 < largest.pairs <= 2**62


def test_the_largest_block_is_rehearsed(every_mask):
    work = replace(RAW, queries=300, keys=280, spec=AttentionSpec(masks=every_mask, softcap=2.0))
    few = [len(queries) * sum(map(len, keys)) for _, queries, keys, _ in rehearsed_blocks(work, blocked.CUT)]
    pattern = pattern_of(every_mask, 300, 280) if every_mask else None
    every = Layout(pattern, 0, 300, 280).blocks(blocked.CUT)
    assert max(few) == max(len(queries) * sum(map(len, keys)) for queries, keys in every)


def test_a_window_grows_as_a_window():
    lengths = [2**12, 2**15, 2**16]
    for spec, order in ((WINDOW, "O(n·w·d)"), (LONGFORMER, "O(n·(w + g)·d)")):
        grown = growth(replace(RAW, spec=spec), "length", lengths, "blocked", Roofline(RATES))
        assert grown.flops_exponent == pytest.approx(1, abs=0.02)
        assert grown.peak_bytes_exponent == pytest.approx(1, abs=0.1)
        assert grown.time_order == order
        assert grown.memory_order == "O(n·d)"
    dense = growth(RAW, "length", lengths, "blocked", Roofline(RATES))
    assert dense.flops_exponent == pytest.approx(2, abs=0.01)
    assert (dense.time_order, dense.memory_order) == ("O(n²·d)", "O(n·d)")
    strided = replace(RAW, spec=AttentionSpec(masks=[Strided(stride=64)]))
    assert time_order(strided, "length", "blocked").startswith("O(n²·d); over allowed pairs alone")
    tapped = replace(RAW, taps=frozenset({"weights"}))
    assert memory_order(tapped, "length", "blocked") == "O(h·n² + n·d)"


@pytest.mark.parametrize("told", [peak_bytes, gradient_peak_bytes])
@pytest.mark.parametrize(("length", "past"), [(2**17 - 1, 0), (2**17, 70_000), (10**6, 0)])
def test_what_is_too_long_to_go_through_needs_as_much_for_a_token(told, length, past):
    short, long = (replace(RAW, queries=n, keys=n + past, past=past, spec=WINDOW) for n in (2**14, length))
    tokens = [2 * each.queries + 3 * each.keys for each in (short, long)]
    needs = [told(each, "blocked") / count for each, count in zip((short, long), tokens, strict=True)]
    assert needs[1] == pytest.approx(needs[0], rel=0.25)


def chosen(spec, length, room=ROOM, **purpose):
    return choose_kernel(
        replace(RAW, queries=length, keys=length, spec=spec), "float32", DEVICE, None, room, Computation(**purpose)
    )


def test_the_planner_takes_what_exploits_the_mask_and_what_fits():
    capped = AttentionSpec(softcap=30.0)
    assert chosen(AttentionSpec(), 64) == "fused"
    assert chosen(AttentionSpec(), 10**5) == "fused"
    assert chosen(WINDOW, 10**5) == chosen(LONGFORMER, 2**14, operation="gradients") == "blocked"
    assert chosen(capped, 64) == "materialized"
    assert chosen(capped, 512, room=2**62, keeps_weights=True) == "materialized"
    assert chosen(capped, 10**5) == chosen(capped, 10**5, room=2**36, operation="gradients") == "blocked"


def test_a_kernel_that_does_not_fit_is_passed_over():
    capped = AttentionSpec(softcap=30.0)
    work = replace(RAW, queries=1024, keys=1024, spec=capped, heads=8, kv_heads=8)
    blocked, materialized = (peak_bytes(work, kernel) for kernel in ("blocked", "materialized"))
    assert blocked < materialized
    slow = replace(
        DEVICE, clock=Roofline(replace(RATES, overhead_s=1.0))
    )  # on which a tile costs more than it is worth
    assert choose_kernel(work, "float32", slow, None, materialized) == "materialized"
    assert choose_kernel(work, "float32", slow, None, materialized - 1) == "blocked"
    assert choose_kernel(work, "float32", slow, None, NO_ROOM) == "blocked", "the one that comes nearest"
