"""Factors learned from runs: which runs count, what is learned of them, when the clock changes, and the file."""

import json
import math

import numpy as np
import pytest
import torch

from attention_service.cost import Estimate, Factor, Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.planning.learned_factors import SHORTEST_S, SPACING_S, LearnedFactors
from attention_service.runtime.planning.prediction_accuracy import TimedRun
from attention_service.runtime.planning.run_ratios import FEWEST

BASE = Roofline(Rates(1e10, 1e10, 1e-5))
LONG = 1e-2


def run(ratio, kernel="fused", purpose="forward", predicted=LONG, processor=None):
    return TimedRun(kernel, purpose, Estimate.within(predicted, 3), ratio * predicted, 0, processor=processor)


def taught(ratios, dtype="float32", factors=None, start=0.0, **facts):
    factors = factors or LearnedFactors(BASE)
    for at, ratio in enumerate(ratios):
        factors.see(run(ratio, **facts), dtype, start + at)
    return factors


def test_the_factor_is_the_median_of_the_last_runs_of_a_kind_and_dtype(rng):
    old, last = rng.lognormal(2.0, 0.2, 100), rng.lognormal(0.7, 0.2, 64)
    factors = taught([*old, *last])
    taught([5.0] * FEWEST, "bfloat16", factors)
    taught([0.5] * FEWEST, factors=factors, purpose="gradients")
    clock = factors.changed(0.0)
    found = clock.factors["forward fused float32"]
    assert found.middle(LONG) == pytest.approx(np.median(np.log(last)))
    low, high = np.quantile(np.log(last), (0.05, 0.95)) - found.middle(LONG)
    assert -math.log(2) < found.low < low < 0 < high < found.high < math.log(2)
    assert clock.factors["forward fused bfloat16"].middle(LONG) == pytest.approx(math.log(5))
    assert clock.factors["gradients fused float32"].middle(LONG) == pytest.approx(math.log(0.5))
    assert len(clock.factors) == 3


def test_short_and_long_runs_have_factors_of_their_own(rng):
    factors = LearnedFactors(BASE)
    sizes = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), 64))
    for at, size in enumerate(sizes):
        factors.see(run(2 * (size / 0.01) ** -0.3, predicted=size), "float32", at)
    factor = factors.changed(0.0).factors["forward fused float32"]
    for size in (sizes.min(), 0.01, sizes.max()):
        assert factor.applied(size).median == pytest.approx(2 * size * (size / 0.01) ** -0.3, rel=0.05)
    for beyond, end, known in ((1e-6, sizes.min(), factor.short), (10.0, sizes.max(), factor.long)):
        assert factor.middle(beyond) == pytest.approx(known) == factor.middle(end)


def test_a_steep_trend_leaves_longer_predictions_longer():
    factors = LearnedFactors(BASE)
    for at in range(64):
        size = 1e-3 * 1.1**at
        factors.see(run(1e-3 / size, predicted=size), "float32", at)  # all take the same time
    factor = factors.changed(0.0).factors["forward fused float32"]
    medians = [factor.applied(size).median for size in np.geomspace(1e-4, 1.0, 50)]
    assert (np.diff(medians) > 0).all()


@pytest.mark.parametrize("seconds", [1e-6, 1e-3, 5e-3, 0.1, 10.0])
def test_a_factor_can_be_undone(seconds):
    factor = Factor(math.log(1e-3), math.log(0.1), 0.9, -0.4, -0.1, 0.2)
    assert factor.undone(factor.applied(seconds).median) == pytest.approx(seconds)


def test_bounds_of_many_runs_hold_nine_in_ten_of_the_next(rng):
    clock = taught(rng.lognormal(0.5, 0.4, 64)).changed(0.0)
    factor = clock.factors["forward fused float32"]
    low, high = factor.middle(LONG) + factor.low, factor.middle(LONG) + factor.high
    assert 0.85 < np.mean((np.log(rng.lognormal(0.5, 0.4, 10_000)) > low) & (rng.normal(0.5, 0.4, 10_000) < high)) <= 1


@pytest.mark.parametrize(
    "facts", [{"predicted": SHORTEST_S / 2}, {"processor": 0.5 * 3 * LONG}], ids=["too short", "waited for a processor"]
)
def test_runs_that_say_nothing_of_the_device_do_not_count(facts):
    assert taught([3.0] * 100, **facts).changed(0.0) is None


def test_runs_of_one_moment_count_once():
    factors = LearnedFactors(BASE)
    for index in range(100):
        factors.see(run(3.0), "float32", index * SPACING_S / 100)
    assert factors.changed(0.0) is None


def test_few_runs_change_nothing():
    assert taught([3.0] * (FEWEST - 1)).changed(0.0) is None


def test_what_is_predicted_with_a_factor_is_not_corrected_twice():
    factors = taught([3.0] * 64)
    clock = factors.changed(0.0)
    assert clock.factors["forward fused float32"].middle(LONG) == pytest.approx(math.log(3))
    taught([1.0] * 64, factors=factors, start=1000)  # as the factor predicts
    assert factors.changed(1e6) is None
    taught([2.0] * 64, factors=factors, start=2000)
    assert factors.changed(1e6).factors["forward fused float32"].middle(LONG) == pytest.approx(math.log(6))


def test_the_clock_changes_ever_more_rarely_and_not_for_small_changes():
    factors, changed = LearnedFactors(BASE), []
    for index in range(20_000):
        factors.see(run(1.5), "float32", float(index))  # each time the device is half as fast again
        if factors.changed(float(index)) is not None:
            changed.append(index)
    gaps = np.diff(changed)
    assert (gaps[1:] >= gaps[:-1]).all()
    assert gaps[0] >= 5
    assert gaps.max() >= 600
    assert factors.changes == len(changed)
    steady = taught([1.0] * 64)
    assert steady.changed(0.0) is not None  # its bounds are known now
    taught([1.05] * 64, factors=steady, start=100)
    assert steady.changed(1e6) is None


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "test", 2**30, BASE)


def test_the_file_gives_the_same_clock_to_the_same_device(tmp_path, device):
    factors = taught([3.0] * 10)
    clock = factors.changed(0.0)
    factors.save(tmp_path, device)
    again = LearnedFactors(BASE)
    assert again.load(tmp_path, device) == clock
    assert again.changed_at == factors.changed_at
    (path,) = (tmp_path / "times").iterdir()
    for fault in ({"threads": 99}, {"format": 0}, {"factors": {"forward fused float32": {"short": 1e9}}}):
        path.write_text(json.dumps(json.loads(path.read_text()) | fault))
        assert LearnedFactors(BASE).load(tmp_path, device) is None
    path.write_text("{")
    assert LearnedFactors(BASE).load(tmp_path, device) is None


def test_a_folder_that_cannot_be_written_to_is_logged(tmp_path, device, caplog):
    factors = taught([3.0] * 10)
    factors.changed(0.0)
    (tmp_path / "times").write_text("a file where the folder belongs")
    factors.save(tmp_path, device)
    assert "could not be kept" in caplog.text
