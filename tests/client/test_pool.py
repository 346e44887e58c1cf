"""The clients' own connections: shared, kept, dropped, cancelled, limited and secured."""

import asyncio
import gc
import ssl
import threading
import time
import tracemalloc
import warnings
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import trustme

from attention_client import AsyncClient, Client, ConnectionFailed, DeadlineExceeded
from attention_client.pool import AsyncPool, Pool
from attention_contract.schemas.attention import ForwardReply
from attention_contract.wire import SAFETENSORS, to_body
from tests.client.service import RAN, X
from tests.client.tcp import both, listening, read_request, stubborn


def forward_all(kind, url, queries, at_once):
    """The replies to all queries, so many at a time over one client."""

    async def awaited():
        async with AsyncClient(url) as client:
            turns = asyncio.Semaphore(at_once)

            async def one(query):
                async with turns:
                    return await client.forward("demo", query)

            return await asyncio.gather(*map(one, queries))

    if kind == "async":
        return asyncio.run(awaited())
    with Client(url) as client, ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda query: client.forward("demo", query), queries))


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("at_once", [1, 16, 64])
def test_calls_side_by_side_get_their_own_answers_over_as_many_connections(kind, at_once, rng):
    queries = [rng.standard_normal((1, 1 + index % 5, 8)).astype(np.float32) for index in range(4 * at_once)]
    with listening() as service:
        replies = forward_all(kind, service.url, queries, at_once)
        assert len(set(service.connections)) <= at_once
        assert len(service.connections) == len(queries)
    for query, reply in zip(queries, replies, strict=True):
        np.testing.assert_array_equal(reply.output, query)


def test_no_more_connections_are_opened_than_allowed(kind):
    limits = httpx.Limits(max_connections=2)
    transport = Pool(limits=limits) if kind == "sync" else AsyncPool(limits=limits)

    async def awaited(url):
        async with AsyncClient(url, transport=transport) as client:
            await asyncio.gather(*[client.forward("demo", X) for _ in range(12)])

    with listening() as service:
        if kind == "async":
            asyncio.run(awaited(service.url))
        else:
            with Client(service.url, transport=transport) as client, ThreadPoolExecutor(12) as threads:
                list(threads.map(lambda _: client.forward("demo", X), range(12)))
        assert len(set(service.connections)) <= 2


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(kind):
    async def awaited(client, closed):
        for _ in range(5):
            await client.delete_module("demo")  # which would not be repeated
            await asyncio.to_thread(closed.acquire, timeout=20)

    def blocking(client, closed):
        for _ in range(5):
            client.delete_module("demo")
            closed.acquire(timeout=20)

    with listening() as service:
        service.drops = True
        ask = awaited if kind == "async" else blocking
        both(kind, service.url, lambda client: ask(client, service.closed), retries=0)
        assert len(set(service.connections)) == 5


def good_answer():
    body = b"".join(to_body(ForwardReply(output=X, ran=RAN), SAFETENSORS, "reply"))
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        SAFETENSORS.encode(), len(body), body,
    )  # fmt: skip


def test_only_what_is_safe_is_asked_again_where_a_kept_connection_breaks(kind):
    asked = []

    def once_each(connection, over):
        asked.append(read_request(connection))
        connection.sendall(good_answer())
        asked.append(read_request(connection))  # and hangs up

    async def awaited(client):
        for _ in range(3):
            await client.forward("demo", X)
        await client.delete_module("demo")

    def blocking(client):
        for _ in range(3):
            client.forward("demo", X)
        client.delete_module("demo")

    with stubborn(once_each) as url, pytest.raises(ConnectionFailed, match="broke") as caught:
        both(kind, url, awaited if kind == "async" else blocking)
    assert caught.value.facts["sent"] is True
    assert [line.split()[0] for line in asked] == [b"POST"] * 5 + [b"DELETE"]


def test_a_connection_is_not_kept_for_longer_than_allowed(kind):
    limits = httpx.Limits(keepalive_expiry=0.05)
    transport = Pool(limits=limits) if kind == "sync" else AsyncPool(limits=limits)

    async def awaited(client):
        await client.server_info()
        await asyncio.sleep(0.1)
        await client.server_info()

    def blocking(client):
        client.server_info()
        time.sleep(0.1)
        client.server_info()

    with listening() as service:
        both(kind, service.url, awaited if kind == "async" else blocking, transport=transport)
        assert len(set(service.connections)) == 2


def test_a_client_serves_one_event_loop_after_another():
    with listening() as service, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody can close what was left of a loop that is closed
        client = AsyncClient(service.url)
        for _ in range(2):
            assert asyncio.run(client.server_info()).name == "attention-service"
        asyncio.run(client.aclose())
        del client
        gc.collect()
        assert len(set(service.connections)) == 2


def test_expired_connections_are_closed_when_another_is_put_back():
    pool = Pool(limits=httpx.Limits(keepalive_expiry=0.05))
    with listening() as service, listening() as other, httpx.Client(transport=pool) as http:
        http.get(f"{service.url}/v1")
        time.sleep(0.1)
        http.get(f"{other.url}/v1")
        assert service.closed.acquire(timeout=20)


def test_what_comes_back_after_the_end_is_closed(kind):
    limits = httpx.Limits(keepalive_expiry=None)
    transport = Pool(limits=limits) if kind == "sync" else AsyncPool(limits=limits)

    async def awaited(url):
        async with AsyncClient(url, transport=transport) as client:
            await transport.aclose()
            await client.server_info()
            assert await asyncio.to_thread(service.closed.acquire, timeout=20)

    with listening() as service:
        if kind == "async":
            asyncio.run(awaited(service.url))
        else:
            with Client(service.url, transport=transport) as client:
                transport.close()
                client.server_info()
                assert service.closed.acquire(timeout=20)


def test_requests_wait_for_connections_in_one_event_loop_after_another():
    async def ask(client):
        return await asyncio.gather(*[client.server_info() for _ in range(4)])

    with listening() as service, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody can close what was left of a loop that is closed
        client = AsyncClient(service.url, transport=AsyncPool(limits=httpx.Limits(max_connections=1)))
        for _ in range(2):
            assert len(asyncio.run(ask(client))) == 4
        asyncio.run(client.aclose())
        del client
        gc.collect()


# ── time and cancellation ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cancelled_call_gives_its_connection_up():
    hung_up = threading.Event()

    def silent(connection, over):
        read_request(connection)
        if not connection.recv(1):
            hung_up.set()

    async def ask(url):
        async with AsyncClient(url, transport=AsyncPool(limits=httpx.Limits(max_connections=1))) as client:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.forward("demo", X), 0.3)

    with stubborn(silent) as url:
        asyncio.run(ask(url))
        assert hung_up.wait(20)


def test_a_call_that_gets_no_connection_ends_in_time(kind):
    limits = httpx.Limits(max_connections=1)
    transport = Pool(limits=limits) if kind == "sync" else AsyncPool(limits=limits)
    begun, ended = threading.Event(), threading.Event()

    def silent(connection, over):
        read_request(connection)
        begun.set()
        ended.wait(20)

    async def awaited(url):
        async with AsyncClient(url, transport=transport, timeout=0.2) as client:
            first = asyncio.create_task(AsyncClient(url, transport=transport).server_info())
            await asyncio.to_thread(begun.wait, 20)
            try:
                await client.server_info()
            finally:
                first.cancel()
                ended.set()

    def blocking(url):
        with Client(url, transport=transport, timeout=0.2) as client, ThreadPoolExecutor(1) as thread:
            first = thread.submit(Client(url, transport=transport, timeout=30, retries=0).server_info)
            begun.wait(20)
            try:
                client.server_info()
            finally:
                ended.set()
                first.exception()

    with stubborn(silent) as url, pytest.raises(DeadlineExceeded, match="waiting for a free connection"):
        asyncio.run(awaited(url)) if kind == "async" else blocking(url)


def test_httpx_timeouts_hold_on_their_own(kind):
    def trickle(connection, over):
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            over.wait(0.1)
            connection.sendall(b"x")
        over.wait(5)

    def get(url, **timeouts):
        async def awaited():
            async with httpx.AsyncClient(transport=AsyncPool(), timeout=httpx.Timeout(**timeouts)) as client:
                return await client.get(url)

        if kind == "async":
            return asyncio.run(awaited())
        with httpx.Client(transport=Pool(), timeout=httpx.Timeout(**timeouts)) as client:
            return client.get(url)

    with stubborn(trickle) as url:
        assert get(url, timeout=0.7).content == b"x" * 8  # each wait is shorter
    with stubborn(trickle) as url, pytest.raises(httpx.ReadTimeout):
        get(url, timeout=None, read=0.03)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_large_tensors_are_sent_and_received_without_a_copy(kind):
    size = 2**26
    x = np.ones((1, size // 256, 64), np.float32)
    pieces = to_body(ForwardReply(output=x, ran=RAN), SAFETENSORS, "reply")
    length = sum(map(len, pieces))

    def echo(connection, over):
        read_request(connection)
        connection.sendall(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (SAFETENSORS.encode(), length)
        )
        for piece in pieces:
            connection.sendall(piece)

    with stubborn(echo) as url:
        tracemalloc.start()
        try:
            reply = both(kind, url, lambda client: client.forward("demo", x))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    np.testing.assert_array_equal(reply.output[0, -1], x[0, -1])
    assert reply.output.flags.writeable
    # The reply itself; and what a socket that is full leaves of one piece, which asyncio's transport copies.
    assert peak < size + 4 * 2**20


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def authority():
    """Who signs certificates for localhost."""
    return trustme.CA()


@pytest.fixture
def secure(authority):
    """A service whose certificate only those accept who know the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with listening(context) as service:
        yield service


def trusting(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_certificates_are_verified(kind, secure):
    with pytest.raises(ConnectionFailed, match="certificate verify failed") as caught:
        both(kind, secure.url, lambda client: client.server_info(), retries=0)
    assert caught.value.facts["sent"] is False


def test_certificates_are_for_a_name(kind, secure, authority):
    verify = trusting(authority)
    transport = Pool(verify=verify) if kind == "sync" else AsyncPool(verify=verify)
    url = secure.url.replace("localhost", "127.0.0.1")
    with pytest.raises(ConnectionFailed, match="certificate verify failed"):
        both(kind, url, lambda client: client.server_info(), retries=0, transport=transport)


def test_secure_connections_carry_large_bodies_and_are_kept(kind, secure, authority):
    verify = trusting(authority)
    transport = Pool(verify=verify) if kind == "sync" else AsyncPool(verify=verify)
    x = np.arange(2**20, dtype=np.float32).reshape(1, -1, 8)

    async def awaited(client):
        return [await client.forward("demo", x) for _ in range(3)]

    def blocking(client):
        return [client.forward("demo", x) for _ in range(3)]

    replies = both(kind, secure.url, awaited if kind == "async" else blocking, transport=transport)
    for reply in replies:
        np.testing.assert_array_equal(reply.output, x)
    assert len(set(secure.connections)) < 3


def test_the_environment_names_authorities(kind, secure, authority, tmp_path, monkeypatch):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert both(kind, secure.url, lambda client: client.server_info()).name == "attention-service"


def test_a_surplus_that_is_decrypted_already_answers_nothing(kind, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    surplus = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"

    def talkative(connection, over):
        with context.wrap_socket(connection, server_side=True) as secured:
            read_request(secured)
            secured.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n")
            secured.sendall(b"good" + surplus)  # in one record
            read_request(secured)

    verify = trusting(authority)

    async def awaited(url):
        async with httpx.AsyncClient(transport=AsyncPool(verify=verify)) as http:
            return [(await http.get(url)).content for _ in range(2)]

    with stubborn(talkative) as plain:
        url = plain.replace("http://127.0.0.1", "https://localhost")
        if kind == "async":
            assert asyncio.run(awaited(url)) == [b"good"] * 2
        else:
            with httpx.Client(transport=Pool(verify=verify)) as http:
                assert [http.get(url).content for _ in range(2)] == [b"good"] * 2
