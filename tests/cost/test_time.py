"""Predicted time, growth, and the account of one shape."""

from dataclasses import replace
from time import perf_counter

import pytest
from tests.cost.workloads import METHODS, approximate

from attention_contract.schemas.complexity import Shape
from attention_contract.schemas.modules import Biases
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
from attention_service.core.multihead import Sizes
from attention_service.cost import (
    CurveClock,
    Curves,
    Rates,
    Roofline,
    Workload,
    backward_flops,
    cost_of,
    exactly,
    flops,
    growth,
    memory_order,
    moved_bytes,
    parameter_count,
    peak_bytes,
    predicted_gradient_seconds,
    predicted_seconds,
    time_order,
)

KERNELS = ("fused", "materialized")
SIZES = Sizes(512, 8, 8, 64, 64, 512, 512, Biases())
RAW = Workload(2, 1024, 1024, 8, 8, 64, 64, 4)
MODULE = replace(RAW, sizes=SIZES, inputs=frozenset({"query"}))
CAUSAL = AttentionSpec(masks=[Causal()])
WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=128)])
RATES = Rates(flops_per_s=1e12, bytes_per_s=1e11, overhead_s=1e-5)
CLOCK = Roofline(RATES)
NO_LIMIT = 1e300


@pytest.mark.parametrize("kernel", KERNELS)
def test_arithmetic_and_traffic_overlap_in_a_fused_kernel_and_follow_each_other_in_stages(kernel):
    counted = flops(MODULE, masked=False).total
    arithmetic = predicted_seconds(MODULE, kernel, Rates(1e9, NO_LIMIT, 0.5))
    traffic = predicted_seconds(MODULE, kernel, Rates(NO_LIMIT, 1e9, 0.5))
    assert arithmetic == pytest.approx(counted / 1e9 + 0.5)
    assert traffic == pytest.approx(moved_bytes(MODULE, kernel) / 1e9 + 0.5)
    together = max(arithmetic, traffic) if kernel == "fused" else arithmetic + traffic - 0.5
    assert predicted_seconds(MODULE, kernel, Rates(1e9, 1e9, 0.5)) == pytest.approx(together)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_take_the_forward_pass_and_the_backward_pass(kernel):
    rates = Rates(1e9, NO_LIMIT, 0.0)
    counted = flops(RAW, masked=False).total + backward_flops(RAW, masked=False, fused=kernel == "fused").total
    assert predicted_gradient_seconds(RAW, kernel, rates) == pytest.approx(counted / 1e9)


def test_only_the_fused_kernel_skips_what_a_causal_mask_hides():
    causal = replace(RAW, spec=CAUSAL)
    rates = Rates(1e9, NO_LIMIT, 0.0)
    assert predicted_seconds(causal, "fused", rates) == pytest.approx(flops(causal, masked=True).total / 1e9, rel=0.15)
    assert predicted_seconds(causal, "materialized", rates) == flops(causal, masked=False).total / 1e9
    window = replace(RAW, spec=WINDOW)
    assert predicted_seconds(window, "fused", rates) == flops(window, masked=False).total / 1e9


def test_the_materialized_kernel_moves_every_score():
    assert moved_bytes(RAW, "materialized") - moved_bytes(RAW, "fused") > 20 * RAW.pairs * RAW.heads
    # Keys and values looked through; queries, keys and values read; the context written, and a number for each query.
    number = RAW.batch * RAW.heads * RAW.queries * 4
    assert moved_bytes(RAW, "fused") == pytest.approx(number * (64 * (2 + 3 + 1) + 1), rel=1e-5)


def test_returned_weights_are_computed_again_beside_a_fused_kernel():
    some = replace(RAW, taps=frozenset({"output", "weights"}), selected_queries=8)
    every = replace(some, selected_queries=None)
    times = [predicted_seconds(work, "fused", RATES) for work in (RAW, some, every)]
    assert times == sorted(times)
    assert predicted_seconds(every, "materialized", RATES) == predicted_seconds(RAW, "materialized", RATES)


@pytest.mark.parametrize(("kernel", "memory"), [("fused", 1), ("materialized", 2)])
def test_exponents_of_length(kernel, memory):
    grown = growth(RAW, "length", [2**12, 2**18, 2**19], kernel, CLOCK)
    assert grown.dimension == "length"
    assert grown.flops_exponent == pytest.approx(2, abs=0.001)
    assert grown.peak_bytes_exponent == pytest.approx(memory, abs=0.01)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_grows_with_the_length_and_not_with_its_square(name):
    work = approximate(name, queries=2**16, keys=2**16)
    found = growth(work, "length", [2**16, 2**18], name, CLOCK)
    limit = 1.03 if METHODS[name].method.name != "nystrom" else 1.05
    assert 0.95 < found.flops_exponent < limit
    assert 0.95 < found.peak_bytes_exponent < limit
    assert found.time_order.startswith("O(n·")
    assert "n²" not in found.memory_order
    exact = exactly(work)
    assert flops(work, masked=False).total < flops(exact, masked=False).total / 10
    assert peak_bytes(work, name) < peak_bytes(exact, "materialized") / 10


@pytest.mark.slow
def test_a_report_of_the_error_costs_exact_attention_besides():
    work = approximate("performer, causal")
    told = replace(work, reported=True)
    assert peak_bytes(told, "performer") > peak_bytes(work, "performer")
    more = predicted_seconds(told, "performer", RATES) - predicted_seconds(work, "performer", RATES)
    assert more >= predicted_seconds(exactly(work), "materialized", RATES)
    longer = approximate("performer, causal", queries=2**14, keys=2**14, reported=True)
    assert peak_bytes(longer, "performer") < peak_bytes(exactly(longer), "materialized") / 5  # it goes block by block


@pytest.mark.parametrize("values", [[], [0], [1024], [0, 1024], [1024, 1024]])
def test_one_value_is_compared_with_its_double(values):
    assert growth(RAW, "length", values, "fused", CLOCK).flops_exponent == pytest.approx(2)
    assert growth(RAW, "past", values, "fused", CLOCK).flops_exponent <= 1


LONGFORMER = AnyOf(of=[SlidingWindow(left=4, right=4), GlobalTokens(positions=[0])])
RANDOM = RandomBlocks(size=4, count=2)


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
    assert time_order(replace(RAW, spec=AttentionSpec(masks=masks))) == order


def test_time_order_of_a_module_and_other_dimensions():
    assert time_order(MODULE) == "O(n²·d + n·d²)"
    assert time_order(RAW, "batch") == "O(b·m·n·d)"
    assert time_order(RAW, "past") == "O(m·p·d)"


@pytest.mark.parametrize("normalizer", [Sparsemax(), Entmax15()])
def test_sorting_adds_a_logarithm_to_the_time(normalizer):
    plain, work = (replace(RAW, spec=AttentionSpec(normalizer=each)) for each in (Sigmoid(), normalizer))
    assert time_order(plain) == "O(n²·d)"
    assert time_order(work) == "O(n²·(d + h·log n))"
    assert time_order(work, "past") == "O(m·p·(d + h·log p))"
    assert moved_bytes(RAW, "materialized") < moved_bytes(plain, "materialized") < moved_bytes(work, "materialized")


@pytest.mark.parametrize(
    ("work", "kernel", "order"),
    [
        (RAW, "fused", "O(n·d)"),
        (replace(RAW, spec=CAUSAL), "fused", "O(n·d)"),
        (replace(RAW, spec=WINDOW), "fused", "O(n² + n·d)"),
        (replace(RAW, taps=frozenset({"weights"})), "fused", "O(h·n² + n·d)"),
        (RAW, "materialized", "O(h·n² + n·d)"),
    ],
)
def test_memory_order_counts_the_tensors_over_all_pairs(work, kernel, order):
    assert memory_order(work, "length", kernel) == order


def test_the_cost_of_a_shape_is_that_of_its_workload():
    work = replace(MODULE, spec=CAUSAL, taps=frozenset({"output", "weights"}))
    cost = cost_of(work, Shape(batch=3, queries=5, past=7), "fused", Roofline(RATES))
    same = replace(work, batch=3, queries=5, keys=12, past=7)
    assert cost.shape == Shape(batch=3, queries=5, keys=5, past=7)
    assert cost.pairs == 3 * 5 * 12
    assert cost.allowed_pairs == 3 * sum(range(8, 13))
    assert cost.forward.dense == flops(same, masked=False)
    assert cost.forward.masked == flops(same, masked=True)
    assert cost.backward_fused.dense.matmul > cost.backward.dense.matmul == 2 * cost.forward.dense.matmul
    assert cost.parameter_bytes == 4 * parameter_count(work)
    assert cost.kv_cache_bytes == 3 * 12 * cost.kv_cache_bytes_per_token
    assert cost.peak_bytes.request == peak_bytes(same, "fused") >= cost.peak_bytes.fused
    assert cost.predicted_ms == predicted_seconds(same, "fused", RATES) * 1e3


@pytest.mark.parametrize("work", [RAW, replace(MODULE, spec=WINDOW)], ids=["raw", "module with a window"])
def test_planning_is_quick(work):
    """Every request is planned: less than 0.2 ms for one estimate, with room for a busy machine."""
    for estimate in (lambda new: peak_bytes(new, "materialized"), lambda new: predicted_seconds(new, "fused", RATES)):
        times = []
        for new in [replace(work) for _ in range(50)]:  # of which nothing is known yet
            started = perf_counter()
            estimate(new)
            times.append(perf_counter() - started)
        assert min(times) < 2e-4


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
@pytest.mark.parametrize("clock", [CLOCK, CurveClock(Curves(RATES))], ids=["rates", "curves"])
def test_masks_of_many_operations_are_predicted_to_take_their_time(clock, kernel):
    def seconds(*masks):
        work = replace(RAW, spec=AttentionSpec(masks=[AnyOf(of=list(masks))]))
        return clock.forward(work, kernel).median

    few, many = RandomBlocks(size=1, count=2), RandomBlocks(size=1, count=64)
    assert seconds(many) > seconds(few) + RATES.overhead_s
    assert seconds(*[many] * 8) > seconds(many) + 7 * (seconds(many) - seconds(few))
    listed = [GlobalTokens(positions=list(range(count))) for count in (2, 4096)]
    assert seconds(listed[1]) > seconds(listed[0]) + 4 * RATES.overhead_s
