"""The application under servers other than its own: uvicorn as it comes, hypercorn and granian, each held to ASGI."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_contract.schemas.attention import ForwardReply, RawForwardRequest
from attention_contract.wire import SAFETENSORS, from_body, to_body
from attention_service.api.app import create_app
from attention_service.settings import Settings
from tests.api.strict_asgi import strict

ROOT = Path(__file__).parents[2]
SERVERS = ("uvicorn", "hypercorn", "granian")
ROWS = 2**18
"""Queries of 64 numbers whose output has 64 MiB."""


def settings(folder, **more):
    return Settings(_env_file=None, models_dir=folder, calibrate=False, threads=1, max_headers=32, **more)


@pytest.fixture(scope="module")
def large():
    """Return a request whose reply has 64 MiB, and the output: each query reads the mean of four values."""
    rng = np.random.default_rng(0)
    query = np.zeros((1, ROWS, 1), np.float32)
    key, value = np.zeros((1, 4, 1), np.float32), rng.integers(-8, 8, (1, 4, 64)).astype(np.float32)
    body = b"".join(to_body(RawForwardRequest(query=query, key=key, value=value), SAFETENSORS, "request"))
    return body, value.mean(1)


# ── in this process, without a server ────────────────────────────────────────────────────────────────────────────────


def ask(app, *requests):
    """Return what the application sends for each request: its head, and the pieces of its body."""

    async def play():
        async with app.router.lifespan_context(app):
            return [await answer(app, *request) for request in requests]

    return asyncio.run(play())


async def answer(app, method, path, body=b"", headers=(), kind="application/json"):
    coming = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        return coming.pop() if coming else await asyncio.get_running_loop().create_future()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "headers": [(b"host", b"localhost"), (b"content-type", kind.encode()), *headers],
    }  # fmt: skip
    await strict(app)(scope, receive, send)
    return sent[0], [message["body"] for message in sent[1:]]


def test_a_start_that_waits_ends_when_the_application_is_ready(tmp_path):
    ((head, body),) = ask(create_app(settings(tmp_path), wait_until_ready=True), ("GET", "/health/ready"))
    assert (head["status"], json.loads(body[0])["status"]) == (200, "ready")
    ((head, _),) = ask(create_app(settings(tmp_path)), ("GET", "/health/ready"))
    assert head["status"] == 503


def test_a_start_that_waits_fails_with_its_cause(tmp_path, monkeypatch):
    def broken(_):
        raise OSError("the disk is gone")

    monkeypatch.setattr("attention_service.modules.library.Library.load", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        ask(create_app(settings(tmp_path), wait_until_ready=True))


@pytest.mark.parametrize("sends", [True, False])
def test_the_request_id_is_sent_unless_it_is_set_outside(tmp_path, sends):
    app = create_app(settings(tmp_path), sends_request_id=sends)
    given = [(b"x-request-id", b"outer-1")]
    answers = ask(app, ("GET", "/health/live", b"", given), ("GET", "/v1/modules/none", b"", given))
    for head, _ in answers:
        assert [value for name, value in head["headers"] if name == b"x-request-id"] == [b"outer-1"] * sends
    assert json.loads(b"".join(answers[1][1]))["request_id"] == "outer-1"


def test_limits_of_a_head_hold_under_any_server(tmp_path):
    heads = {
        431: [[(b"x-many", b"1")] * 31, [(b"x-large", b"a" * 2**16)]],
        400: [[(b"content-length", b"-5")], [(b"content-length", b"5, 5")]],
    }
    requests = [(status, headers) for status, each in heads.items() for headers in each]
    forward = "POST", "/v1/attention/forward", b"{}"
    answers = ask(
        create_app(settings(tmp_path), wait_until_ready=True), *((*forward, headers) for _, headers in requests)
    )
    assert [head["status"] for head, _ in answers] == [status for status, _ in requests]
    assert [json.loads(b"".join(body))["status"] for _, body in answers] == [status for status, _ in requests]


@pytest.mark.slow
def test_a_large_reply_is_copied_part_by_part(tmp_path, large):
    body, output = large
    app = create_app(settings(tmp_path), wait_until_ready=True)
    request = "POST", "/v1/attention/forward", body, [(b"accept", SAFETENSORS.encode())], SAFETENSORS
    ((head, pieces),) = ask(app, request)
    assert head["status"] == 200
    assert max(map(len, pieces)) <= 2**18
    reply = from_body(ForwardReply, b"".join(pieces), SAFETENSORS, "reply")
    assert np.array_equal(reply.output[0], np.repeat(output, ROWS, 0))


# ── processes of other servers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Start the application under every server that is installed, all at a time, and return their addresses."""
    installed = [server for server in SERVERS if importlib.util.find_spec(server)]
    with ExitStack() as running, ThreadPoolExecutor() as pool:
        folders = [tmp_path_factory.mktemp(server) for server in installed]
        return_to = [running.enter_context(under(*each)) for each in zip(installed, folders, strict=True)]
        for ready in pool.map(_wait_until_it_answers, return_to):
            assert ready
        yield dict(zip(installed, return_to, strict=True))


@contextmanager
def under(server, folder):
    """Run the application under a server until the block ends. Yields its address, before it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {
        "ATTENTION_MODELS_DIR": str(folder), "ATTENTION_CALIBRATE": "false", "ATTENTION_THREADS": "1",
        "ATTENTION_MAX_HEADERS": "32", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.api.strict_asgi", server, str(port)]
    log = (folder / "server.log").open("wb")
    running = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        log.close()


def _wait_until_it_answers(address):
    """Return True once the server takes connections, by which time it is ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert httpx.get(f"{address}/health/ready").status_code == 200
            return True
        except httpx.TransportError:
            time.sleep(0.05)
    return False


@pytest.fixture(params=SERVERS)
def address(request, addresses):
    if request.param not in addresses:
        pytest.skip(f"{request.param} is not installed")
    return addresses[request.param]


@pytest.mark.slow
def test_a_large_reply_is_the_same_under_every_server(address, large):
    body, output = large
    headers = {"content-type": SAFETENSORS, "accept": SAFETENSORS}
    for _ in range(2):  # on one connection
        reply = httpx.post(f"{address}/v1/attention/forward", content=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text[:300]
        found = from_body(ForwardReply, reply.content, SAFETENSORS, "reply").output[0]
        assert np.array_equal(found, np.repeat(output, ROWS, 0))


@pytest.mark.slow
def test_a_streamed_text_is_the_same_under_every_server(address):
    query, key = np.zeros((2**15, 1), np.float32), np.zeros((2, 1), np.float32)
    value = np.arange(32, dtype=np.float32).reshape(2, 16)
    with Client(address) as client:
        reply = client.attention.forward(query, key, value, encoding="list")
    assert np.array_equal(reply.output, np.tile(value.mean(0), (2**15, 1)))


@pytest.mark.slow
def test_modules_sessions_pictures_and_streams_work_under_every_server(address):
    x = np.eye(4, dtype=np.float32)
    with Client(address) as client:
        client.modules.create("m", {"d_model": 4, "num_heads": 2, "spec": {"masks": [{"name": "causal"}]}}, seed=0)
        whole = client.forward("m", x).output
        assert client.gradients("m", x, wrt=["query"], check=True).check["query"].passed
        assert client.weights("m", x).plot("svg").data.startswith(b"<?xml")
        assert client.modules.parameters("m").parameters
        for streamed in (False, True):
            with client.sessions.open("m") as session, session.stream() if streamed else nullcontext():
                steps = [session.step(x[at : at + 1]).output for at in range(4)]
            np.testing.assert_allclose(np.concatenate(steps), whole, atol=1e-6)
        client.modules.delete("m")


@pytest.mark.slow
def test_refusals_and_files_are_the_same_under_every_server(address):
    with httpx.Client(base_url=address) as client:
        assert client.get("/v1/modules/none").json()["code"] == "module_not_found"
        broken = client.post("/v1/attention/forward", content=b"{", headers={"content-type": "application/json"})
        assert broken.status_code == 400
        many = {f"x-{at}": "1" for at in range(40)}
        assert client.get("/v1", headers=many).status_code == 431
        assert client.head("/v1").content == b""
        page = client.get("/")
        assert page.status_code == 200
        assert page.headers.get_list("x-request-id") == [page.headers["x-request-id"]]
        assert "attention_requests_total" in client.get("/metrics").text
        assert client.get("/v1", headers={"host": "elsewhere.example"}).status_code == 421
        assert client.get("/openapi.json", timeout=60).json()["openapi"].startswith("3.1")
