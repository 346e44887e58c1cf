"""How predictions fared: the figures against their definitions, and when a calibration is due."""

import asyncio
import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from attention_contract.errors import NeverFits
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.hopfield import HopfieldRequest
from attention_contract.schemas.weights import RawWeightsRequest
from attention_service.cost import Estimate, Rates, Roofline
from attention_service.runtime.calibration.recalibration import Recalibration
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.planning.drift import LONGEST_PAUSE_S, PAUSE_S, SPACING_S, Drift
from attention_service.runtime.planning.prediction_accuracy import HISTORY, RATIO_EDGES, Accuracy, Run

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
RATES = Rates(1e10, 1e10, 1e-5)


def run(ratio, kernel="fused", purpose="forward", median=1e-2, factor=1.3, **more):
    return Run(kernel, purpose, Estimate.within(median, factor), median * ratio, 100, **more)


# ── the figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_is_that_of_the_last_thousand_by_kernel_and_purpose(rng):
    accuracy, ratios = Accuracy(), rng.lognormal(0.05, 0.2, size=HISTORY + 300)
    for ratio in ratios:
        accuracy.record(run(ratio))
    accuracy.record(run(2.0, purpose="gradients"))
    accuracy.record(run(1.0, kernel="blocked"))
    blocked, fused, backward = accuracy.report()
    assert [(each.kernel, each.purpose) for each in (blocked, fused, backward)] == [
        ("blocked", "forward"), ("fused", "forward"), ("fused", "gradients"),
    ]  # fmt: skip
    kept = ratios[-HISTORY:]
    assert fused.count == HISTORY
    assert fused.mean_error == pytest.approx(kept.mean() - 1)
    assert fused.median_error == pytest.approx(np.median(kept) - 1)
    assert fused.median_absolute_error == pytest.approx(np.median(abs(kept - 1)))
    assert fused.p95_absolute_error == pytest.approx(np.percentile(abs(kept - 1), 95))
    assert fused.coverage == pytest.approx(((kept >= 1 / 1.3) & (kept <= 1.3)).mean())
    bounds = [-math.inf, *RATIO_EDGES, math.inf]
    expected = [((kept > low) & (kept <= high)).sum() for low, high in pairwise(bounds)]
    assert fused.histogram.counts == expected
    assert (backward.count, backward.median_error, backward.coverage) == (1, 1.0, 0.0)
    assert list(accuracy.coverage()) == [
        ("fused", "forward", fused.coverage), ("fused", "gradients", 0.0), ("blocked", "forward", 1.0),
    ]  # fmt: skip


def test_memory_is_compared_where_it_was_measured():
    accuracy = Accuracy()
    for peak in (None, 80, 95, 101):
        accuracy.record(run(1.0, peak_bytes=peak))
    (found,) = accuracy.report()
    assert found.memory.count == 3
    assert (found.memory.median_error, found.memory.largest_error) == pytest.approx((-0.05, 0.01))


# ── drift ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def ratios(seed, spread=0.15, slower=1.0):
    """Of a clock whose 90 % interval is a factor of 1.28 wide, as a spread of 0.15 asks for."""
    rng = random.Random(seed)
    while True:
        yield slower * math.exp(rng.gauss(0, spread))


def alarms(stream, count, every=SPACING_S, drift=None, start=0.0, factor=1.28):
    """When a calibration was asked for, by the number of the run."""
    drift = drift or Drift()
    return [i for i in range(count) if drift.see(run(next(stream), factor=factor), start + i * every)]


def test_a_clock_that_holds_is_left_alone_for_a_hundred_thousand_runs():
    wide = 0.15 * 1.645 / 1.282  # so that 20 % lie outside of the interval
    assert alarms(ratios(0), 100_000) == alarms(ratios(1, wide), 100_000) == []


@pytest.mark.parametrize("slower", [1.5, 1 / 1.5])
def test_a_device_of_another_speed_is_noticed_within_forty_counted_runs(slower):
    found = []
    for seed in range(200):
        drift = Drift()
        drift.restart(0.0)
        held, changed = ratios(seed), ratios(1000 + seed, slower=slower)
        assert alarms(held, 200, drift=drift) == []
        at = alarms(changed, 40, drift=drift, start=200 * SPACING_S)
        found.append(at[0])
    assert max(found) < 40
    assert 12 <= np.median(found) <= 24


def test_a_burst_of_slow_runs_is_not_drift():
    drift, normal = Drift(), ratios(2)
    alarms(normal, 500, drift=drift)
    for i in range(10_000):  # a minute in which everything takes five times as long
        assert not drift.see(run(5.0, factor=1.28), 2500.0 + i * 60 / 10_000)
    assert alarms(normal, 1000, drift=drift, start=2560.0) == []


def test_runs_that_waited_for_a_processor_are_not_drift():
    drift = Drift()
    waited = run(4.0, processor=1e-2)
    assert (waited.covered, waited.covered_but_for_load) == (False, True)
    assert not any(drift.see(waited, index * SPACING_S) for index in range(1000))
    assert not run(4.0, processor=3e-2).covered_but_for_load
    assert not run(0.5, processor=0.4e-2).covered_but_for_load


def test_the_first_minutes_after_a_calibration_pass_before_another():
    drift = Drift()
    drift.restart(0.0)
    (first, *_) = alarms(ratios(3, slower=3.0), 1000, drift=drift)
    assert first * SPACING_S == PAUSE_S


def test_what_calibrations_do_not_mend_asks_for_them_ever_more_rarely():
    drift, asked, step = Drift(), [], 60.0
    drift.restart(0.0)
    stream = ratios(4, slower=3.0)
    for i in range(int(30 * 86_400 / step)):
        if drift.see(run(next(stream), factor=1.28), i * step):
            asked.append(i * step)
            drift.restart(i * step + 30.0)  # measured again, to no avail
    gaps = np.diff(asked)
    assert (gaps >= PAUSE_S).all()
    assert (np.diff(gaps) > -2 * step).all()
    assert gaps[-1] >= LONGEST_PAUSE_S
    assert len(asked) < 45
    # Once it has held for long, the first pause is enough again.
    alarms(ratios(5), 100_000, every=60.0, drift=drift, start=30 * 86_400.0)
    late = 30 * 86_400.0 + 100_000 * 60.0
    assert alarms(ratios(6, slower=3.0), 100, drift=drift, start=late)


def test_runs_too_short_to_measure_say_nothing():
    drift = Drift()
    assert not any(drift.see(run(100.0, median=1e-4), i * SPACING_S) for i in range(1000))


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Wrong(Roofline):
    """A clock that is always wrong."""

    def forward(self, work, kernel):
        return Estimate.within(1.0, 1.1)


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "test", 2**30, Roofline(RATES))


def play(tmp_path, device, story):
    async def whole():
        engine = Engine(tmp_path, device)
        await engine.start()
        try:
            await story(engine)
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_each_question_is_recorded_with_what_its_reply_says(tmp_path, device):
    async def story(engine):
        seen = []
        engine.accuracy.watchers.append(seen.append)
        replies = [
            await engine.forward(None, RawForwardRequest(query=X)),
            await engine.weights(None, RawWeightsRequest(query=X)),
            await engine.gradients(None, RawGradientsRequest(query=X)),
            await engine.retrieve(HopfieldRequest(stored=X, states=X)),
        ]
        engine.settle()
        assert [each.purpose for each in seen] == ["forward", "weights", "gradients", "hopfield"]
        for each, reply in zip(seen, replies, strict=True):
            ran = reply.ran
            assert each.kernel == ran.kernel
            assert each.seconds * 1e3 == ran.compute_ms > 0
            assert 0 < ran.predicted_low_ms <= ran.predicted_ms <= ran.predicted_high_ms
            assert each.predicted.median * 1e3 == ran.predicted_ms
            assert each.covered == (ran.predicted_low_ms <= ran.compute_ms <= ran.predicted_high_ms)
        report = engine.accuracy_report()
        assert (report.basis, report.recalibrating, report.recalibrations) == ("rates", False, 0)
        assert sorted(each.purpose for each in report.predictions) == sorted(each.purpose for each in seen)

    play(tmp_path, device, story)


def test_what_was_refused_failed_or_was_given_up_is_not_recorded(tmp_path, device, monkeypatch):
    async def story(engine):
        large = RawForwardRequest(query=np.zeros((30_000, 1), np.float32), return_=["weights"])
        with pytest.raises(NeverFits):
            await engine.forward(None, large)
        engine.execution.expects_mates = True  # so that it waits for others
        given_up = asyncio.create_task(engine.forward(None, RawForwardRequest(query=X)))
        await asyncio.sleep(0)
        given_up.cancel()
        monkeypatch.setattr(Forward, "launch", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await engine.forward(None, RawForwardRequest(query=X))
        assert engine.accuracy_report().predictions == []

    play(tmp_path, device, story)


def test_another_clock_begins_anew_and_what_the_former_planned_is_left_out(tmp_path, device):
    async def story(engine):
        await engine.forward(None, RawForwardRequest(query=X))
        assert len(engine.accuracy_report().predictions) == 1
        under_way = asyncio.create_task(engine.forward(None, RawForwardRequest(query=X)))
        await asyncio.sleep(0)
        device.clock = Wrong(RATES, "calibrated")
        await under_way
        assert engine.accuracy_report().predictions == []
        assert engine.accuracy_report().basis == "calibrated"

    play(tmp_path, device, story)


def test_drift_brings_about_one_calibration_at_a_time(tmp_path, device, monkeypatch):
    """A clock that is wrong about every run; each run is made out to end a minute after the one before."""
    times = iter(range(0, 10**6, 60))

    async def story(engine):
        started, gate = [], asyncio.Event()

        async def work():
            started.append(1)
            await gate.wait()
            device.clock = Roofline(RATES)

        engine.recalibration.work = work
        keep = engine._keep
        monkeypatch.setattr(engine.execution, "_watch", lambda seen: keep([replace(seen, at=next(times))]))
        for _ in range(13):
            await engine.forward(None, RawForwardRequest(query=X))
        await asyncio.sleep(0)
        assert started == []  # bare rates do not drift
        device.clock = Wrong(RATES, "calibrated")
        engine._judge()
        engine._drift.restart(-1e9)
        for _ in range(60):
            await engine.forward(None, RawForwardRequest(query=X))
        assert len(started) == 1
        assert engine.accuracy_report().recalibrating
        gate.set()
        while engine.recalibration.running:
            await asyncio.sleep(0)
        report = engine.accuracy_report()
        assert (report.recalibrations, report.recalibrating, report.basis) == (1, False, "rates")

    play(tmp_path, device, story)


@pytest.mark.gpu
def test_on_a_gpu_the_peak_of_memory_is_measured_too(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    async def story(engine):
        long = np.ones((1, 4, 4096, 64), np.float32)
        ran = (await engine.forward(None, RawForwardRequest(query=long, kernel="materialized"))).ran
        (found,) = engine.accuracy_report().predictions
        assert found.memory.count == 1
        assert found.memory.largest_error == found.memory.median_error < 0.05
        assert ran.peak_bytes * (1 + found.memory.median_error) >= 4 * 4096**2 * 4  # one matrix of scores at least

    play(tmp_path, Device.open("cuda"), story)


def test_a_calibration_that_fails_is_counted_and_another_may_start(caplog):
    async def whole():
        recalibration = Recalibration()
        assert not recalibration.start()  # nobody measures

        async def fails():
            raise RuntimeError("the device is gone")

        recalibration.work = fails
        assert recalibration.start()
        assert recalibration.running
        assert not recalibration.start()
        while recalibration.running:
            await asyncio.sleep(0)
        assert (recalibration.done, recalibration.failed) == (0, 1)
        assert "the device is gone" in caplog.text

        async def never():
            await asyncio.Event().wait()

        recalibration.work = never
        assert recalibration.start()
        await recalibration.stop()
        assert not recalibration.running

    asyncio.run(whole())
