"""Predicted time: a roofline of counted work, and the ranking of kernels."""

from dataclasses import replace

import pytest
from tests.cost.workloads import forward_seen, gradients_seen, module, raw

from attention_contract.spec import AnyOf, AttentionSpec, Causal, GlobalTokens, RandomBlocks, SlidingWindow
from attention_service.cost import Estimate, Factor, LearnedClock, Rates, Roofline, Traffic, kind_of, rank_seconds
from attention_service.cost.clock import carrying, transfer

RATES = Rates(flops_per_s=1e12, bytes_per_s=1e11, overhead_s=1e-5)
CPU = replace(
    RATES, overlaps=False, function_flops=100.0, reached=0.5, half_flops_per_s=1e10, starts=2.0, operation=0.25,
    double_flops_per_s=1e12 / 3,
)  # fmt: skip
COUNTS = Traffic(read=10**9, written=10**9, transcendentals=10**6, operations=8, products=10**11)


def test_arithmetic_and_traffic_overlap_on_a_gpu_and_follow_each_other_on_a_cpu():
    starting = (1 + 8 / 16) * 1e-5
    assert RATES.seconds(COUNTS, 4) == pytest.approx(0.1 + starting)
    assert RATES.seconds(replace(COUNTS, products=0), 4) == pytest.approx(0.02 + starting)
    assert CPU.seconds(COUNTS, 4) == pytest.approx(0.1 + 1e-4 + 0.04 + (2 + 2) * 1e-5)


def test_products_of_half_types_and_of_float64_have_rates_of_their_own_on_a_cpu():
    products, none = Traffic(products=10**9), Traffic()
    half = replace(products, half_products=10**9)
    base = CPU.seconds(none, 4)
    assert CPU.seconds(products, 8) - base == pytest.approx(3e-3)
    assert CPU.seconds(half, 2) - base == pytest.approx(0.1)
    assert RATES.seconds(half, 2) == RATES.seconds(products, 8) == RATES.seconds(products, 4)


def test_a_factor_of_its_kind_corrects_a_prediction():
    base, kind = Roofline(RATES), kind_of("forward", "fused", "float32")
    clock = LearnedClock(base, {kind: Factor(shortest=-9.0, longest=-2.0, short=0.5, long=0.5, low=-0.1, high=0.2)})
    plain = base.predict(COUNTS, 4, kind).median
    found = clock.predict(COUNTS, 4, kind)
    assert found.median == pytest.approx(plain * 1.6487, rel=1e-4)
    assert found.low < found.median < found.high
    assert clock.predict(COUNTS, 4, kind_of("forward", "blocked", "float32")) == base.predict(COUNTS, 4, kind)


def test_what_is_carried_takes_longest_as_text_and_nothing_moves_within_one_memory():
    clock = Roofline(RATES)
    text, encoded, bytes_ = (carrying(clock, form, 10**6, 4).median for form in ("list", "base64", "safetensors"))
    assert text > encoded > bytes_ > 0
    assert transfer(clock, 10**6) == Estimate(0.0, 0.0, 0.0)
    assert transfer(Roofline(replace(RATES, link_bytes_per_s=1e9)), 10**6).median == pytest.approx(1e-3 + 1e-5)


def seconds(bound, kernel, cost_of=forward_seen):
    return CPU.seconds(cost_of(bound, kernel).total(), bound.itemsize)


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
def test_more_work_takes_longer(kernel):
    small, large = (module(queries=length, new_keys=length) for length in (256, 1024))
    assert seconds(small, kernel) < seconds(large, kernel)
    assert seconds(small, kernel) < seconds(small, kernel, gradients_seen)


@pytest.mark.sampled(kernel=1)
@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
def test_masks_of_many_operations_are_predicted_to_take_their_time(kernel):
    def of(*masks):
        return seconds(raw(AttentionSpec(masks=[AnyOf(of=list(masks))])), kernel)

    few, many = RandomBlocks(size=1, count=2), RandomBlocks(size=1, count=64)
    assert of(many) >= of(few)
    assert of(*[many] * 8) > of(many)
    listed = [GlobalTokens(positions=list(range(count))) for count in (2, 4096)]
    assert of(listed[1]) > of(listed[0])


WINDOW = AttentionSpec(masks=[Causal(), SlidingWindow(left=64)])


@pytest.mark.parametrize(
    ("of", "length", "order"),
    [
        (AttentionSpec(), 64, ["fused", "materialized", "blocked"]),
        (AttentionSpec(), 4096, ["fused", "blocked", "materialized"]),
        (WINDOW, 16384, ["blocked", "fused", "materialized"]),
    ],
)
def test_kernels_are_ranked_by_what_they_state_of_themselves(of, length, order):
    bound = raw(of, batch=1, queries=length, new_keys=length)
    assert sorted(order, key=lambda name: rank_seconds(bound, name, CPU, backward=False)) == order


def test_gradients_of_a_few_queries_in_half_types_take_stages():
    bound = raw(queries=1, new_keys=1, past=500, itemsize=2)
    first = min(("fused", "blocked", "materialized"), key=lambda name: rank_seconds(bound, name, CPU, backward=True))
    assert first == "materialized"
