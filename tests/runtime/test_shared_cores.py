"""Threads of a model's process, which sleep at once beside other programs."""

import math
import os
import subprocess
import sys
import time
from unittest.mock import Mock

import psutil
import pytest
import torch

from attention_service.models.process.served_model import ServedModel
from attention_service.runtime.device.cpu_threads import usable_cores
from attention_service.runtime.device.shared_cores import CoreTimes, SharedCores, core_times, running_now

_SPIN = """
import os, time, torch
from unittest.mock import Mock
from attention_service.runtime.device.shared_cores import CoreTimes, SharedCores

torch.set_num_threads(2)
cores = len(os.sched_getaffinity(0))
looks = [CoreTimes(second, (second > 0) * cores, 0.0, cores) for second in range(4)]
shared, numbers = SharedCores(2, Mock(side_effect=looks), lambda: 99), torch.ones(2**20)

def spun():
    time.sleep(0.1)
    numbers.exp_().fill_(1)
    began = time.process_time()
    time.sleep(0.5)
    return time.process_time() - began

for _ in range(3):
    print(shared.asleep, spun())
    shared.look()
"""


def ways(threads, cores, spells):
    """True for each spell of a second after which threads sleep: seconds of other programs, and of this process."""
    times = [CoreTimes(0.0, 0.0, 0.0, cores)]
    for others, own in spells:
        last = times[-1]
        times.append(CoreTimes(last.now + 1, last.busy + others + own, last.own + own, cores))
    looks, found = iter(times), []
    shared = SharedCores(threads, lambda: next(looks), lambda: math.inf)
    for _ in spells:
        shared.look()
        found.append(shared.asleep)
    shared._teams.end()
    return found


@pytest.mark.long
@pytest.mark.skipif(usable_cores() < 2 or sys.platform != "linux", reason="threads spin on two cores of Linux")
def test_threads_spin_and_sleep_at_once_while_others_use_the_cores():
    """With a spin that does not end, a process that waits uses a processor, unless its threads sleep."""
    environment = os.environ | {"GOMP_SPINCOUNT": "1000000000000", "OMP_NUM_THREADS": "2"}
    environment.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-c", _SPIN]
    lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.splitlines()
    asleep, spun = zip(*(line.split() for line in lines), strict=True)
    assert asleep == ("False", "True", "False")
    assert float(spun[1]) < 0.03 < min(float(spun[0]), float(spun[2]))


@pytest.mark.parametrize("own", [0.0, 0.5, 1.0, 2.0])
def test_what_a_process_computes_itself_is_no_other_program(own):
    assert ways(2, 2, [(0.0, own)] * 3) == [False] * 3


@pytest.mark.parametrize("cores", [2, 3, 8])
def test_threads_sleep_while_another_program_uses_a_core_that_they_need(cores):
    for threads in {2, cores}:
        for others in range(cores + 1):
            missing = threads + others > cores
            assert ways(threads, cores, [(others, 0.5), (others, 0.5), (0.0, 0.5)]) == [missing, missing, False]


def test_the_way_changes_neither_for_a_short_spell_nor_to_and_fro():
    assert ways(2, 2, [(0.3, 1.5)]) == [False]
    for others in (0.35, 0.5, 0.55):
        assert ways(2, 2, [(others, 1)] * 3) == [False] * 3
        assert ways(2, 2, [(1.0, 1), (others, 1), (others, 1)]) == [True] * 3


def test_a_quota_smaller_than_the_host_needs_no_idle_host():
    assert ways(2, 64, [(60.0, 1)]) == [False]


def test_threads_spin_as_soon_as_others_run_no_more(tmp_path):
    running = Mock(side_effect=[2, 1])
    shared = SharedCores(2, Mock(side_effect=[CoreTimes(0, 0.0, 0.0, 2), *[CoreTimes(1e9, 2e9, 0.0, 2)] * 2]), running)
    found = []
    for _ in range(3):
        shared.look()
        found.append(shared.asleep)
    assert found == [True, True, False]
    file = tmp_path / "loadavg"
    file.write_text("2.72 1.74 0.87 5/312 15622\n")
    assert running_now(file) == 5
    file.write_text("2.72\n")
    assert running_now(file) == running_now(tmp_path / "none") == math.inf


def test_looks_are_apart_and_a_system_that_tells_nothing_lets_threads_spin():
    look = Mock(return_value=CoreTimes(math.inf, 0.0, 0.0, 2))
    shared = SharedCores(2, look)
    shared.look()
    assert (shared.asleep, look.call_count) == (False, 1)
    for shared in (SharedCores(2, lambda: None), SharedCores(1, look)):
        shared.look()
        assert not shared.asleep
    assert look.call_count == 1


def test_the_cores_that_the_process_may_use_are_counted_and_the_server_is_no_other_program(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 10}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    file = tmp_path / "stat"
    rows = ["cpu  9 9 9 9 9 9 9 9 0 0", "cpu0 900 0 0 0 0 0 0 0 0 0", "cpu1 100 20 30 999 999 40 50 60 7 7"]
    file.write_text("\n".join([*rows, "cpu10 100 0 0 5 5 0 0 0 0 0", "intr 1"]) + "\n")
    monkeypatch.setattr(time, "process_time", lambda: 2.0)
    server = Mock(return_value=Mock(cpu_times=lambda: Mock(user=0.75, system=0.5)))
    monkeypatch.setattr(psutil, "Process", server)
    found = core_times(file)
    assert (found.busy, found.own, found.cores) == (4.0, 3.25, 2)
    server.assert_called_once_with(os.getppid())
    assert core_times(tmp_path / "none") is None
    file.write_text("cpu1 what\n")
    assert core_times(file) is None


def test_a_turn_that_spares_a_core_has_a_thread_less(monkeypatch):
    model = ServedModel.__new__(ServedModel)
    model._threads, model._cores = 2, Mock()
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    with model.turn(spares_core=False):
        assert taken == []
    with model.turn(spares_core=True):
        assert taken == [1]
    assert taken == [1, 2]
    assert model._cores.look.call_count == 2
