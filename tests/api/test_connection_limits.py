"""Limits of connections: heads while they arrive, deadlines of both directions, and how many there may be."""

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.wire import SAFETENSORS, to_body
from attention_service.api.http_limits import guarded_http
from attention_service.runtime import ticks
from tests.api.processes import process
from tests.api.talk import received
from tests.conftest import live_server

FORWARD = "/v1/attention/forward"
BODY = json.dumps({"query": [[1.0, 0.0]]}).encode()
HEAD = 4096
SETTINGS = {
    "max_head_bytes": HEAD, "max_headers": 32, "max_connections_per_address": 40, "head_timeout_s": 0.4,
    "body_timeout_s": 0.4, "write_timeout_s": 0.4, "least_rate": 2**16,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The address of a server with short deadlines and narrow limits."""
    with (
        patch.object(ticks, "TICK_S", 0.05),
        patch.object(guarded_http, "LEAVING_S", 0.3),
        live_server(tmp_path_factory.mktemp("models"), **SETTINGS) as address,
    ):
        yield address


def connected(url, receives=None):
    """A connection to a server; ``receives``: bytes that the system keeps for it."""
    address = urlsplit(url)
    raw = socket.socket()
    raw.settimeout(20)
    if receives is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    raw.connect((address.hostname, address.port))
    return raw


def talk(url, *parts):
    """The answer to what these parts are together."""
    with connected(url) as raw:
        for part in parts:
            raw.sendall(part)
        return received(raw)


def head(*lines, length=None):
    """The head of a request of raw attention, with these header lines."""
    length = len(BODY) if length is None else length
    own = (b"Host: localhost", b"Content-Type: application/json", b"Content-Length: %d" % length, *lines)
    return b"\r\n".join([b"POST %s HTTP/1.1" % FORWARD.encode(), *own, b"", b""])


def drain(raw):
    """Read a connection to its end."""
    while raw.recv(2**20):
        pass


def ends(raw):
    """The seconds until a connection is at its end, or reset."""
    started = time.monotonic()
    with suppress(ConnectionResetError):
        drain(raw)
    return time.monotonic() - started


def problem(answer):
    """The status and the problem document of an answer."""
    top, _, body = answer.partition("\r\n\r\n")
    return int(top.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET /v1 HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * HEAD],
        [b"GET /" + b"a" * HEAD * 3],
        [b"GET /v1 HTTP/1.1\r\n", *[b"X: %d\r\n" % i for i in range(HEAD // 6)]],
        [b"GET /v1 HTTP/1.1\r\nX-Long: " + b"a" * (HEAD * 20) + b"\r\n\r\n"],
        [head(b"X-Long: " + b"a" * HEAD) + BODY],
    ],
    ids=["header", "target", "many", "one part", "with a body"],
)
def test_a_head_of_too_many_bytes_is_refused_before_it_is_whole(url, parts):
    answer = talk(url, *parts)
    status, document = problem(answer)
    assert (status, document["code"]) == (431, "head_too_large")
    assert "max_head_bytes" in document["detail"]
    assert document["limit_bytes"] == HEAD < document["needed_bytes"]


def test_a_trailer_without_end_is_refused(url):
    chunked = head(b"Transfer-Encoding: chunked").replace(b"Content-Length: %d\r\n" % len(BODY), b"")
    with connected(url) as raw:
        raw.sendall(chunked + b"1\r\n{\r\n0\r\nX: ")
        time.sleep(0.05)
        raw.sendall(b"a" * HEAD * 2)
        status, document = problem(received(raw))
        assert (status, document["code"]) == (431, "head_too_large")
        drain(raw)


def test_a_head_of_too_many_headers_is_refused(url):
    status, document = problem(talk(url, head(*[b"X-%d: 1" % i for i in range(40)]), BODY))
    assert (status, document["limit"], document["actual"]) == (431, 32, 43)
    assert talk(url, head(*[b"X-%d: 1" % i for i in range(28)]), BODY).startswith("HTTP/1.1 200")


def test_a_large_body_right_behind_its_head_is_no_large_head(url):
    body = b" " * (HEAD * 9) + BODY
    assert talk(url, head(length=len(body)) + body).startswith("HTTP/1.1 200")


def test_a_silent_connection_is_closed_and_one_that_is_idle_is_not(url):
    with connected(url) as silent, connected(url) as idle:
        idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert received(idle).startswith("HTTP/1.1 200")
        assert 0.2 < ends(silent) < 20
        idle.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert received(idle).startswith("HTTP/1.1 200")


@pytest.mark.slow
def test_a_head_that_comes_byte_by_byte_is_refused_in_time(url):
    with connected(url) as raw:
        started = time.monotonic()
        for byte in b"GET /v1 HTTP/1.1\r\nX: aaaaaaaaaaaaaaaaaaaaa":
            raw.sendall(bytes([byte]))
            time.sleep(0.02)
            if time.monotonic() - started > 0.7:
                break
        status, document = problem(received(raw))
    assert (status, document["code"]) == (408, "too_slow")
    assert "head_timeout_s allows 0.4" in document["detail"]


def test_a_body_below_the_least_rate_is_refused_and_its_memory_is_free(url):
    with connected(url) as raw:
        raw.sendall(head(length=2**22) + bytes(2**21))
        answer = received(raw)
        status, document = problem(answer)
        assert (status, document["code"], document["limit"]) == (408, "too_slow", int(2**16 * 0.4))
        assert "connection: close" in answer.lower()
        ends(raw)
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert "attention_body_bytes 0.0" in lines


@pytest.mark.slow
def test_a_body_above_the_least_rate_may_take_several_deadlines(url):
    parts = [b" " * 2**14] * 8
    with connected(url) as raw:
        raw.sendall(head(length=2**17 + len(BODY)))
        for part in parts:
            time.sleep(0.12)
            raw.sendall(part)
        raw.sendall(BODY)
        assert received(raw).startswith("HTTP/1.1 200")


@pytest.mark.slow
def test_a_caller_that_reads_nothing_is_cut_and_one_that_reads_slowly_is_not(url):
    value, one = np.ones((2000, 2048), np.float32), np.ones((2000, 1), np.float32)  # more than the system keeps
    body = b"".join(to_body(RawForwardRequest(query=one, key=one, value=value), SAFETENSORS, "request"))
    request = head(length=len(body)).replace(b"application/json", SAFETENSORS.encode()) + body
    with connected(url, 2**15) as unread, connected(url, 2**15) as slow:
        for raw in (unread, slow):
            raw.sendall(request)
        got, deadline = 0, time.monotonic() + 20
        while 'cause="reader_too_slow"' not in httpx.get(f"{url}/metrics").text and time.monotonic() < deadline:
            got += len(slow.recv(2**13))
            time.sleep(0.01)
        while got < value.nbytes and (chunk := slow.recv(2**20)):
            got += len(chunk)
        assert got >= value.nbytes
        with pytest.raises(ConnectionResetError):
            drain(unread)


def test_connections_of_one_address_are_limited(url):
    with ExitStack() as stack:
        held = [stack.enter_context(connected(url)) for _ in range(40)]
        for raw in held:
            raw.sendall(b"G")
        time.sleep(0.1)
        with connected(url) as one_more:
            status, document = problem(received(one_more))
            assert (status, document["code"], document["limit"]) == (429, "too_many_connections", 40)
            assert "max_connections_per_address" in document["detail"]
        ends(held[0])
    time.sleep(0.1)
    assert httpx.get(f"{url}/health/live").status_code == 200


@pytest.mark.sampled
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("token", [b"h2c", b"TLS/1.0", b"h2c, websocket"])
def test_an_upgrade_that_is_not_offered_is_ignored(url, token, apart):
    upgrade = head(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + token, b"HTTP2-Settings: AAMAAABk")
    parts = [upgrade[:30], upgrade[30:], BODY[:5], BODY[5:]] if apart else [upgrade + BODY]
    with connected(url) as raw:
        for _ in range(2):  # the connection stays usable
            for part in parts:
                raw.sendall(part)
                time.sleep(0.02 * apart)
            answer = received(raw)
            assert answer.startswith("HTTP/1.1 200"), answer


def test_an_ignored_upgrade_does_not_change_how_the_body_is_framed(url):
    chunked = head(b"Connection: Upgrade", b"Upgrade: h2c", b"Transfer-Encoding: chunked")
    chunked = chunked.replace(b"Content-Length: %d\r\n" % len(BODY), b"")
    assert talk(url, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)).startswith("HTTP/1.1 200")
    close = head(b"Connection: close, Upgrade", b"Upgrade: h2c")
    assert "connection: close" in talk(url, close + BODY).lower()


def test_connect_is_not_begun_again(url):
    answer = talk(url, b"CONNECT x:80 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.split()[1] in {"400", "404", "405"}


@pytest.mark.slow
def test_a_process_refuses_what_exceeds_its_open_files_and_stops_without_waiting_for_slow_callers(tmp_path):
    limited = ["sh", "-c", 'ulimit -Sn 200; ulimit -Hn 256; exec "$@"', "sh"]
    popen = subprocess.Popen
    with (
        patch.object(subprocess, "Popen", lambda command, **options: popen([*limited, *command], **options)),
        process(tmp_path, "--drain-seconds", "20") as (server, url),
        ExitStack() as stack,
    ):
        if sys.platform == "linux":
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (256, 256)
        half = stack.enter_context(connected(url))
        half.sendall(head(length=2**20) + bytes(2**19))
        held = [stack.enter_context(connected(url)) for _ in range(160)]
        status, document = problem(received(held[-1]))
        assert (status, document["code"], document["limit"]) == (503, "connections_exhausted", 128)
        time.sleep(1.1)  # until the next line of the log
        started = time.monotonic()
        server.send_signal(signal.SIGTERM)
        status, document = problem(received(half))
        assert (status, document["code"]) == (503, "draining")
        assert server.wait(20) == 0
        assert time.monotonic() - started < 8  # 1 s of grace, and what a busy machine adds
        lines = [json.loads(line) for line in server.stderr.read().splitlines()]
    cut = [line for line in lines if line["event"] == "connections refused or cut"]
    assert 32 <= sum(line.get("connections_exhausted", 0) for line in cut) <= 34
    assert len(cut) <= 3
