"""A server that nobody asks sleeps: its threads are woken a few times a second, and its model's process hardly ever."""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.test_health_listener import free_port
from tests.conftest import live_server

pytest.importorskip("transformers")
SECONDS = 3
pytestmark = pytest.mark.slow  # a busy machine wakes threads for reasons of its own


def look(ended: threading.Event) -> None:
    """Wake six times a second and read a file: the yardstick, since threads that wait for one lock wake more often."""
    while not ended.wait(1 / 6):
        Path("/proc/self/statm").read_bytes()


def wakes(threads: Iterable[Path]) -> int:
    """Count the times that threads slept until something woke them."""
    facts = [(thread / "status").read_text("utf-8") for thread in threads]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in facts)


def processes():
    """The processes below this one; that which forks those of tests is below it too."""
    return set(psutil.Process().children(recursive=True))


def test_an_idle_server_with_a_model_hardly_wakes(tmp_path):
    tasks, before, children = Path("/proc/self/task"), set(threading.enumerate()), processes()
    with live_server(tmp_path, health_port=free_port()) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny"}, timeout=120).raise_for_status()
        httpx.post(f"{url}/v1/models/tiny/forward", json={"text": "a"}, timeout=60).raise_for_status()
        process = max(processes() - children, key=lambda each: each.create_time())
        own = [tasks / str(each.native_id) for each in threading.enumerate() if each not in before]
        ended = threading.Event()
        yardstick = threading.Thread(target=look, args=(ended,))
        yardstick.start()
        watched = own, [tasks / str(yardstick.native_id)], list(Path(f"/proc/{process.pid}/task").iterdir())
        found = []
        for _ in range(5):  # other tests may disturb one
            counts = [wakes(each) for each in watched]
            time.sleep(SECONDS)
            found.append([wakes(each) - then for each, then in zip(watched, counts, strict=True)])
            if found[-1][0] <= 3 * found[-1][1] and found[-1][2] <= 1:
                break
        ended.set()
        yardstick.join()
    assert len(own) >= 3  # the event loop, the store's follower, the health checks
    assert found[-1][0] <= 3 * found[-1][1], found
    assert found[-1][2] <= 1, found
