"""A model over two processes whose processes end or stand still, and whose callers leave, again and again.

python -m tests.models.server.test_spread_ends ENDS LEAVES prints what the callers got.
"""

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import httpx
import psutil
import pytest
from tests.conftest import eventually, live_server
from tests.models.server.test_spread_models import LOOK, QUESTIONS, TEXT, near

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork")]
CALLERS, PATIENCE_S = 16, 90.0
GENERATED = {"model": "two", "prompt": TEXT, "max_tokens": 24, "temperature": 0, "attention": LOOK}
ASKED = {
    **{f"/v1/models/two/{name}": QUESTIONS[name] for name in ("forward", "weights", "effects", "lens")},
    "/v1/models/two/gradients": {**QUESTIONS["gradients"], "check": False},  # a check takes seconds
    "/v1/completions": GENERATED,
    "/v1/models/two/context": QUESTIONS["context"],
}
WRONG = "/v1/models/two/forward", {"text": TEXT, "return": ["nothing"]}


class Callers:
    """Callers who ask at random, some of whom leave or set a deadline, until they are told to stop."""

    def __init__(self, url, seed):
        self.url, self.random = url, random.Random(seed)
        self.got, self.wrong, self.stopped = Counter(), [], threading.Event()
        self.expected = {}
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            for path, body in ASKED.items():
                reply = http.post(path, json=body)
                assert reply.status_code == 200, reply.text
                self.expected[path] = reply.json()

    def call(self, _):
        """Ask until told to stop."""
        with httpx.Client(base_url=self.url) as http:
            while not self.stopped.is_set():
                path, body = self.random.choice([*ASKED.items(), WRONG])
                way = self.random.choice(["stays", "stays", "leaves", "has a deadline"])
                self.got[way, self.outcome(http, way, path, body)] += 1

    def outcome(self, http, way, path, body):
        """Ask once. Returns what came of it."""
        seconds = self.random.choice([0.01, 0.1, 1, 5]) * self.random.uniform(0.5, 2)
        headers = {"prefer": f"wait={seconds:.3f}"} if way == "has a deadline" else {}
        try:
            reply = http.post(path, json=body, headers=headers, timeout=seconds if way == "leaves" else PATIENCE_S)
        except httpx.TimeoutException:
            if way != "leaves":
                self.wrong.append(f"{path} hung")
            return "left"
        found = reply.json()
        if reply.status_code == 200 and body is not WRONG[1]:
            expected = self.expected[path]
            try:
                if way == "has a deadline" and path == "/v1/completions":
                    expected = begun(expected, len(found["choices"][0]["attention"]), found["choices"][0]["text"])
                near(found, expected)
            except AssertionError as fault:
                self.wrong.append(f"{path}, {way}: {fault!s:.300}")
            return "200" if expected is self.expected[path] else "200 with the tokens so far"
        code = found.get("code") or found.get("error", {}).get("code")
        allowed = {"model_ended", "deadline_exceeded"} if way == "has a deadline" else {"model_ended"}
        if reply.status_code != 422 and code not in allowed:
            self.wrong.append(f"{path}, {way}: {reply.status_code} {reply.text:.300}")
        return f"{reply.status_code} {code}"

    @property
    def leaves(self):
        """The requests that were cancelled or had a deadline that passed."""
        return sum(count for (_, came), count in self.got.items() if came in {"left", "503 deadline_exceeded"})


def begun(expected, tokens, text):
    """The completion as a deadline ends it: with its first tokens alone."""
    choice = expected["choices"][0]
    if tokens == len(choice["attention"]):
        return expected
    assert choice["text"].startswith(text)
    used = {**expected["usage"], "completion_tokens": tokens}
    used["total_tokens"] = used["prompt_tokens"] + tokens
    cut = {**choice, "attention": choice["attention"][:tokens], "text": text}
    return {**expected, "choices": [cut], "usage": used}


def processes(http):
    """The processes of a model that is at work: that of the first device, and that of the other."""
    found = []

    def at_work():
        first = [each for each in psutil.Process().children() if "--spread" in each.cmdline()]
        found[:] = [*first, *(other for each in first for other in each.children())]
        return len(found) == 2 and http.get("/v1/models/two").json()["running"] > 0

    eventually(at_work, seconds=60)
    return found


def shower(url, ends, leaves, seed=0):
    """End processes at random under callers. Returns the callers, and the seconds until each next answer."""
    callers, waits = Callers(url, seed), []
    with ThreadPoolExecutor(CALLERS) as threads, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        calls = [threads.submit(callers.call, at) for at in range(CALLERS)]
        try:
            while len(waits) < ends or callers.leaves < leaves:
                one = processes(http)
                time.sleep(callers.random.uniform(0, 0.5))
                if len(waits) < ends:
                    at, sent = callers.random.choice([0, 1]), callers.random.choice([SIGKILL, SIGSTOP])
                    one[at].send_signal(sent)
                    callers.got["ended", f"{('first', 'other')[at]} by {sent.name}"] += 1
                    began = time.monotonic()
                    eventually(lambda one=one: not any(each.is_running() for each in one), seconds=60)
                    answered(http, callers)
                    waits.append(time.monotonic() - began)
                print(
                    f"{len(waits)} ends, {callers.leaves} leaves of {callers.got.total()}", file=sys.stderr, flush=True
                )
                if callers.wrong:
                    break
        finally:
            callers.stopped.set()
            for call in calls:
                call.result()
        answered(http, callers)
    return callers, waits


def answered(http, callers):
    """The next request is answered, unless the model ends under it, as it may where all ask at once."""
    path = "/v1/models/two/weights"
    while (reply := http.post(path, json=ASKED[path])).status_code == 503:
        time.sleep(0.1)
    assert reply.status_code == 200, reply.text
    near(reply.json(), callers.expected[path])


def test_callers_outlive_the_ends_of_processes_and_of_their_mates(tmp_path):
    with live_server(tmp_path, stuck_seconds=5) as url:
        loaded = httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny", "name": "two", "devices": 2}, timeout=60)
        assert loaded.status_code == 201, loaded.text
        callers, waits = shower(url, 6, 14)
    assert not callers.wrong
    assert len(waits) == 6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root, live_server(Path(root), stuck_seconds=3) as url:
        httpx.post(f"{url}/v1/models", json={"checkpoint": "tiny", "name": "two", "devices": 2}, timeout=60)
        callers, waits = shower(url, *map(int, sys.argv[1:3]))
    for (way, came), count in sorted(callers.got.items()):
        print(f"{way:16} {came:28} {count}")
    print(
        f"seconds until the next answer: mean {sum(waits) / max(1, len(waits)):.1f}, most {max(waits, default=0):.1f}"
    )
    print("\n".join(callers.wrong) or "nothing wrong")
