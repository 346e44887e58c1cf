"""The connections of both clients over real HTTP: shared, kept, replaced, cancelled and secured; large bodies."""

import asyncio
import gc
import socket
import ssl
import struct
import threading
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import trustme

from attention_client import AsyncClient, Client, ConnectionFailed, DeadlineExceeded
from attention_contract.errors import BodyTooLarge
from attention_contract.schemas.attention import ForwardReply
from attention_contract.wire import SAFETENSORS, to_body
from tests.client.service import RAN, X, both, reply_of
from tests.client.tcp import listening, read_request, stubborn


def forward_all(kind, url, queries, at_once):
    """Return the replies to all queries, so many at a time over one client."""

    async def awaited(client):
        turns = asyncio.Semaphore(at_once)

        async def one(query):
            async with turns:
                return await client.forward("demo", query)

        return await asyncio.gather(*map(one, queries))

    def blocking(client):
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(lambda query: client.forward("demo", query), queries))

    return both(kind, url, awaited if kind == "async" else blocking)


@pytest.mark.sampled
@pytest.mark.parametrize("at_once", [1, 32])
def test_calls_side_by_side_get_their_own_answers_over_as_many_connections(kind, at_once, rng):
    queries = [rng.standard_normal((1, 1 + index % 5, 8)).astype(np.float32) for index in range(4 * at_once)]
    with listening() as service:
        replies = forward_all(kind, service.url, queries, at_once)
        assert len(set(service.connections)) <= at_once
        assert len(service.connections) == len(queries)
    for query, reply in zip(queries, replies, strict=True):
        np.testing.assert_array_equal(reply.output, query)


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(kind):
    async def ask(client):
        for _ in range(5):
            await reply_of(client.modules.delete("demo"))  # which would not be repeated
            await asyncio.to_thread(service.closed.acquire, timeout=20)

    with listening() as service:
        service.drops = True
        both(kind, service.url, ask, retries=0)
        assert len(set(service.connections)) == 5


def good_answer():
    body = b"".join(to_body(ForwardReply(output=X, ran=RAN), SAFETENSORS, "reply"))
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        SAFETENSORS.encode(), len(body), body,
    )  # fmt: skip


def test_only_what_is_safe_is_sent_again_where_a_kept_connection_breaks(kind):
    seen = []

    def once_each(connection, over):
        seen.append(read_request(connection))
        connection.sendall(good_answer())
        seen.append(read_request(connection))  # and hangs up

    async def ask(client):
        for _ in range(3):
            await reply_of(client.forward("demo", X))
        await reply_of(client.modules.delete("demo"))

    with stubborn(once_each) as url, pytest.raises(ConnectionFailed, match="broke") as caught:
        both(kind, url, ask)
    assert caught.value.facts["sent"] is True
    assert [line.split()[0] for line in seen] == [b"POST"] * 5 + [b"DELETE"]


def test_a_client_serves_one_event_loop_after_another():
    with listening() as service, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody can close what was left of a loop that is closed
        client = AsyncClient(service.url)
        for _ in range(2):
            assert asyncio.run(client.server.info()).name == "attention-service"
        asyncio.run(client.aclose())
        del client
        gc.collect()
        assert len(set(service.connections)) == 2


# ── time and cancellation ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
async def test_a_cancelled_call_gives_its_connection_up():
    hung_up = threading.Semaphore(0)

    def silent(connection, over):
        read_request(connection)
        if not connection.recv(1):
            hung_up.release()

    with stubborn(silent) as url:
        async with AsyncClient(url) as client:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.forward("demo", X), 0.3)
        assert all(hung_up.acquire(timeout=20) for _ in range(3))


@pytest.mark.sampled(kind=1)
def test_a_call_that_gets_no_connection_ends_in_time(kind):
    limits = httpx.Limits(max_connections=1)
    begun, ended = threading.Event(), threading.Event()

    def silent(connection, over):
        read_request(connection)
        begun.set()
        ended.wait(20)

    async def awaited(url):
        async with (
            httpx.AsyncClient(base_url=url, limits=limits) as http,
            AsyncClient(http=http, timeout=0.5) as client,
        ):
            first = asyncio.create_task(AsyncClient(http=http).server.info())
            await asyncio.to_thread(begun.wait, 20)
            try:
                await client.server.info()
            finally:
                first.cancel()
                ended.set()

    def blocking(url):
        with httpx.Client(base_url=url, limits=limits) as http, ThreadPoolExecutor(1) as thread:
            first = thread.submit(Client(http=http, timeout=30, retries=0).server.info)
            begun.wait(20)
            try:
                Client(http=http, timeout=0.5).server.info()
            finally:
                ended.set()
                first.exception()

    with stubborn(silent) as url, pytest.raises(DeadlineExceeded, match="waiting for a free connection"):
        asyncio.run(awaited(url)) if kind == "async" else blocking(url)


# ── broken connections ───────────────────────────────────────────────────────────────────────────────────────────────


def hangs_up(connection, over):
    read_request(connection)


def resets(connection, over):
    read_request(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def is_cut_off(connection, over):
    read_request(connection)
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")


def is_no_http(connection, over):
    read_request(connection)
    connection.sendall(b"220 mail.test ESMTP\r\n\r\n")


@pytest.mark.parametrize("talk", [hangs_up, resets, is_cut_off, is_no_http])
def test_a_connection_that_breaks_may_have_delivered_the_request(kind, talk):
    with stubborn(talk) as url, pytest.raises(ConnectionFailed, match="broke") as caught:
        both(kind, url, lambda client: client.forward("demo", X), retries=1)
    assert caught.value.facts["sent"] is True


def test_a_server_that_is_not_there_has_received_nothing(kind):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    for address in (url, "http://nobody.invalid"):
        with pytest.raises(ConnectionFailed, match=f"cannot connect to {address}") as caught:
            both(kind, address, lambda client: client.modules.delete("demo"), retries=1)
        assert caught.value.facts["sent"] is False


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [2**10, 2**18, 2**23])
def test_bodies_of_any_size_arrive_whole(kind, size):
    x = np.arange(size // 4, dtype=np.float32).reshape(1, -1, 8)
    with listening() as service:
        reply = both(kind, service.url, lambda client: client.forward("demo", x))
        assert "transfer-encoding" not in service.requests[0].headers
    np.testing.assert_array_equal(reply.output, x)
    assert reply.output.flags.writeable


@pytest.mark.sampled(kind=1)
def test_large_tensors_are_sent_from_their_own_memory(kind):
    size = 2**26
    x = np.ones((1, size // 256, 64), np.float32)
    answer = good_answer()

    def drain(connection, over):
        read_request(connection)
        connection.sendall(answer)

    with stubborn(drain) as url:
        tracemalloc.start()
        try:
            both(kind, url, lambda client: client.forward("demo", x))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < size / 8


def test_an_answer_that_comes_before_the_whole_request_is_sent_counts(kind):
    problem = b'{"type":"about:blank","title":"t","status":413,"code":"body_too_large","detail":"too much"}'

    def refuse(connection, over):
        connection.recv(1000)
        connection.sendall(
            b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-type: application/problem+json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(problem), problem)
        )
        while connection.recv(2**20):  # or the rest would reset the connection, and its answer with it
            pass

    with stubborn(refuse) as url, pytest.raises(BodyTooLarge, match="too much"):
        both(kind, url, lambda client: client.forward("demo", np.zeros((1, 2**20, 4), np.float32)))


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def authority():
    """Make an authority that signs certificates for localhost."""
    return trustme.CA()


@pytest.fixture
def secure(authority):
    """Run a service whose certificate only those accept who trust the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with listening(context) as service:
        yield service


def test_certificates_are_verified_once(kind, secure, caplog):
    with pytest.raises(ConnectionFailed, match="certificate verify failed") as caught:
        both(kind, secure.url, lambda client: client.server.info())
    assert caught.value.facts["sent"] is False
    assert not caplog.records  # another attempt would fail as well


def test_the_environment_names_authorities(kind, secure, authority, tmp_path, monkeypatch):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    x = np.arange(2**20, dtype=np.float32).reshape(1, -1, 8)
    np.testing.assert_array_equal(both(kind, secure.url, lambda client: client.forward("demo", x)).output, x)
    with pytest.raises(ConnectionFailed, match="certificate verify failed"):  # it is for another name
        both(kind, secure.url.replace("localhost", "127.0.0.1"), lambda client: client.server.info())


@pytest.mark.parametrize(
    ("url", "proxies", "reads"),
    [
        ("http://service.test", {}, False),
        ("http://service.test", {"HTTP_PROXY": "http://proxy.test"}, False),
        ("http://service.test", {"HTTP_PROXY": "https://proxy.test"}, True),
        ("https://service.test", {}, True),
    ],
)
def test_only_a_client_that_may_use_tls_reads_the_authorities(kind, monkeypatch, url, proxies, reads):
    for name, proxy in proxies.items():
        monkeypatch.setenv(name, proxy)
    made, contexts = ssl.create_default_context, []
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: contexts.append(given) or made(**given))
    {"sync": Client, "async": AsyncClient}[kind](url)
    assert bool(contexts) == reads
