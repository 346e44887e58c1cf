"""Requests drawn and measured on this machine, and what is kept of it."""

import asyncio
import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

from attention_contract.schemas.attention import RawForwardRequest
from attention_service import __main__ as command
from attention_service.cost import Calibrated, Curves, Rates, Roofline, Spread, Workload
from attention_service.runtime.calibration import background, calibrating, stored
from attention_service.runtime.calibration.calibrating import Calibration, TooBusyError
from attention_service.runtime.calibration.measuring import Bench
from attention_service.runtime.calibration.term_recorder import Recorder
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations import forward
from attention_service.runtime.operations.random_requests import draw, kinds
from attention_service.runtime.scheduling.budget import Budget

RATES = Rates(flops_per_s=1e10, bytes_per_s=1e10, overhead_s=1e-5)
ROOM = 2**28


def device():
    return Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))


def small(work):
    return work.pairs * work.heads < 2**18 and work.batch * (work.queries + work.keys) * work.heads < 2**14


@pytest.fixture
def short(monkeypatch):
    """A calibration that ends soon."""
    monkeypatch.setattr(calibrating, "MOST_POINTS", 25)
    monkeypatch.setattr(calibrating, "FEWEST_POINTS", 5)
    monkeypatch.setattr("attention_service.runtime.calibration.measuring.RANGES_S", ((0, 5e-4),) * 3)
    monkeypatch.setattr("attention_service.runtime.device.load_probe._DISTURBED", 1e9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.name)
def test_requests_of_every_kind_can_be_drawn_and_run(kind):
    bench, rng = Bench(device(), RATES, ROOM, 0), np.random.default_rng(1)
    ran = 0
    for drawn in filter(None, (draw(rng, kind, small) for _ in range(200))):
        job = bench.prepared(drawn)
        if job is not None:
            assert job.plan.kernel == kind.kernel
            assert job.prepared.purpose == kind.purpose
            job.run()
            ran += 1
        if ran == 5:
            return
    pytest.fail(f"only {ran} requests of 200 could be drawn")


@pytest.mark.slow
def test_a_bench_measures_requests_and_bodies(short):
    bench = Bench(device(), RATES, ROOM, 0)
    points = [point for point in (bench.next() for _ in range(60)) if point is not None]
    assert len(points) > 20
    assert all(point.seconds and min(point.seconds) > 0 and point.terms for point in points)
    found = {point.kind for point in points}
    assert len([kind for kind in found if kind.startswith(("forward ", "gradients "))]) > 8
    assert any(kind.startswith(("read ", "write ")) for kind in found)


def test_the_recorder_answers_as_the_roofline_does():
    work, recorder = Workload(1, 64, 64, 2, 2, 16, 16, 4), Recorder(RATES)
    assert recorder.forward(work, "fused") == Roofline(RATES).forward(work, "fused")
    assert "start direct call" in {term.name for term in recorder.asked}
    assert recorder.gradients(work, "fused") == Roofline(RATES).gradients(work, "fused")
    assert "start gradients" in {term.name for term in recorder.asked}


def calibrated():
    calibration = Calibration(device(), ROOM, seconds=60.0)
    while calibration.step():
        pass
    return calibration.clock()


@pytest.mark.slow
def test_a_calibration_predicts_this_machine(short):
    clock = calibrated()
    assert isinstance(clock, Calibrated)
    assert clock.basis == "calibrated"
    here = replace(device(), clock=clock)
    x = np.random.default_rng(0).standard_normal((1, 4, 32, 16), np.float32)
    job = forward.prepare(None, RawForwardRequest(query=x, key=x, value=x), here, ROOM)
    assert 0 < job.plan.predicted.low < job.plan.predicted.median < job.plan.predicted.high < 1


@pytest.mark.slow
def test_too_few_requests_make_no_clock(short, monkeypatch):
    monkeypatch.setattr(calibrating, "FEWEST_POINTS", 10**6)
    with pytest.raises(TooBusyError, match="undisturbed"):
        calibrated()


# ── on disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────

CLOCK = Calibrated(Curves(RATES, {"start direct call": 0.25}), {"forward fused": Spread(-0.1, 0.2, 0.01)})


def keep(root, points=40):
    found = stored.Stored(CLOCK, datetime.now(UTC), points)
    stored.save(root, device(), found)
    return found


def test_a_saved_calibration_is_loaded_on_the_same_device_only(tmp_path, monkeypatch):
    assert stored.load(tmp_path, device()) is None
    saved, found = keep(tmp_path), stored.load(tmp_path, device())
    assert (found.points, found.at) == (40, saved.at)
    assert found.clock.spreads == CLOCK.spreads
    assert found.clock.curves.rates == RATES
    assert found.clock.curves.logs == pytest.approx(dict(CLOCK.curves.logs), abs=1e-5)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert stored.load(tmp_path, device()) is None
    monkeypatch.undo()
    monkeypatch.setattr(Device, "threads", 77)
    assert stored.load(tmp_path, device()) is None


def test_a_damaged_file_is_no_calibration(tmp_path):
    keep(tmp_path)
    (path,) = (tmp_path / "calibrations").iterdir()
    told = json.loads(path.read_text())
    damaged = [told | {"spreads": {"forward fused": {"low": "x"}}}, told | {"format": 99}, [], None, {"format": 1}]
    for text in ("", "{", "NaN", *map(json.dumps, damaged)):
        path.write_text(text)
        assert stored.load(tmp_path, device()) is None
    path.unlink()
    os.mkfifo(path)
    assert stored.load(tmp_path, device()) is None


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    keep(tmp_path)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        keep(tmp_path, 41)
    assert stored.load(tmp_path, device()).points == 40
    assert len(list((tmp_path / "calibrations").iterdir())) == 1


# ── beside requests ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_in_the_background_every_measurement_is_admitted_and_given_back(short):
    budget = Budget(2**30, 2**30, lambda: 0, 4)
    held = []

    async def run(work):
        held.append(budget.in_flight)
        return work()

    done = asyncio.run(background.measured(device(), budget, run))
    assert done.points > 5
    assert set(held[1:]) == {2 * done.room}
    assert budget.in_flight == 0


@pytest.mark.slow
def test_an_engine_measures_its_device_and_remembers(tmp_path, short):
    async def life():
        engine = Engine(tmp_path, device())
        await engine.start()
        assert engine.calibration is None
        assert engine.device.clock.basis == "rates"
        await engine.measure_device()
        assert engine.device.clock.basis == "calibrated"
        await engine.stop()
        again = Engine(tmp_path, device())
        await again.start()
        await again.stop()
        return engine, again

    engine, again = asyncio.run(life())
    assert again.device.clock.basis == "calibrated"
    assert again.calibration.at == engine.calibration.at


@pytest.mark.slow
def test_the_command_measures_and_keeps(tmp_path, short, capsys):
    assert command.calibrate(["--models-dir", str(tmp_path), "--device", "cpu", "--threads", "1"]) == 0
    told = capsys.readouterr()
    assert "forward fused" in told.out
    assert "requests in" in told.err
    assert len(list((tmp_path / "calibrations").glob("cpu-*.json"))) == 1


def test_the_command_says_what_is_wrong(tmp_path, short, monkeypatch, capsys):
    assert command.calibrate(["--device", "tpu"]) == 2
    assert "--device" in capsys.readouterr().err
    monkeypatch.setattr(calibrating, "FEWEST_POINTS", 10**6)
    assert command.calibrate(["--models-dir", str(tmp_path), "--device", "cpu", "--threads", "1"]) == 1
    assert "nothing else to do" in capsys.readouterr().err
