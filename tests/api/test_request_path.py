"""The path of a warm request over HTTP: how many functions and files of the project it passes.

A reader follows a request by these files; each call costs about a third of a microsecond.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from attention_client import Client
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.models.server import worker_process
from attention_service.models.worker_messages import WorkerMessage
from tests.conftest import live_server
from tests.passed_functions import Calls, PassedFunctions

WARM, COUNTED = 20, 21
CALLS = {"forward": 188, "weights": 362, "step": 228, "model weights": 1600}
"""Calls that one request passes at most."""
FILES = {"forward": 43, "weights": 57, "step": 54, "model weights": 128}
"""Files in which they lie."""
TOKEN_CALLS = {"plain": 60, "attention": 291}
"""Calls of a model's process that a generated token passes at most, without attention and with all of it."""
JSON_ONLY = {"content-type": JSON, "accept": JSON}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, PassedFunctions]]:
    passed, before = PassedFunctions(), threading.getprofile()
    threading.setprofile(passed.see)
    try:
        with (
            live_server(tmp_path_factory.mktemp("models")) as url,
            httpx.Client(
                base_url=url, timeout=60, headers={"content-type": SAFETENSORS, "accept": SAFETENSORS}
            ) as client,
        ):
            module = {"name": "m", "config": {"d_model": 256, "num_heads": 4}, "seed": 0}
            client.post("/v1/modules", json=module, headers=JSON_ONLY).raise_for_status()
            yield client, passed
    finally:
        threading.setprofile(before)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer calls functions of its own")
@pytest.mark.parametrize("question", ["forward", "weights", "step"])
def test_a_warm_request_passes_few_functions_in_few_files(watched, question):
    client, passed = watched
    path, tokens = f"/v1/modules/m/{question}", 16
    if question == "step":
        opened = client.post("/v1/modules/m/sessions", json={}, headers=JSON_ONLY).raise_for_status()
        path, tokens = f"/v1/sessions/{opened.json()['session']}/step", 1
    body = save({"query": np.random.default_rng(0).normal(size=(1, tokens, 256)).astype("f4")})

    found: list[Calls] = []
    for number in range(WARM + COUNTED):
        passed.fresh()
        client.post(path, content=body).raise_for_status()
        found += [passed.fresh()] if number >= WARM else []
    # Observations are digested many at a time, on a busy machine with almost every request: the least has none.
    least = min(found, key=Counter.total)
    assert least.total() <= CALLS[question], least.most_common()
    files = {file for file, _ in least}
    assert len(files) <= FILES[question], sorted(files)


@pytest.fixture
def model_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls that processes of models make, which they tell with the end of each request."""
    found: Calls = Counter()
    take_in = worker_process.WorkerProcess._take_in

    def counting(process: worker_process.WorkerProcess, message: WorkerMessage | None) -> None:
        if message is not None and message.kind == "done":
            found.update({(file, name): count for file, name, count in message.facts.pop("passed")})
        take_in(process, message)

    monkeypatch.setattr(worker_process.WorkerProcess, "_take_in", counting)
    monkeypatch.setattr(worker_process, "COMMAND", (sys.executable, "-m", "tests.models.counted_process"))
    return found


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer calls functions of its own")
def test_the_weights_of_a_model_pass_few_functions_in_few_files(watched, model_calls):
    """All functions from the call of the client to its reply: in the client, in the server, and in the process."""
    http, served = watched
    called, found = PassedFunctions(), list[Calls]()
    with Client(str(http.base_url), timeout=60) as client:
        for number in range(WARM + COUNTED):
            for each in (served.fresh(), called.fresh(), model_calls):
                each.clear()
            sys.setprofile(called.see)
            client.models.weights("tiny", text=f"the cat sat on the mat and then it ran {number}")
            sys.setprofile(None)
            found += [served.fresh() + called.fresh() + model_calls] if number >= WARM else []
    typical = sorted(found, key=Counter.total)[2]
    assert typical.total() <= CALLS["model weights"], typical.most_common()
    files = sorted(({file for file, _ in each} for each in found), key=len)[2]  # observations pass further ones
    assert len(files) <= FILES["model weights"], sorted(files)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer calls functions of its own")
@pytest.mark.parametrize("asked", TOKEN_CALLS)
def test_a_generated_token_passes_few_functions(watched, model_calls, asked):
    http, _ = watched
    few, many, found = 9, 41, dict[int, int]()
    for tokens in (few, many):
        body = {"model": "tiny", "prompt": "the cat sat on the mat", "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True} | ({"attention": {}} if asked == "attention" else {})
        for _ in range(3):  # the last is warm, and is asked when no process is busy with another
            model_calls.clear()
            http.post("/v1/completions", json=body, headers=JSON_ONLY).raise_for_status()
        looks = sum(count for (file, _), count in model_calls.items() if file.endswith("shared_cores.py"))
        found[tokens] = model_calls.total() - looks  # at other programs, ten times a second
    assert (found[many] - found[few]) / (many - few) <= TOKEN_CALLS[asked], model_calls.most_common(40)
