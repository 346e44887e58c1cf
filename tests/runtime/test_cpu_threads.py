"""Threads of computations: no more than the machine gives, and asleep while they wait."""

import os
import subprocess
import sys

import pytest

from attention_service.models.server.worker_process import _environment
from attention_service.runtime.device import torch_device
from attention_service.runtime.device.cpu_threads import SLEEPING, SPINNING, sleep_while_waiting, usable_cores

SERVE = """
import os, sys
from attention_service.__main__ import serve
from attention_service import start_checks
import attention_service.__main__ as main
main.can_listen = lambda settings: True
class Stop(Exception): ...
def stop(name, *_):
    if name == "attention_service.commands":
        print("torch" in sys.modules, os.environ.get("OMP_WAIT_POLICY"))
        raise Stop
import builtins
real = builtins.__import__
builtins.__import__ = lambda name, *rest: (stop(name), real(name, *rest))[1]
try:
    serve([])
except Stop:
    pass
"""


@pytest.fixture
def cores(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity here")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def groups(tmp_path, own, files):
    """Files of control groups: the one that names the process's group, and the folder of all."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "all" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "own", tmp_path / "all"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "100000 100000\n"}, 1),
        (
            "5:cpu,cpuacct:/\n4:memory:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("5:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)  # fmt: skip
def test_the_quota_of_a_container_bounds_the_cores(cores, tmp_path, own, files, expected):
    assert usable_cores(*groups(tmp_path, own, files)) == expected


def test_a_device_takes_no_more_threads_than_there_are_usable_cores(monkeypatch):
    taken = []
    monkeypatch.setattr(torch_device.torch, "set_num_threads", taken.append)
    monkeypatch.setattr(torch_device.torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch_device, "usable_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch_device.Device.open("cpu")
    assert taken == [3]
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    torch_device.Device.open("cpu")
    assert taken == [3]


@pytest.fixture
def unsaid(monkeypatch):
    """An environment that says nothing of how threads wait."""
    for name in {*SLEEPING, *SPINNING, "_ATTENTION_THREADS_SLEEP"}:
        monkeypatch.delenv(name, raising=False)


def test_threads_of_the_server_sleep_and_those_of_models_spin_first(unsaid, monkeypatch):
    chosen = dict[str, str]()
    sleep_while_waiting(chosen)
    assert chosen.items() >= SLEEPING.items()
    for environment in ({}, chosen):
        monkeypatch.setattr(os, "environ", environment)
        of_model = _environment()
        assert of_model.items() >= SPINNING.items()
        assert "OMP_WAIT_POLICY" not in of_model


@pytest.mark.parametrize(
    ("name", "value"), [("GOMP_SPINCOUNT", "1000"), ("OMP_WAIT_POLICY", "passive"), ("KMP_BLOCKTIME", "0")]
)
def test_a_user_says_how_the_threads_of_both_wait(unsaid, monkeypatch, name, value):
    environment = {name: value}
    sleep_while_waiting(environment)
    assert environment == {name: value}
    monkeypatch.setattr(os, "environ", environment)
    assert {key: each for key, each in _environment().items() if key in {*SLEEPING, *SPINNING}} == {name: value}


def test_the_server_says_so_before_it_imports_pytorch(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    run = subprocess.run(
        [sys.executable, "-c", SERVE], check=False, capture_output=True, text=True, env=kept, cwd=tmp_path, timeout=60
    )
    assert run.stdout == "False passive\n", run.stderr
