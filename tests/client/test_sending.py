"""How the clients' own connections are made, and how requests are sent over them."""

import asyncio
import socket
import time

import httpx
import numpy as np
import pytest

from attention_client import Client
from attention_client.pool import AsyncPool, Pool
from attention_contract.errors import BodyTooLarge, TooLarge
from tests.client.tcp import both, listening, read_request, stubborn


def test_the_addresses_of_a_host_share_one_timeout(monkeypatch):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        address = socket.AF_INET, socket.SOCK_STREAM, 0, "", full.getsockname()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [address] * 3)
        started = time.monotonic()
        with httpx.Client(transport=Pool(), timeout=0.5) as http, pytest.raises(httpx.ConnectTimeout):
            http.get("http://three.test/")
        assert 0.5 <= time.monotonic() - started < 1.4  # 1.5 if each had its own


def test_a_host_is_reached_by_any_of_its_addresses(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = gone.getsockname()
    with listening() as service:
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", it) for it in (dead, service.server_address)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: addresses)
        with Client("http://two.test") as client:
            assert client.server_info().name == "attention-service"


def test_the_time_that_a_caller_takes_for_a_piece_is_not_that_of_writing_it(kind):
    size = 2**23

    def drain(connection, over):
        read_request(connection)
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    def pieces():
        yield bytes(size)
        time.sleep(0.8)
        yield bytes(size)

    async def awaited_pieces():
        yield bytes(size)
        await asyncio.sleep(0.8)
        yield bytes(size)

    headers = {"content-length": str(2 * size)}
    timeout = httpx.Timeout(None, write=0.5)

    async def awaited(url):
        async with httpx.AsyncClient(transport=AsyncPool(), timeout=timeout) as http:
            return await http.post(url, headers=headers, content=awaited_pieces())

    with stubborn(drain) as url:
        if kind == "async":
            assert asyncio.run(awaited(url)).status_code == 204
        else:
            with httpx.Client(transport=Pool(), timeout=timeout) as http:
                assert http.post(url, headers=headers, content=pieces()).status_code == 204


def test_a_piece_that_is_taken_slowly_is_not_too_late(kind):
    def slow(connection, over):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        missing = 2**24 - len(connection.recv(2**12).partition(b"\r\n\r\n")[2])
        while missing > 0:
            over.wait(0.05)
            missing -= len(connection.recv(min(2**20, missing), socket.MSG_WAITALL))
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with stubborn(slow) as url:
        started = time.monotonic()
        assert post(kind, url, 2**24, httpx.Timeout(None, write=0.5)).status_code == 204
        assert time.monotonic() - started > 0.5


def test_a_piece_of_which_no_more_is_taken_is_too_late(kind):
    def stops(connection, over):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.recv(2**16, socket.MSG_WAITALL)
        over.wait(20)

    with stubborn(stops) as url:
        started = time.monotonic()
        with pytest.raises(httpx.WriteTimeout):
            post(kind, url, 2**24, httpx.Timeout(None, write=0.4))
        assert 0.4 <= time.monotonic() - started < 15


def post(kind, url, size, timeout):
    """The answer to a body of so many bytes, in one piece."""

    async def awaited():
        async with httpx.AsyncClient(transport=AsyncPool(), timeout=timeout) as http:
            return await http.post(url, content=bytes(size))

    if kind == "async":
        return asyncio.run(awaited())
    with httpx.Client(transport=Pool(), timeout=timeout) as http:
        return http.post(url, content=bytes(size))


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


def test_an_answer_counts_though_the_server_reads_no_further(kind):
    def refuse(connection, over):
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        over.wait(60)

    with stubborn(refuse) as url:
        started = time.monotonic()
        with pytest.raises(TooLarge):
            both(kind, url, lambda client: client.forward("demo", np.zeros((1, 2**22, 4), np.float32)), timeout=50)
        assert time.monotonic() - started < 40


def test_a_fault_of_the_body_is_raised_as_it_is():
    def pieces():
        yield bytes(2**17)
        raise FileNotFoundError("the body")

    with (
        stubborn(lambda connection, over: read_request(connection)) as url,
        httpx.Client(transport=Pool()) as http,
        pytest.raises(FileNotFoundError, match="the body"),
    ):
        http.post(url, content=pieces())


def test_bodies_without_a_length_travel_in_chunks(kind):
    def pieces():
        yield from (b"a" * 100, b"", b"b" * 100_000)

    async def awaited_pieces():
        for piece in pieces():
            yield piece

    seen = []

    def chunked(connection, over):
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
        seen.append(received)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")

    async def awaited(url):
        async with httpx.AsyncClient(transport=AsyncPool()) as client:
            return (await client.post(url, content=awaited_pieces())).content

    with stubborn(chunked) as url:
        if kind == "async":
            assert asyncio.run(awaited(url)) == b"hello"
        else:
            with httpx.Client(transport=Pool()) as client:
                assert client.post(url, content=pieces()).content == b"hello"
    assert b"transfer-encoding: chunked" in seen[0].lower()
    assert seen[0].endswith(b"\r\n186a0\r\n" + b"b" * 100_000 + b"\r\n0\r\n\r\n")
