"""What the blocked kernel is said to do is what it does, and what the planner makes of it."""

from dataclasses import replace
from time import process_time

import pytest
import torch
from tests.cost.workloads import forward_seen, gradients_seen, raw, resized

from attention_contract.spec import (
    AnyOf,
    AttentionSpec,
    Causal,
    Entmax15,
    GlobalTokens,
    SlidingWindow,
)
from attention_service.core.kernels import KERNELS, Needs, blocked
from attention_service.core.kernels import query_blocks as counted
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.query_blocks import Cut, PositionLayout, query_blocks, rehearsed_blocks
from attention_service.core.masks.rules import pattern_of
from attention_service.cost import Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.kernel_choice import able_kernels, choose_kernel

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=5e-5)
DEVICE = Device(torch.device("cpu"), "CPU", 2**40, Roofline(RATES))
ONE = {"batch": 1, "heads": 1, "kv_heads": 1}
LONG = ONE | {"queries": 8192, "new_keys": 8192}
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=512)])
LONGFORMER = AttentionSpec(masks=[AnyOf(of=[SlidingWindow(left=256, right=256), GlobalTokens(positions=[0, 1])])])
NO_BYTES, FREE_BYTES = 0, 2**62


@pytest.mark.sampled
@pytest.mark.parametrize("more", [{}, {"softcap": 5.0}, {"normalizer": Entmax15()}], ids=["fused", "softcap", "rows"])
@pytest.mark.parametrize("real", [None, 8, 18])
def test_pairs_are_counted_as_the_kernel_cuts_them(more, real, every_mask, monkeypatch, make_problem):
    small = Cut(8, 2**8, cell=2)
    monkeypatch.setattr(blocked, "CUT", small)
    monkeypatch.setattr(cpu_blocks, "CUT", replace(small, shared=True))
    spec = AttentionSpec(masks=every_mask, **more)
    problem = make_problem(batch=3, queries=21, keys=19, spec=spec)
    small_sizes = {"queries": 21, "new_keys": 19, "heads": 2, "kv_heads": 1, "head_dim": 2, "value_dim": 3}
    padding = {} if real is None else {"padded": True, "real_keys": real}
    work = raw(spec, batch=3, itemsize=8, **small_sizes, **padding)
    if real is not None:
        problem = replace(problem, key_lengths=torch.full((3,), work.real_keys))
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
    work, kernel = raw(spec, **LONG), KERNELS["blocked"].make()
    exact = kernel.executed(work).pairs
    monkeypatch.setattr(counted, "_MOST_CELLS", 0)
    counted._few.cache_clear()
    assert kernel.executed(work).pairs == pytest.approx(exact, rel=0.15)
    started = process_time()
    largest = kernel.executed(resized(work, queries=2**31, new_keys=2**31))
    assert process_time() - started < 1
    assert 0 < largest.pairs <= 2**62


def test_the_largest_block_is_rehearsed(every_mask):
    work = raw(AttentionSpec(masks=every_mask, softcap=2.0), **ONE, queries=300, new_keys=280)
    few = [len(queries) * sum(map(len, keys)) for _, queries, keys, _ in rehearsed_blocks(work, blocked.CUT)]
    pattern = pattern_of(every_mask, 300, 280) if every_mask else None
    every = PositionLayout(pattern, 0, 300, 280).blocks(blocked.CUT)
    assert max(few) == max(len(queries) * sum(map(len, keys)) for queries, keys in every)


@pytest.mark.parametrize("cost_of", [forward_seen, gradients_seen])
@pytest.mark.parametrize(("length", "past"), [(2**17 - 1, 0), (2**17, 70_000), (10**6, 0)])
def test_what_is_too_long_to_go_through_needs_as_much_for_a_token(cost_of, length, past):
    short, long = (raw(WINDOW, **ONE, queries=n, new_keys=n, past=past) for n in (2**14, length))
    tokens = [2 * each.queries + 3 * each.keys for each in (short, long)]
    needs = [cost_of(each, "blocked").peak_bytes / count for each, count in zip((short, long), tokens, strict=True)]
    assert needs[1] == pytest.approx(needs[0], rel=0.25)


def chosen(bound, budget=FREE_BYTES, device=DEVICE, **needs):
    backward = needs.pop("backward", False)
    able = able_kernels(bound, device, None, Needs(**needs))
    cost_of = gradients_seen if backward else forward_seen
    return choose_kernel(
        bound, able, device.clock, budget, lambda kernel: cost_of(bound, kernel).peak_bytes, backward=backward
    )


def of_length(spec, length):
    return raw(spec, **ONE, queries=length, new_keys=length)


def test_the_planner_takes_what_exploits_the_mask_and_what_fits():
    capped = AttentionSpec(softcap=30.0)
    assert chosen(raw(queries=64, new_keys=64)) == "fused"
    assert chosen(of_length(AttentionSpec(), 10**5)) == "fused"
    assert chosen(of_length(WINDOW, 10**5)) == chosen(of_length(LONGFORMER, 2**14), backward=True) == "blocked"
    assert chosen(of_length(capped, 64)) == "materialized"
    assert chosen(of_length(capped, 512), budget=2**62, taps_gradient=True) == "materialized"
    assert (
        chosen(of_length(capped, 10**5)) == chosen(of_length(capped, 10**5), budget=2**36, backward=True) == "blocked"
    )


def test_a_kernel_that_does_not_fit_is_passed_over():
    work = raw(AttentionSpec(softcap=30.0), batch=1, heads=8, kv_heads=8, queries=1024, new_keys=1024)
    blocked, materialized = (forward_seen(work, kernel).peak_bytes for kernel in ("blocked", "materialized"))
    assert blocked < materialized
    # A device on which a tile costs more than it is worth.
    slow = replace(DEVICE, clock=Roofline(replace(RATES, overhead_s=1.0)))
    assert chosen(work, materialized, slow) == "materialized"
    assert chosen(work, materialized - 1, slow) == "blocked"
    assert chosen(work, NO_BYTES, slow) == "blocked", "the one that comes nearest"
