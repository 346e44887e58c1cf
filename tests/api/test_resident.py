"""What is in memory: of requests no more than is being worked on, and of programs no more than is needed."""

import gc
import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import orjson
import pytest
import torch

from attention_client import Client
from attention_contract.wire import JSON
from tests.api.processes import process
from tests.conftest import live_server

WIDTH, LENGTH = 64, 512
"""Of a pass that runs on the device's thread, whatever the processor."""
LARGE = 2**15
"""Bytes of a buffer that matters."""
QUERY = np.random.default_rng(0).standard_normal((1, LENGTH, WIDTH), np.float32)
LISTS = QUERY.tolist()
FORWARD, GRADIENTS = "/v1/modules/m/forward", "/v1/modules/m/gradients"


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    with live_server(tmp_path_factory.mktemp("models")) as url:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
        for name, dtype in ("m", "float32"), ("half", "float16"):
            module = {"name": name, "config": {"d_model": WIDTH, "num_heads": 4, "dtype": dtype}, "seed": 0}
            assert send(connection, "/v1/modules", orjson.dumps(module)) == 201
        yield connection
        connection.close()


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def send(connection, path, body, **headers):
    """The status of the answer."""
    connection.request("POST", path, body, {"Content-Type": JSON} | headers)
    with connection.getresponse() as answer:
        answer.read()
    return answer.status


def left_to_the_collector():
    """Large buffers that only the collector would free, as text."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    held = [(owner, each) for owner in gc.garbage for each in (owner, *gc.get_referents(owner))]
    gc.garbage.clear()
    lines = [
        f"{type(each).__name__} of {size} bytes in {owner!r:.200}" for owner, each in held if (size := _size(each))
    ]
    del held
    gc.collect()
    return lines


def _size(thing):
    if isinstance(thing, np.ndarray | torch.Tensor | memoryview):
        return thing.nbytes * (thing.nbytes >= LARGE)
    return len(thing) * (len(thing) >= LARGE) if isinstance(thing, bytes | bytearray) else 0


STORIES = {
    "output": (FORWARD, {"query": LISTS}, 200),
    "taps": (FORWARD, {"query": LISTS, "return": ["output", "weights", "lse"]}, 200),
    "weights": ("/v1/modules/m/weights", {"query": LISTS}, 200),
    "gradients": (GRADIENTS, {"query": LISTS, "wrt": ["query", "weights", "parameters"]}, 200),
    "retrieval": ("/v1/hopfield/retrieve", {"stored": LISTS[0], "states": LISTS[0]}, 200),
    "ragged": (FORWARD, {"query": [*LISTS, [1.0]]}, 422),
    "too narrow": (FORWARD, {"query": QUERY[..., :32].tolist()}, 422),
    "unknown field": (FORWARD, {"query": LISTS, "quarry": 1}, 422),
    "unknown kernel": (FORWARD, {"query": LISTS, "kernel": "none"}, 422),
    "unknown module": ("/v1/modules/n/forward", {"query": LISTS}, 404),
    "larger than a mebibyte": (FORWARD, {"query": LISTS * 4, "quarry": 1}, 422),  # read on a thread
    "too large a number": ("/v1/modules/half/forward", {"query": (QUERY * 1e6).tolist()}, 422),  # found on the device
}


@pytest.mark.sampled(story=4)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("story", STORIES)
def test_nothing_of_a_request_waits_for_the_collector(connection, story):
    path, request, status = STORIES[story]
    body = orjson.dumps(request)
    for _ in range(2):
        assert send(connection, path, body) == status
        assert send(connection, path, gzip.compress(body, 1), **{"Content-Encoding": "gzip"}) == status
    assert send(connection, FORWARD, b"{}") == 422  # what came before is over, also behind the answer
    assert left_to_the_collector() == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_large_requests_need_their_bodies_and_one_pass(tmp_path):
    callers, each = 4, 6
    query = np.ones((8, 512, 512), np.float32)
    with process(tmp_path, "--threads", "1") as (server, url), Client(url) as client:
        client.modules.create("m", {"d_model": 512, "num_heads": 8}, seed=0)

        def resident(field):
            lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

        def ask(_):
            with Client(url) as mine:
                return max(mine.forward("m", query).ran.peak_bytes for _ in range(each))

        before = resident("VmRSS")
        with ThreadPoolExecutor(callers) as pool:
            passes = max(pool.map(ask, range(callers)))
        grown = resident("VmHWM") - before
    bodies = callers * 2 * query.nbytes
    assert grown < 2 * (bodies + passes)  # in holes between others some memory is of no use


STARTED = """
import asyncio, json, sys
from pathlib import Path
from typing import get_args
import httpx
from attention_contract.schemas.analyses.attribution import AttributionMethod
from attention_contract.schemas.weights import OF_SOME_ATTENTIONS, StatisticName
from attention_service.api.app import create_app
from attention_service.settings import Settings

async def main():
    app = create_app(Settings(models_dir=Path(sys.argv[1]), calibrate=False))
    asked = {"query": [[0.5] * 8] * 4}
    async with app.router.lifespan_context(app):
        while app.state.engine.state == "loading":
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            module = {"name": "m", "config": {"d_model": 8, "num_heads": 2}, "seed": 0}
            assert (await http.post("/v1/modules", json=module)).status_code == 201
            options = {"tokens": [1, 2, 1, 2], "needle": [True] * 4, "classes": {"c": [True, False, True, True]}}
            options["pairs"] = [[1, 0]]
            names = sorted({*get_args(StatisticName)} - OF_SOME_ATTENTIONS)
            told = {"statistics": names, "statistic_options": options, "pool": 2}
            for question, more in (
                ("forward", {}),
                ("weights", {}),
                ("weights", told),
                ("gradients", {"wrt": ["query", "weights"]}),
                ("attribution", {"methods": list(get_args(AttributionMethod))}),
            ):
                answer = await http.post(f"/v1/modules/m/{question}", json=asked | more)
                assert answer.status_code == 200, answer.text
    print(json.dumps(list(sys.modules)))

asyncio.run(main())
"""


@pytest.mark.long
def test_the_server_does_not_import_what_it_does_not_need(tmp_path):
    command = [sys.executable, "-c", STARTED, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    imported = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "fastapi"} <= imported
    heavy = {"matplotlib", "networkx", "pandas", "sympy", "torch._dynamo", "torch._inductor", "transformers"}
    assert not heavy & imported
