"""Much work over one connection: it ends, and other callers are answered meanwhile."""

import select
import signal
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import httpx
import pytest

from attention_service.api.http_limits import guarded_http, guarded_stream
from attention_service.api.http_limits.guarded_connection import TURN, GuardedConnection
from attention_service.runtime import ticks
from tests.api.processes import process
from tests.api.test_connection_limits import connected
from tests.api.test_protocol_abuse import statuses, until_closed
from tests.conftest import eventually, live_server

pytestmark = pytest.mark.long

SETTINGS = {
    "head_timeout_s": 1, "body_timeout_s": 1, "write_timeout_s": 1, "least_rate": 2**12, "memory_budget": 2**29,
}  # fmt: skip
UPGRADE = b"host: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
KEY = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
GET = b"GET /v1/sessions/stream HTTP/1.1\r\n"
CHUNKED = (
    b"POST /v1/attention/forward HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
MASK = b"\0\0\0\0"


def frame(first: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """A frame of a caller; ``length``: what it says, where that is not what follows."""
    length = len(payload) if length is None else length
    size = bytes([0x80 | length]) if length < 126 else bytes([0x80 | 127]) + length.to_bytes(8, "big")
    return bytes([first]) + size + MASK + payload


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server with short deadlines, whose connections are looked at often."""
    with (
        patch.object(ticks, "TICK_S", 0.05),
        patch.object(guarded_http, "LEAVING_S", 0.3),
        patch.object(guarded_stream, "LEAVING_S", 0.3),
        live_server(tmp_path_factory.mktemp("models"), **SETTINGS) as address,
    ):
        yield address


@contextmanager
def stream(url):
    """A connection on which a stream has begun."""
    with connected(url) as raw:
        raw.sendall(GET + UPGRADE + KEY + b"\r\n")
        assert b" 101 " in raw.recv(65536).split(b"\r\n")[0]
        yield raw


HUNG = {
    "a length": GET + UPGRADE + KEY + b"content-length: 1\r\n\r\n",
    "chunks": GET + UPGRADE + KEY + b"transfer-encoding: chunked\r\n\r\n",
    "a long header": GET + UPGRADE + KEY + b"x-long: " + b"a" * 8190 + b"\r\n\r\n",
    "a long target": GET.replace(b" HTTP", b"?" + b"a" * 9000 + b" HTTP") + UPGRADE + KEY + b"\r\n",
    "a body": GET.replace(b"GET", b"POST") + UPGRADE + KEY + b"content-length: 2\r\n\r\n{}",
    "an odd name": GET + UPGRADE + KEY + b"x'y: 1\r\n\x7f: 1\r\n\r\n",
    "a request before it": b"GET /v1 HTTP/1.1\r\nhost: localhost\r\n\r\n" + GET + UPGRADE + KEY + b"\r\n",
}


@pytest.mark.parametrize("request_name", HUNG)
def test_a_handshake_that_cannot_be_read_is_refused_and_its_connection_closed(url, request_name):
    with connected(url) as raw:
        raw.sendall(HUNG[request_name])
        came = until_closed(raw)
    assert statuses(came) in ([400], [431], [200]), came
    assert (b"application/problem+json" in came) == (statuses(came) != [200])


@pytest.mark.slow
def test_a_refused_handshake_does_not_end_the_drain(tmp_path):
    with process(tmp_path, "--drain-seconds", "20") as (server, url), ExitStack() as stack:
        for hung in HUNG.values():
            stack.enter_context(connected(url)).sendall(hung)
        slow = stack.enter_context(connected(url))
        slow.sendall(CHUNKED + b"12\r\n" + b'{"query": [[1.0]]}'[:9])
        time.sleep(0.2)  # until it was accepted
        server.send_signal(signal.SIGTERM)
        slow.sendall(b'{"query": [[1.0]]}'[9:] + b"\r\n0\r\n\r\n")
        assert statuses(until_closed(slow)) in ([200], [503])  # it came whole before the stop, or not
        assert server.wait(60) == 0


def heads(raw):
    raw.sendall(b"GET /v1/variants HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200)


def small_chunks(raw):
    raw.sendall(b"1\r\n[\r\n" * 2000)


def pongs(raw):
    raw.sendall(frame(0x8A) * 2000)


def continuations(raw):
    raw.sendall(frame(0x00) * 2000)


def pings(raw):
    raw.sendall(frame(0x89, bytes(120)) * 200)


FLOODS = {
    "heads": (connected, b"", heads),
    "chunks of a byte": (connected, CHUNKED, small_chunks),
    "pongs": (stream, b"", pongs),
    "empty continuations": (stream, frame(0x02), continuations),
    "pings": (stream, b"", pings),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_over_one_connection_ends_it_and_keeps_nobody_waiting(url, name):
    begin, first, send = FLOODS[name]
    ended = threading.Event()

    def flood():
        with begin(url) as raw:
            raw.settimeout(60)
            try:
                raw.sendall(first)
                while True:
                    send(raw)
            except (ConnectionError, TimeoutError) as fault:
                if not isinstance(fault, TimeoutError):
                    ended.set()

    thread = threading.Thread(target=flood)
    thread.start()
    count = 0
    with httpx.Client(base_url=url, timeout=30) as http:
        while not ended.is_set() and thread.is_alive():
            assert http.get("/health/live").status_code == 200
            count += 1
    thread.join(60)
    assert ended.is_set()
    assert count


def test_what_comes_is_parsed_a_share_in_each_turn_and_reading_waits(monkeypatch):
    calls, turns = [], []

    class Loop:
        def call_soon(self, run):
            turns.append(run)
            return run

    class Transport:
        def pause_reading(self):
            calls.append("pause")

        def resume_reading(self):
            calls.append("resume")

        def is_closing(self):
            return False

    class Connection(GuardedConnection):
        transport, read_paused = Transport(), False

        def _may_parse(self):
            return True

        def _parse(self, portion):
            parsed.extend(portion)
            self.work += len(portion)  # each byte is a piece

    monkeypatch.setattr("asyncio.get_running_loop", Loop)
    parsed, connection = bytearray(), Connection()
    sent = bytes(range(256)) * 100
    connection.data_received(sent)
    most = len(parsed)
    while turns:
        assert connection.held
        before = len(parsed)
        turns.pop()()
        assert len(parsed) - before <= TURN + 256
    assert bytes(parsed) == sent
    assert most < len(sent)
    assert calls[-1] == "resume"
    assert "resume" not in calls[:-1]


@pytest.mark.slow
def test_messages_that_do_not_end_count_against_the_budget_and_are_cut(url):
    length = 15 * 2**20
    connections = []
    try:
        refused = 0
        for _ in range(24):
            raw = socket.create_connection(tuple(url.removeprefix("http://").split(":")))
            raw.settimeout(60)
            raw.sendall(GET + UPGRADE + KEY + b"\r\n")
            assert b" 101 " in raw.recv(65536).split(b"\r\n")[0]
            connections.append(raw)
            try:
                raw.sendall(frame(0x82, bytes(length - 1), length))
            except ConnectionError:
                refused += 1
        assert _bodies(url) <= 2**28
        assert refused or any(map(_is_informed, connections)), "nobody was told: cut for want of memory, or of time"
        eventually(lambda: _bodies(url) == 0)
        for raw in connections:
            _drain(raw)
    finally:
        for raw in connections:
            raw.close()


def test_fragments_that_come_too_slowly_are_cut_though_pings_are_answered(url):
    with stream(url) as raw:
        raw.sendall(frame(0x02, b"a"))
        assert eventually(lambda: not _sends(raw, frame(0x00, b"b") + frame(0x89, b"still here")))


def _is_informed(raw):
    """True if the server sent something, as before it closes a connection."""
    return bool(select.select([raw], [], [], 0)[0])


def _sends(raw, data):
    try:
        raw.sendall(data)
    except ConnectionError:
        return False
    return True


def _bodies(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith("attention_body_bytes ")]
    return float(value)


def _drain(raw):
    try:
        while raw.recv(2**16):
            pass
    except ConnectionError:
        pass
