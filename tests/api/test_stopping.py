"""A server ends within its limit, whatever its threads wait for."""

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from attention_service.modules.library import Library
from tests.api.processes import process

WAITING = """
import threading
from attention_service.api import serving
from attention_service.modules.checkpoints import catalogue
from attention_service.runtime.operations import complexity, forward
from attention_service.runtime.scheduling import batches, jobs, request_runner
from attention_service.runtime.scheduling.executor import Executor

for_ever = lambda *arguments, **options: threading.Event().wait()
serving.STOP_S = 1.0
"""
"""What each server of this file begins with."""
KINDS = {
    "attention-cpu": (
        "Executor._stays = lambda *_: False; batches.execute = jobs.execute = for_ever",
        "POST",
        "/v1/attention/weights",
    ),
    "attention-planning": (
        "request_runner.quickly_planned = lambda *_: False; forward.prepare = for_ever",
        "POST",
        "/v1/attention/forward",
    ),
    "attention-store": ("catalogue.listed = for_ever", "GET", "/v1/checkpoints"),
    "attention-complexity": ("complexity.report = for_ever", "POST", "/v1/attention/complexity"),
}
"""The threads of an engine: what makes one wait for ever, and the request that it answers."""
BODIES = {"/v1/attention/complexity": {"num_heads": 1, "head_dim": 2, "shape": {"queries": 2}}}
BODY = {"query": [[[0.5, 0.25], [1.0, -1.0]]], "num_heads": 1}


def ask(url, kind):
    _, method, path = KINDS[kind]
    with suppress(httpx.HTTPError):  # the server ends meanwhile
        httpx.request(method, url + path, json=BODIES.get(path, BODY) if method == "POST" else None, timeout=60)


def stop(server, within):
    """End a server by SIGTERM: its status, once it and all that it has started have ended in time."""
    children = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(signal.SIGTERM)
    since = time.monotonic()
    status = server.wait(within)
    assert time.monotonic() - since < within
    _, left = psutil.wait_procs(children, 5)
    assert left == []
    return status


SHARED = Path("/dev/shm")  # noqa: S108 - it is looked at alone


def shared_memory():
    return {entry.name for entry in SHARED.iterdir()} if SHARED.is_dir() else set()


@pytest.mark.slow
@pytest.mark.parametrize("drain", ["0", "1"])
def test_threads_that_wait_for_ever_do_not_keep_a_server(tmp_path, drain):
    shared = shared_memory()
    waiting = "\n".join([WAITING, *(code for code, _, _ in KINDS.values())])
    with process(tmp_path, "--drain-seconds", drain, before=waiting) as (server, url):
        made = httpx.post(
            f"{url}/v1/modules", json={"name": "kept", "config": {"d_model": 8, "num_heads": 2}, "seed": 0}
        )
        asking = [threading.Thread(target=ask, args=(url, kind)) for kind in KINDS]
        for each in asking:
            each.start()
            time.sleep(0.3)
        assert stop(server, 20) == 0
        log = server.stderr.read().decode()
        for each in asking:
            each.join(20)
    [told] = [line for line in log.splitlines() if "some of its threads have not" in line]
    assert [kind for kind in KINDS if kind not in told] == []
    assert shared_memory() <= shared
    library = Library(tmp_path, torch.device("cpu"))
    library.load()
    assert library.get("kept").version == made.json()["version"]  # what was acknowledged


@pytest.mark.slow
def test_a_server_with_a_model_ends_with_its_processes(tmp_path):
    """The thread of the loop's own waits too, after the engine has stopped."""
    waiting = f"{WAITING}{KINDS['attention-store'][0]}\nfrom attention_service.api import residency\n"
    waiting += "residency.give_back_freed_memory = for_ever"
    with process(tmp_path, "--drain-seconds", "0", before=waiting) as (server, url):
        assert httpx.post(f"{url}/v1/models/tiny/forward", json={"text": "the cat"}, timeout=60).status_code == 200
        assert len(psutil.Process(server.pid).children()) >= 1
        asking = threading.Thread(target=ask, args=(url, "attention-store"))
        asking.start()
        time.sleep(0.3)
        assert stop(server, 20) == 0
        asking.join(20)


@pytest.mark.slow
def test_a_server_that_waits_for_its_modules_for_ever_ends(tmp_path):
    waiting = f"{WAITING}from attention_service.modules.library import Library\nLibrary.load = for_ever"
    with process(tmp_path, "--drain-seconds", "1", before=waiting, path="/health/live") as (server, _):
        assert stop(server, 20) == 0


ALONE = """
import signal, subprocess, sys, threading
from attention_service.api.stop_limit import StopLimit
limit = StopLimit(lambda: 7)
signal.signal(signal.SIGTERM, lambda *_: limit.end_within(float(sys.argv[1])))
child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
threading.Thread(target=threading.Event().wait, name="waiting").start()
print(child.pid, flush=True)
"""


@pytest.mark.slow
def test_the_first_limit_holds_however_often_it_is_set():
    alone = subprocess.Popen([sys.executable, "-c", ALONE, "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with alone:
        child = psutil.Process(int(alone.stdout.readline()))
        since, again = time.monotonic(), 0
        while alone.poll() is None:  # each signal would end it a second later
            assert time.monotonic() - since < 20
            alone.send_signal(signal.SIGTERM)
            again += 1
            time.sleep(0.1)
        assert again > 2
        assert alone.returncode == 7
        assert psutil.wait_procs([child], 5)[1] == []
        assert b"waiting in Condition.wait" in alone.stderr.read()
