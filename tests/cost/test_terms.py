"""The terms of a pass: every registered entry has its own, and there is more of them where there is more to do."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.random_specs import Lengths, draw_spec

from attention_contract.positions import Rope
from attention_contract.schemas.modules import Biases
from attention_contract.spec import AttentionSpec, Causal, SlidingWindow
from attention_service.core.kernels import KERNELS
from attention_service.core.multihead import Sizes
from attention_service.core.registry import variants
from attention_service.cost import Rates, Workload
from attention_service.cost.curves import Curves, guess
from attention_service.cost.terms import (
    FORMS,
    Term,
    forward_terms,
    gradient_terms,
    reading_terms,
    writing_terms,
)

RATES = Rates(flops_per_s=1e11, bytes_per_s=1e10, overhead_s=4e-5)
RAW = Workload(2, 64, 64, 4, 4, 16, 16, 4)
SIZES = Sizes(64, 4, 4, 16, 16, 64, 64, Biases())
MODULE = replace(RAW, sizes=SIZES, inputs=frozenset({"query"}))

FUSED = "product fused, 32 bits"


def names(terms):
    return {term.name for term in terms}


def seconds(terms):
    return Curves(RATES).seconds(terms)


@pytest.mark.parametrize("entry", variants(), ids=lambda entry: f"{entry.kind} {entry.name}")
def test_every_registered_entry_has_terms_of_its_own(entry):
    if entry.kind == "kernel":
        told = forward_terms(RAW, "blocked" if entry.name == "flex" else entry.name)
        others = [names(forward_terms(RAW, other.name)) for other in KERNELS if other.name not in {entry.name, "flex"}]
        assert entry.name == "flex" or all(names(told) - other for other in others)
        return
    plain = {"dot", "scaled_dot", "none", "exact"}
    rng = np.random.default_rng(0)
    for _ in range(400):
        kernel = entry.name if entry.kind == "method" and entry.name != "exact" else "materialized"
        spec = draw_spec(rng, kernel, Lengths(2, 64, 64, 0))
        parts = {"score": spec.score, "position": spec.position, "normalizer": spec.normalizer, "method": spec.method}
        drawn = {mask.name for mask in spec.masks} if entry.kind == "mask" else {parts[entry.kind].name}
        if entry.name in drawn:
            break
    else:
        pytest.fail(f"{entry.name} was not drawn in 400 specs: nothing would be measured of it")
    told = names(forward_terms(replace(RAW, spec=spec), kernel))
    assert entry.name in plain or any(entry.name in name for name in told)


@pytest.mark.parametrize("kernel", ["fused", "blocked", "materialized"])
@pytest.mark.parametrize("work", [RAW, MODULE], ids=["raw", "module"])
def test_more_to_do_takes_more_time(work, kernel):
    once = seconds(forward_terms(work, kernel))
    assert seconds(forward_terms(replace(work, queries=128, keys=128), kernel)) > once
    assert seconds(forward_terms(replace(work, batch=4), kernel)) > once
    assert seconds(forward_terms(replace(work, spec=AttentionSpec(position=Rope())), kernel)) > once
    assert seconds(forward_terms(replace(work, padded=True), kernel)) > once
    assert seconds(forward_terms(replace(work, taps=frozenset({"output", "weights"})), kernel)) > once
    back = seconds(gradient_terms(work, kernel))
    assert back > 1.5 * once
    assert seconds(gradient_terms(work, kernel, twice=True)) > back
    assert seconds(gradient_terms(work, kernel, checks=2)) > back


def test_a_causal_mask_halves_the_fused_kernel_and_a_window_thins_the_tiles():
    long = replace(RAW, queries=4096, keys=4096)
    causal = replace(long, spec=AttentionSpec(masks=[Causal()]))
    dense, half = (
        next(term.amount for term in forward_terms(work, "fused") if term.name.startswith("product fused"))
        for work in (long, causal)
    )
    assert half == pytest.approx(dense / 2, rel=0.001)
    window = replace(long, spec=AttentionSpec(masks=[SlidingWindow(left=64, right=0)]))
    dense, thin = (
        next(term.amount for term in forward_terms(work, "blocked") if term.name in {"product tiles", FUSED})
        for work in (long, window)
    )
    assert thin < dense / 8
    capped = replace(window, spec=window.spec.model_copy(update={"softcap": 5.0}))
    told = names(forward_terms(capped, "blocked"))
    assert "product tiles" in told, "a plain softmax alone is computed by the fused kernel"
    assert FUSED not in told


@pytest.mark.parametrize("form", FORMS)
def test_bodies_take_time_by_their_size(form):
    for terms in (reading_terms, writing_terms):
        small, large = seconds(terms(form, 1000, 4)), seconds(terms(form, 10_000_000, 4))
        assert small < large
    assert seconds(reading_terms("list", 10**6, 4)) > 10 * seconds(reading_terms("safetensors", 10**6, 4))


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_anything_measured_the_rates_stand_in():
    assert Curves(RATES).seconds([Term("product x", "flop", 1e9)]) == pytest.approx(1e-2)
    assert Curves(RATES).seconds([Term("start x", "start", 3)]) == pytest.approx(3e-5)
    assert guess(Term("bytes x", "byte", 1e6), RATES) == pytest.approx(np.log(4e-4))


def test_a_curve_goes_through_its_nodes_in_straight_lines_and_stays_level_beyond_them():
    logs = {"bytes x": 0.5, "bytes x, size 2^24": 0.4, "bytes x, size 2^28": -0.2, "bytes x, size 2^16": 1.0}

    def log_rate(size):
        term = Term("bytes x", "byte", 1.0, size)
        return np.log(Curves(RATES, logs).seconds([term])) - guess(term, RATES)

    assert log_rate(20) == pytest.approx(0.5)
    assert log_rate(22) == pytest.approx(0.7)
    assert log_rate(24) == pytest.approx(0.9)
    assert log_rate(28) == pytest.approx(0.7)
    assert log_rate(16) == pytest.approx(1.5)
    assert log_rate(18) == pytest.approx(1.0)
    assert log_rate(60) == log_rate(32)
    assert log_rate(0) == log_rate(8)


def test_marks_are_factors_and_slopes_are_powers():
    logs = {"product x, 16 bits": np.log(3), "product x, depth": 1.0}
    term = Term("product x", "flop", 1e6, marks=("16 bits",), slopes=(("depth", 2.0),))
    plain = replace(term, marks=(), slopes=())
    curves = Curves(RATES, logs)
    assert curves.seconds([term]) == pytest.approx(3 * np.exp(2) * curves.seconds([plain]))


def test_products_of_half_types_take_their_own_rate():
    term = Term("product x", "half flop", 1e9)
    known, slow = (Curves(replace(RATES, half_flops_per_s=rate)).seconds([term]) for rate in (None, 1e8))
    assert known == Curves(RATES).seconds([Term("product x", "flop", 1e9)])
    assert slow == pytest.approx(10 * Curves(replace(RATES, half_flops_per_s=1e9)).seconds([term]))
    assert slow > known
