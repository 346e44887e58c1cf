"""Threads of a model's process: no more than other programs leave cores to."""

import math
import os
from unittest.mock import Mock

import pytest
import torch

from attention_service.models.process.served_model import ServedModel
from attention_service.runtime.device.free_cores import CoreTimes, FreeCores, core_times, running_now


def threads(most, cores, spells):
    """The threads after each spell of a second: seconds of other programs, and of this process."""
    times = [CoreTimes(0.0, 0.0, 0.0, cores)]
    for others, own in spells:
        last = times[-1]
        times.append(CoreTimes(last.now + 1, last.busy + others + own, last.own + own, cores))
    looks = iter(times)
    found = FreeCores(most, lambda: next(looks), lambda: 99)
    return [found.fit() for _ in spells]


@pytest.mark.parametrize("own", [0.0, 0.5, 1.0, 2.0])
def test_what_a_process_computes_itself_takes_no_thread_from_it(own):
    assert threads(2, 2, [(0.0, own)] * 3) == [2, 2, 2]


@pytest.mark.parametrize("cores", [2, 3, 8, 64])
def test_every_core_of_another_program_takes_a_thread_and_its_end_gives_it_back(cores):
    for others in range(cores + 1):
        assert threads(cores, cores, [(others, 0.5), (others, 0.5), (0.0, 0.5)]) == [
            *[max(1, cores - others)] * 2, cores,
        ]  # fmt: skip


def test_the_number_changes_neither_for_a_short_spell_nor_to_and_fro():
    assert threads(2, 2, [(0.3, 1.5)]) == [2]
    for others in (0.35, 0.5, 0.55):
        assert threads(2, 2, [(others, 1)] * 3) == [2] * 3
        assert threads(2, 2, [(1.0, 1), (others, 1), (others, 1)]) == [1] * 3


def test_all_threads_are_back_as_soon_as_others_run_no_more():
    running = Mock(side_effect=[3, 3, 3, 3, 2, 1])
    looks = iter([CoreTimes(0.0, 0.0, 0.0, 2), *[CoreTimes(1e9, 2e9, 1e9, 2)] * 2])  # no more until then
    found = FreeCores(2, lambda: next(looks), running)
    assert found.fit() == 1
    assert found.fit() == 2
    assert found.fit() == 2
    assert running.call_count == 6


def test_what_runs_now_is_read_from_the_load(tmp_path):
    file = tmp_path / "loadavg"
    file.write_text("2.72 1.74 0.87 5/312 15622\n")
    assert running_now(file) == 5
    file.write_text("2.72\n")
    assert running_now(file) is None
    assert running_now(tmp_path / "none") is None


def test_a_quota_smaller_than_the_host_needs_no_idle_host():
    assert threads(2, 64, [(60.0, 1)]) == [2]


def test_looks_are_apart_and_a_system_that_tells_nothing_leaves_all_threads(monkeypatch):
    look = Mock(return_value=CoreTimes(math.inf, 0.0, 0.0, 2))
    found = FreeCores(2, look)
    assert (found.fit(), look.call_count) == (2, 1)
    assert FreeCores(2, lambda: None).fit() == 2
    assert FreeCores(1, look).fit() == 1


def test_only_the_cores_that_the_process_may_use_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 10}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    file = tmp_path / "stat"
    rows = ["cpu  9 9 9 9 9 9 9 9 0 0", "cpu0 900 0 0 0 0 0 0 0 0 0", "cpu1 100 20 30 999 999 40 50 60 7 7"]
    file.write_text("\n".join([*rows, "cpu10 100 0 0 5 5 0 0 0 0 0", "intr 1"]) + "\n")
    found = core_times(file)
    assert (found.busy, found.cores) == (4.0, 2)
    assert core_times(tmp_path / "none") is None
    file.write_text("cpu1 what\n")
    assert core_times(file) is None


def test_a_turn_has_the_threads_that_fit_and_one_alone_has_all(monkeypatch):
    model = ServedModel.__new__(ServedModel)
    model._threads, model._cores = 2, Mock(fit=lambda: 1)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    with model.turn(alone=True):
        assert taken == []
    with model.turn(alone=False):
        assert taken == [1]
    assert taken == [1, 2]
