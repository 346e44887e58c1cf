"""Callers who leave, and a worker that is killed: nobody waits for ever, and no token comes without its attention."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from attention_client import Client
from conftest import serving

ASKED = {
    "model": "m", "max_tokens": 400, "temperature": 0, "ignore_eos": True,
    "attention": {"layers": [0], "statistics": ["entropy"]},
}  # fmt: skip
LONG = ASKED | {"max_tokens": 1500, "prompt": [4, 6, 7]}
CALLERS = 8


@pytest.fixture
def url(served_model):
    with serving(served_model, "--tensor-parallel-size", "2") as address:
        yield address


def at_work(url):
    """The number of requests that vLLM computes."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def wait_for(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(url, at):
    """The events of a stream, or the reply, as text; None of a connection that was cut."""
    body = ASKED | {"prompt": [5 + at, 6, 7], "stream": at % 2 == 0}
    try:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=120).text
    except httpx.HTTPError:
        return None


def test_callers_who_leave_and_a_worker_that_is_killed_leave_nobody_waiting(url):
    with Client(url) as client:
        options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "attention": ASKED["attention"]}
        before = client.models.generate("m", [5, 6, 7], **options).choices[0]
        for at in range(CALLERS):
            body = ASKED | {"prompt": [9 + at, 6, 7], "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                next(reply.iter_lines())
        wait_for(lambda: at_work(url) == 0)
        after = client.models.generate("m", [5, 6, 7], **options).choices[0]
        assert [token.id for token in after.attention] == [token.id for token in before.attention]

    with ThreadPoolExecutor(CALLERS) as pool:
        asked = [pool.submit(ask, url, at) for at in range(CALLERS)]
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as reply:
            next(reply.iter_lines())  # this text is on its way
            processes = psutil.Process().children(recursive=True)
            (worker,) = [each for each in processes if "Worker_TP1" in " ".join(each.cmdline())]
            worker.kill()
        replies = [each.result(timeout=120) for each in asked]
    for text in replies:
        if text is None:
            continue
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(event) for event in events or [text]]
        for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
            assert choice["attention"] or not choice["text"]
