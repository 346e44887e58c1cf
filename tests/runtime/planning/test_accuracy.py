"""How predictions fared: the figures against their definitions, and clocks that learn from what ran."""

import asyncio
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from attention_contract.errors import NeverFits
from attention_contract.schemas.analyses.hopfield import HopfieldRequest
from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.schemas.weights import RawWeightsRequest
from attention_service.cost import Estimate, Rates, Roofline
from attention_service.engine import Engine
from attention_service.engine_settings import EngineSettings
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.planning.prediction_accuracy import HISTORY, RATIO_EDGES, Accuracy, TimedRun
from attention_service.runtime.planning.run_ratios import FEWEST

X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
RATES = Rates(1e10, 1e10, 1e-5)


def run(ratio, kernel="fused", purpose="forward", median=1e-2, factor=1.3, **more):
    return TimedRun(kernel, purpose, Estimate.within(median, factor), median * ratio, 100, **more)


# ── the figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_is_that_of_the_last_thousand_by_kernel_and_purpose(rng):
    accuracy, ratios = Accuracy(), rng.lognormal(0.05, 0.2, size=HISTORY + 300)
    for ratio in ratios:
        accuracy.record([run(ratio)])
    accuracy.record([run(2.0, purpose="gradients")])
    accuracy.record([run(1.0, kernel="blocked")])
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
        accuracy.record([run(1.0, peak_bytes=peak)])
    (found,) = accuracy.report()
    assert found.memory.count == 3
    assert (found.memory.median_error, found.memory.largest_error) == pytest.approx((-0.05, 0.01))


# ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Wrong(Roofline):
    """A clock that is always wrong."""

    def forward(self, work, kernel):
        return Estimate.within(1.0, 1.1)


@pytest.fixture
def device():
    return Device(torch.device("cpu"), "test", 2**30, Roofline(RATES))


@asynccontextmanager
async def started(*arguments, **settings):
    """An engine that runs until the block ends."""
    engine = Engine(*arguments, EngineSettings(**settings))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def engine(tmp_path, device):
    async with started(tmp_path, device) as engine:
        yield engine


async def test_each_question_is_recorded_with_what_its_reply_says(engine):
    seen = []
    engine.predictions.accuracy.watchers.append(seen.extend)
    replies = [
        await engine.forward(None, RawForwardRequest(query=X)),
        await engine.ask("weights", None, RawWeightsRequest(query=X)),
        await engine.ask("gradients", None, RawGradientsRequest(query=X)),
        await engine.analyses.retrieve(HopfieldRequest(stored=X, states=X)),
    ]
    engine.predictions.settle()
    assert [each.purpose for each in seen] == ["forward", "weights", "gradients", "hopfield"]
    for each, reply in zip(seen, replies, strict=True):
        ran = reply.ran
        assert each.kernel == ran.kernel
        assert each.seconds * 1e3 == ran.compute_ms > 0
        assert 0 < ran.predicted_low_ms <= ran.predicted_ms <= ran.predicted_high_ms
        assert each.predicted.median * 1e3 == ran.predicted_ms
        assert each.covered == (ran.predicted_low_ms <= ran.compute_ms <= ran.predicted_high_ms)
    report = engine.accuracy_report()
    assert (report.basis, report.recalibrations) == ("rates", 0)
    assert sorted(each.purpose for each in report.predictions) == sorted(each.purpose for each in seen)


async def test_what_was_refused_failed_or_was_given_up_is_not_recorded(engine, monkeypatch):
    large = RawForwardRequest(query=np.zeros((30_000, 1), np.float32), return_=["weights"])
    with pytest.raises(NeverFits):
        await engine.forward(None, large)
    engine.executor.expects_mates = True  # so that it waits for others
    given_up = asyncio.create_task(engine.forward(None, RawForwardRequest(query=X)))
    await asyncio.sleep(0)
    given_up.cancel()
    monkeypatch.setattr(Forward, "launch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await engine.forward(None, RawForwardRequest(query=X))
    assert engine.accuracy_report().predictions == []


async def test_another_clock_begins_anew_and_what_the_former_planned_is_left_out(engine, device):
    await engine.forward(None, RawForwardRequest(query=X))
    assert len(engine.accuracy_report().predictions) == 1
    under_way = asyncio.create_task(engine.forward(None, RawForwardRequest(query=X)))
    await asyncio.sleep(0)
    device.clock = Wrong(RATES, "calibrated")
    await under_way
    assert engine.accuracy_report().predictions == []
    assert engine.accuracy_report().basis == "calibrated"


async def test_requests_that_run_correct_the_predictions_and_a_restart_begins_with_them(tmp_path, device, monkeypatch):
    """Each run is made out to take three times as long as bare rates predict, a second after the one before."""
    times = iter(range(1, 10**6))
    async with started(tmp_path, device) as engine:
        keep, base = engine.predictions._keep, device.clock
        x = np.ones((1, 4, 512, 64), np.float32)  # long enough to count
        work = RawForwardRequest(query=x, kernel="fused")
        plain = (await engine.forward(None, work)).ran.predicted_ms
        engine.predictions.settle()

        def thrice(seen):
            taken, at = 3e-3 * plain, 1e6 + next(times)
            keep([replace(each, began=at - taken, ended=at, processor=taken) for each in seen])

        monkeypatch.setattr(engine.executor, "_watch", lambda seen: thrice([seen]))
        for _ in range(FEWEST):
            await engine.forward(None, work)
        assert device.clock is not base
        ran = (await engine.forward(None, work)).ran
        assert ran.predicted_ms == pytest.approx(3 * plain)
        assert ran.predicted_low_ms < ran.predicted_ms < ran.predicted_high_ms
        other = (await engine.forward(None, RawForwardRequest(query=x.astype(np.float64), kernel="fused"))).ran
        assert other.predicted_ms == pytest.approx(plain, rel=0.5)  # of another dtype nothing ran
        report = engine.accuracy_report()
        assert (report.basis, report.recalibrations) == ("calibrated", 1)
        assert report.calibrated_at is not None
    device.clock = Roofline(RATES)
    async with started(tmp_path, device) as engine:
        assert device.clock.basis == engine.accuracy_report().basis == "calibrated"
        assert list(engine.predictions.factors._factors) == ["forward fused float32"]


async def test_a_server_that_does_not_learn_leaves_predictions_as_they_are(tmp_path, device):
    async with started(tmp_path, device, learns_times=False) as engine:
        clock = device.clock
        for _ in range(3 * FEWEST):
            await engine.forward(None, RawForwardRequest(query=X))
        engine.predictions.settle()
        assert device.clock is clock
        assert not (tmp_path / "times").exists()


@pytest.mark.gpu
async def test_on_a_gpu_the_peak_of_memory_is_measured_too(tmp_path):
    async with started(tmp_path, Device.open("cuda")) as engine:
        long = np.ones((1, 4, 4096, 64), np.float32)
        ran = (await engine.forward(None, RawForwardRequest(query=long, kernel="materialized"))).ran
        (found,) = engine.accuracy_report().predictions
        assert found.memory.count == 1
        assert found.memory.largest_error == found.memory.median_error < 0.05
        assert ran.peak_bytes * (1 + found.memory.median_error) >= 4 * 4096**2 * 4  # one matrix of scores at least
