"""The path of a warm request over HTTP: how many functions and files of the project it passes.

A reader follows a request by these files; each call costs about a third of a microsecond.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from attention_contract.wire import JSON, SAFETENSORS
from tests.conftest import live_server

WARM, COUNTED = 20, 21
CALLS = {"forward": 188, "weights": 360, "step": 228}
"""Calls that one request passes at most."""
FILES = {"forward": 42, "weights": 55, "step": 53}
"""Files in which they lie."""
JSON_ONLY = {"content-type": JSON, "accept": JSON}


class Passed:
    """The project's functions that the threads of a server enter, while they are counted."""

    def __init__(self) -> None:
        self._files: dict[str, str | None] = {}
        self._calls: Counter[tuple[str, str]] | None = None

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; a generator counts each time that it goes on."""
        if self._calls is None or event != "call":
            return
        code = frame.f_code
        file = self._files.setdefault(code.co_filename, code.co_filename.partition("/attention_")[2] or None)
        if file is not None:
            self._calls[file, code.co_qualname] += 1

    def fresh(self) -> Counter[tuple[str, str]]:
        """A new counter of the calls from now on, by file and function. It may begin with the last ones of a reply."""
        self._calls = Counter()
        return self._calls


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Passed]]:
    passed, before = Passed(), threading.getprofile()
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
@pytest.mark.parametrize("question", CALLS)
def test_a_warm_request_passes_few_functions_in_few_files(watched, question):
    client, passed = watched
    path, tokens = f"/v1/modules/m/{question}", 16
    if question == "step":
        opened = client.post("/v1/modules/m/sessions", json={}, headers=JSON_ONLY).raise_for_status()
        path, tokens = f"/v1/sessions/{opened.json()['session']}/step", 1
    body = save({"query": np.random.default_rng(0).normal(size=(1, tokens, 256)).astype("f4")})

    found: list[Counter[tuple[str, str]]] = []
    for number in range(WARM + COUNTED):
        calls = passed.fresh()
        client.post(path, content=body).raise_for_status()
        found += [calls] if number >= WARM else []
    # Observations are digested many at a time, on a busy machine with every request: the few least have none.
    typical = sorted(found, key=Counter.total)[2]
    assert typical.total() <= CALLS[question], typical.most_common()
    files = {file for file, _ in typical}
    assert len(files) <= FILES[question], sorted(files)
