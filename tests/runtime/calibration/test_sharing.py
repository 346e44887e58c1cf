"""One calibration for all servers on a folder, and another attempt where the machine was too busy."""

import asyncio
import fcntl
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import islice

import pytest
import torch

from attention_service.cost import Calibrated, Curves, Rates, Roofline
from attention_service.runtime import engine as engines
from attention_service.runtime.calibration import sharing, stored
from attention_service.runtime.calibration.calibrating import TooBusyError
from attention_service.runtime.calibration.recalibration import Recalibration, growing_pauses
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.engine import Engine

RATES = Rates(flops_per_s=1e10, bytes_per_s=1e10, overhead_s=1e-5)


def device():
    return Device(torch.device("cpu"), "test", 2**34, Roofline(RATES))


class Done:
    """A calibration whose requests have been run."""

    points = 300

    def clock(self):
        return Calibrated(Curves(RATES, {}), {})


@pytest.fixture
def measurements(monkeypatch):
    """When the device was measured; a measurement takes a few turns of the event loop."""
    counted = []

    async def measured(*_):
        counted.append(datetime.now(UTC))
        await asyncio.sleep(0.1)
        return Done()

    monkeypatch.setattr(engines, "measured", measured)
    monkeypatch.setattr(sharing, "LOOK_S", 0.01)
    return counted


def with_servers(folder, count, story):
    """Run a story of several engines on one folder."""

    async def life():
        made = [Engine(folder, device()) for _ in range(count)]
        for each in made:
            await each.start()
        try:
            await story(*made)
        finally:
            for each in made:
                await each.stop()

    asyncio.run(life())


def test_of_several_servers_one_measures_and_all_predict_by_it(tmp_path, measurements):
    async def story(*servers):
        await asyncio.gather(*(each.measure_device() for each in servers))
        assert len(measurements) == 1
        assert len({each.calibration.at for each in servers}) == 1
        assert {each.device.clock.basis for each in servers} == {"calibrated"}

    with_servers(tmp_path, 3, story)


def test_a_server_that_is_killed_while_it_measures_leaves_the_turn_to_another(tmp_path, measurements):
    path = stored.lock_path(tmp_path, device())
    path.parent.mkdir()
    code = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()

        async def story(mine):
            task = asyncio.create_task(mine.measure_device())
            await asyncio.sleep(0.2)
            assert not measurements
            other.send_signal(signal.SIGKILL)
            await task
            assert len(measurements) == 1

        with_servers(tmp_path, 1, story)


def test_what_fails_gives_the_turn_back(tmp_path, monkeypatch):
    async def busy(*_):
        raise TooBusyError("only 3 requests")

    monkeypatch.setattr(engines, "measured", busy)

    async def story(mine):
        with pytest.raises(TooBusyError):
            await mine.measure_device()
        with stored.lock_path(tmp_path, device()).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is still held

    with_servers(tmp_path, 1, story)


def test_a_folder_that_can_not_be_written_keeps_nobody_from_measuring(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    entered = []

    async def life():
        async with sharing.turn(blocked, device(), None) as found:
            entered.append(found)

    asyncio.run(life())
    assert entered == [None]


def test_only_what_is_newer_is_taken_up(tmp_path):
    now = datetime.now(UTC)
    stored.save(tmp_path, device(), stored.Stored(Done().clock(), now, 300))

    async def found(since):
        async with sharing.turn(tmp_path, device(), since) as theirs:
            return theirs

    assert asyncio.run(found(now)) is None
    assert asyncio.run(found(now - timedelta(seconds=1))).at == now
    assert asyncio.run(found(None)).points == 300


# ── another attempt ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_pauses_grow_to_an_hour_and_never_end():
    assert list(islice(growing_pauses(), 9)) == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_machine_that_was_too_busy_is_measured_later():
    async def life():
        attempts, seen = [], []
        recalibration = Recalibration(lambda: [0.01] * 5)

        async def work():
            attempts.append(recalibration.running)
            if len(attempts) < 3:
                raise TooBusyError("only 3 requests could be measured")

        recalibration.work = work
        assert recalibration.start()
        while recalibration.planned:
            seen.append((recalibration.running, recalibration.start()))
            await asyncio.sleep(0)
        return recalibration, attempts, seen

    recalibration, attempts, seen = asyncio.run(life())
    assert attempts == [True] * 3
    assert (recalibration.done, recalibration.failed) == (1, 2)
    assert {running for running, _ in seen} == {True, False}, "it pauses in between"
    assert not any(started for _, started in seen), "and is not started twice"
