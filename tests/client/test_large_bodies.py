"""Large bodies come from the socket, and everything around them is as with httpx's own reading."""

import gzip
import socket
import ssl
import time
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import trustme

from attention_client import AsyncClient, Client, large_bodies
from attention_client.errors import ConnectionFailed, DeadlineExceeded
from attention_client.large_bodies import LARGE, received, received_in_chunks
from tests.client.tcp import listening, read_request, stubborn

BODY = np.random.default_rng(0).bytes(3 * LARGE + 12345)
X = np.ones((1, LARGE // 2, 8), np.float32)


def head(*lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode()


def answers(connection: socket.socket, over: object) -> None:
    for size in (len(BODY), 10, len(BODY)):
        read_request(connection)
        connection.sendall(head(f"content-length: {size}") + BODY[:size])


def in_chunks(connection: socket.socket, over: object) -> None:
    read_request(connection)
    connection.sendall(head("transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))


def body_of(http: httpx.Client, url: str) -> bytes:
    with http.stream("GET", url) as response:
        return bytes(received(response, lambda: None))


@pytest.fixture
def direct():
    """Counts the bodies that were read from the socket."""
    with patch.object(large_bodies, "_read_rest", side_effect=large_bodies._read_rest) as count:
        yield count


def test_a_large_body_comes_from_the_socket_and_the_connection_goes_on(direct):
    with stubborn(answers) as url, httpx.Client(timeout=5) as http:
        assert [body_of(http, url) for _ in range(3)] == [BODY, BODY[:10], BODY]
    assert direct.call_count == 2  # on one connection, which is all that the server takes


@pytest.mark.slow
def test_the_tensors_of_a_reply_are_writable_and_from_the_socket(direct):
    with listening() as service, Client(service.url) as client:
        for _ in range(2):
            reply = client.forward("demo", X)
            np.testing.assert_array_equal(reply.output, X)
            assert reply.output.flags.writeable
        assert len(set(service.connections)) == 1
    assert direct.call_count == 2


def test_over_tls_too(direct):
    authority = trustme.CA()
    tls, trusted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(tls)
    authority.configure_trust(trusted)
    with listening(tls) as service, Client(service.url, transport=httpx.HTTPTransport(verify=trusted)) as client:
        np.testing.assert_array_equal(client.forward("demo", X).output, X)
    assert direct.call_count == 1


def test_a_compressed_body_is_read_by_httpx(direct):
    packed = gzip.compress(BODY, 1)

    def compresses(connection, over):
        read_request(connection)
        connection.sendall(head(f"content-length: {len(packed)}", "content-encoding: gzip") + packed)

    with stubborn(compresses) as url, httpx.Client(timeout=5) as http:
        assert body_of(http, url) == BODY
    direct.assert_not_called()


def test_a_body_in_chunks_is_read_by_httpx(direct):
    with stubborn(in_chunks) as url, httpx.Client(timeout=5) as http:
        assert body_of(http, url) == BODY
    direct.assert_not_called()


def test_another_transport_is_read_by_httpx(direct):
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=BODY))) as http:
        assert body_of(http, "http://mock") == BODY
    direct.assert_not_called()


def cut_off(connection, over):
    read_request(connection)
    connection.sendall(head("content-type: application/vnd.safetensors", f"content-length: {len(BODY)}") + BODY[:-1])


def test_a_body_that_ends_early_is_a_broken_connection(direct):
    with stubborn(cut_off) as url, Client(url, retries=0) as client, pytest.raises(ConnectionFailed, match="1 bytes"):
        client.forward("demo", X[:, :1])
    assert direct.call_count == 1


@pytest.mark.slow
def test_a_body_that_stands_still_ends_at_the_deadline(direct):
    def stops(connection, over):
        cut_off(connection, over)
        over.wait(60)

    began = time.monotonic()
    with stubborn(stops) as url, Client(url, timeout=0.5, retries=0) as client, pytest.raises(DeadlineExceeded):
        client.forward("demo", X[:, :1])
    assert time.monotonic() - began < 30
    assert direct.call_count == 1


def test_after_a_break_the_next_call_has_a_connection_of_its_own():
    talks = [answers, cut_off]

    def talk(connection, over):
        talks.pop()(connection, over)

    with stubborn(talk) as url, httpx.Client(timeout=5) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            body_of(http, url)
        assert body_of(http, url) == BODY


async def body_of_awaited(url: str, transport: httpx.AsyncBaseTransport | None = None) -> bytes:
    async with AsyncClient(url, transport=transport) as client, client._http.stream("GET", url) as response:
        content = await received_in_chunks(response, lambda: None)
        assert isinstance(content, memoryview) == (int(response.headers.get("content-length", 0)) >= LARGE)
        return bytes(content)


@pytest.mark.parametrize("own", [False, True], ids=["aiohttp", "httpx"])
@pytest.mark.parametrize("talk", [answers, in_chunks])
async def test_the_awaited_client_receives_into_memory_of_the_stated_size(talk, own):
    with stubborn(talk) as url:
        assert await body_of_awaited(url, httpx.AsyncHTTPTransport() if own else None) == BODY


async def test_an_awaited_body_of_another_length_is_a_broken_connection():
    longer = httpx.Response(200, headers={"content-length": str(LARGE)}, content=BODY)
    with pytest.raises(httpx.RemoteProtocolError, match="more than"):
        await body_of_awaited("http://mock", httpx.MockTransport(lambda _: longer))

    with stubborn(cut_off) as url, pytest.raises(ConnectionFailed):
        async with AsyncClient(url, retries=0) as client:
            await client.forward("demo", X[:, :1])
