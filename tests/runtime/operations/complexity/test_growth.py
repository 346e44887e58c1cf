"""Growth along a sweep, and the asymptotic orders."""

import pytest
import torch
from tests.cost.workloads import METHODS, approximate, module, raw

from attention_contract.spec import (
    AllOf,
    AnyOf,
    AttentionSpec,
    Block,
    Causal,
    Documents,
    Entmax15,
    FixedStride,
    GlobalTokens,
    PrefixLM,
    RandomBlocks,
    Sigmoid,
    SlidingWindow,
    Sparsemax,
    Strided,
)
from attention_service.cost import Rates, Roofline, flops
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity.growth import growth, memory_order, time_order
from attention_service.runtime.operations.complexity.subjects import OUTPUT, DeviceMemory, Subject
from attention_service.runtime.planning.blank_requests import exactly

RATES = Rates(flops_per_s=1e12, bytes_per_s=1e11, overhead_s=1e-5)
PLACE = DeviceMemory(Device(torch.device("cpu"), "a cpu", 2**40, Roofline(RATES)), 2**40, 2**40)
RAW = raw(queries=1024, new_keys=1024)
CAUSAL = AttentionSpec(masks=[Causal()])
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=128)])
LONGFORMER = AnyOf(of=[SlidingWindow(left=4, right=4), GlobalTokens(positions=[0])])
RANDOM = RandomBlocks(size=4, count=2)


def grown(bound, dimension, values, kernel):
    return growth(Subject("request", bound, OUTPUT, None, PLACE), dimension, values, kernel)


@pytest.mark.parametrize(("kernel", "memory"), [("fused", 1), ("materialized", 2)])
def test_exponents_of_length(kernel, memory):
    found = grown(RAW, "length", [2**12, 2**18, 2**19], kernel)
    assert found.dimension == "length"
    assert found.flops_exponent == pytest.approx(2, abs=0.001)
    assert found.peak_bytes_exponent == pytest.approx(memory, abs=0.01)
    assert found.time_exponent == pytest.approx(2, abs=0.01)


@pytest.mark.sampled(name=5)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_grows_with_the_length_and_not_with_its_square(name):
    bound = approximate(name, queries=2**16, new_keys=2**16)
    found = grown(bound, "length", [2**16, 2**18], METHODS[name].method.name)
    limit = 1.03 if METHODS[name].method.name != "nystrom" else 1.05
    assert 0.95 < found.flops_exponent < limit
    assert 0.95 < found.peak_bytes_exponent < limit
    assert found.time_order.startswith("O(n·")
    assert "n²" not in found.memory_order
    assert flops(bound, masked=False).total < flops(exactly(bound), masked=False).total / 10


@pytest.mark.parametrize("values", [[], [0], [1024], [0, 1024], [1024, 1024]])
def test_one_value_is_compared_with_its_double(values):
    assert grown(RAW, "length", values, "fused").flops_exponent == pytest.approx(2)
    assert grown(RAW, "past", values, "fused").flops_exponent <= 1


def test_a_window_grows_as_a_window():
    lengths = [2**12, 2**15, 2**16]
    for of, order in ((WINDOW, "O(n·w·d)"), (AttentionSpec(masks=[LONGFORMER]), "O(n·(w + g)·d)")):
        found = grown(raw(of, batch=1, heads=1, kv_heads=1), "length", lengths, "blocked")
        assert found.flops_exponent == pytest.approx(1, abs=0.02)
        assert found.peak_bytes_exponent == pytest.approx(1, abs=0.1)
        assert (found.time_order, found.memory_order) == (order, "O(n·d)")
    dense = grown(raw(batch=1, heads=1, kv_heads=1), "length", lengths, "blocked")
    assert dense.flops_exponent == pytest.approx(2, abs=0.01)
    assert (dense.time_order, dense.memory_order) == ("O(n²·d)", "O(n·d)")
    strided = raw(AttentionSpec(masks=[Strided(stride=64)]))
    assert time_order(strided, "length", "blocked").startswith("O(n²·d); over allowed pairs alone")


@pytest.mark.parametrize(
    ("masks", "order"),
    [
        ([], "O(n²·d)"),
        ([Causal(), SlidingWindow(left=5)], "O(n²·d); over allowed pairs alone O(n·w·d)"),
        ([LONGFORMER], "O(n²·d); over allowed pairs alone O(n·(w + g)·d)"),
        ([AnyOf(of=[SlidingWindow(left=4, right=4), Causal()])], "O(n²·d)"),
        ([AllOf(of=[SlidingWindow(left=4), Causal()])], "O(n²·d); over allowed pairs alone O(n·w·d)"),
        ([PrefixLM(length=3), SlidingWindow(left=9)], "O(n²·d); over allowed pairs alone O(n·(w + g)·d)"),
        ([Block(size=4)], "O(n²·d); over allowed pairs alone O(n·w·d)"),
        ([Strided(stride=4), Causal()], "O(n²·d); over allowed pairs alone O(n·(w + n/s)·d)"),
        ([FixedStride(stride=4), Causal()], "O(n²·d); over allowed pairs alone O(n·(w + n·c/s)·d)"),
        ([AnyOf(of=[LONGFORMER, RANDOM])], "O(n²·d); over allowed pairs alone O(n·(w + g + r)·d)"),
        ([Documents(lengths=[4])], "O(n²·d)"),
    ],
)
def test_time_order_says_what_the_kernels_do_and_what_the_masks_leave(masks, order):
    assert time_order(raw(AttentionSpec(masks=masks))) == order


def test_time_order_of_a_module_and_other_dimensions():
    assert time_order(module()) == "O(n²·d + n·d²)"
    assert time_order(RAW, "batch") == "O(b·m·n·d)"
    assert time_order(RAW, "past") == "O(m·p·d)"


@pytest.mark.parametrize("normalizer", [Sparsemax(), Entmax15()])
def test_sorting_adds_a_logarithm_to_the_time(normalizer):
    plain, sorting = (raw(AttentionSpec(normalizer=each)) for each in (Sigmoid(), normalizer))
    assert time_order(plain) == "O(n²·d)"
    assert time_order(sorting) == "O(n²·(d + h·log n))"
    assert time_order(sorting, "past") == "O(m·p·(d + h·log p))"


@pytest.mark.parametrize(
    ("of", "taps", "kernel", "order"),
    [
        (None, OUTPUT, "fused", "O(n·d)"),
        (CAUSAL, OUTPUT, "fused", "O(n·d)"),
        (WINDOW, OUTPUT, "fused", "O(n² + n·d)"),
        (None, frozenset({"weights"}), "fused", "O(h·n² + n·d)"),
        (None, frozenset({"weights"}), "blocked", "O(h·n² + n·d)"),
        (None, OUTPUT, "materialized", "O(h·n² + n·d)"),
    ],
)
def test_memory_order_counts_the_tensors_over_all_pairs(of, taps, kernel, order):
    assert memory_order(raw(of), taps, "length", kernel) == order
