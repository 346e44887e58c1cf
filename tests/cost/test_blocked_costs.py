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
from attention_service.core.kernels import tiling
from attention_service.core.kernels import touched as counted
from attention_service.core.kernels.blocked import _blocks
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.tiling import Tiling
from attention_service.cost import (
    Rates,
    Roofline,
    Workload,
    gradient_peak_bytes,
    growth,
    memory_order,
    peak_bytes,
    time_order,
    touched,
)
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.kernel_choice import Computation, choose_kernel

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=5e-5)
DEVICE = Device(torch.device("cpu"), "CPU", 2**40, Roofline(RATES))
RAW = Workload(1, 8192, 8192, 1, 1, 64, 64, 4)
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=512)])
LONGFORMER = AttentionSpec(masks=[AnyOf(of=[SlidingWindow(left=256, right=256), GlobalTokens(positions=[0, 1])])])
NO_ROOM, ROOM = 0, 2**62


@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}, {"normalizer": Entmax15()}], ids=["fused", "streamed", "rows"])
def test_tiles_are_counted_as_the_kernel_cuts_them(more, every_mask, monkeypatch, make_problem):
    monkeypatch.setattr(tiling, "TILING", Tiling(8, 8, 2, 2**8))
    monkeypatch.setattr(tiling, "WHOLE", Tiling(8, 2**62, 2, 2**10))
    spec = AttentionSpec(masks=every_mask, **more)
    problem = make_problem(batch=3, queries=21, keys=19, spec=spec)
    found = touched(Workload(3, 21, 19, 2, 1, 2, 3, 8, spec=spec))
    whole_rows = cpu_blocks.takes(problem) or "normalizer" in more
    assert cpu_blocks.takes(problem) == (bool(every_mask) and not more)
    through = cpu_blocks.every_block if not more and every_mask else _blocks
    done = [
        (group.problem.q.shape[0], block.stop - block.start, [strip.width for strip in block.strips])
        for group, block in through(problem, whole_rows=whole_rows)
    ]
    assert found.pairs == sum(sequences * rows * sum(widths) for sequences, rows, widths in done)
    assert found.blocks == len(done)
    assert found.strips == sum(max(len(widths), whole_rows) for _, _, widths in done)
    assert found.widest == max(sum(widths) for _, _, widths in done) or not every_mask


@pytest.mark.parametrize("real", [1, 8, 18])
def test_padding_of_all_sequences_is_not_counted(real, every_mask, monkeypatch, make_problem):
    monkeypatch.setattr(tiling, "TILING", Tiling(8, 8, 2, 2**8))
    problem = make_problem(batch=3, queries=21, keys=19, spec=AttentionSpec(masks=every_mask))
    problem = replace(problem, key_lengths=torch.full((3,), real))
    whole_cells = -(-real // 2) * 2
    work = Workload(3, 21, 19, 2, 1, 2, 3, 8, spec=problem.spec, padded=True, real_keys=whole_cells)
    done = [(group, block) for group, block in _blocks(problem, whole_rows=False)]
    found = touched(work)
    assert found.strips == sum(len(block.strips) for _, block in done)
    assert found.pairs == sum(
        group.problem.q.shape[0] * (block.stop - block.start) * sum(strip.width for strip in block.strips)
        for group, block in done
    )


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(masks=[Causal()]), WINDOW, LONGFORMER], ids=str)
def test_beyond_counting_the_estimate_is_near_and_quick(spec, monkeypatch):
    work = replace(RAW, spec=spec)
    exact = touched(work)
    monkeypatch.setattr(counted, "_MOST_CELLS", 0)
    estimate = touched(work)
    assert exact.pairs <= 1.3 * estimate.pairs <= 1.95 * exact.pairs
    assert exact.blocks == estimate.blocks
    started = process_time()
    largest = touched(replace(work, queries=2**31, keys=2**31))
    assert process_time() - started < 1
    assert 0 < largest.pairs <= 2**62


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
