"""Responses and requests in bytes, held against h11."""

import gc
import weakref

import h11
import httpx
import pytest

from attention_client.pool.http1 import SCRATCH, Answer, Body, head_of

RESPONSES = {
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\nx-a: 2\r\n\r\nhello",
    "nothing": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    "no reason": b"HTTP/1.1 200 \r\ncontent-length: 1\r\n\r\na",
    "chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n8;x=y\r\n01234567\r\n0\r\n\r\n",
    "trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx-sum: 7\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n",
    "interim": b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
    "close": b"HTTP/1.1 500 Oh\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno",
    "old": b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
    "until the end": b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nall that comes",
}
BROKEN = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length in words": b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\nhello",
    "a chunk without size": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nhello\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nmore",
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 60_000,
    "an endless trailer": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: " + b"y" * 2**18,
    "endless trailers": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 60_000,
    "too much memory": b"HTTP/1.1 200 OK\r\ncontent-length: 9000000000000000000\r\n\r\n",
    "no answer": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nx:",
    "half a body": b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nhel",
    "half a chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\nhel",
}


def fresh(method="POST"):
    return Answer(httpx.Request(method, "http://service.test/"), memoryview(bytearray(SCRATCH)))


def fed(answer, data, step):
    """The answer after these bytes have come, so many at a time at most, and then the end."""
    while data and not answer.complete:
        room = answer.room()
        count = min(step, len(room), len(data))
        assert count
        room[:count], data = data[:count], data[count:]
        answer.received(count)
    if not answer.complete:
        answer.ended()
    return answer


def by_h11(data, method="POST"):
    """Status, reason, headers, body and whether the connection can be used again."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "a"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    response, body, ended = None, b"", False
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Response):
            response = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif event is h11.NEED_DATA:
            connection.receive_data(b"")
            ended = True
        elif isinstance(event, h11.EndOfMessage):
            reusable = not ended and connection.our_state is h11.DONE and connection.their_state is h11.DONE
            return response.status_code, response.reason, list(response.headers), body, reusable


@pytest.mark.parametrize("step", [1, 7, SCRATCH])
@pytest.mark.parametrize("name", RESPONSES)
def test_responses_read_as_h11_reads_them(name, step):
    answer = fed(fresh(), RESPONSES[name], step)
    status, reason, headers, body, reusable = by_h11(RESPONSES[name])
    assert (answer.status, answer.reason, bytes(answer.body)) == (status, reason, body)
    assert [(name.lower(), value) for name, value in answer.headers] == headers
    assert answer.reusable == reusable


def test_the_answer_to_head_has_no_body():
    data = RESPONSES["a length"].removesuffix(b"hello")
    answer = fed(fresh("HEAD"), data, SCRATCH)
    assert (answer.status, bytes(answer.body), answer.reusable) == (200, b"", True)
    assert by_h11(data, "HEAD")[3] == b""


@pytest.mark.parametrize("step", [1, SCRATCH])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_cut_off_is_a_protocol_error(name, step):
    with pytest.raises(httpx.RemoteProtocolError):
        fed(fresh(), BROKEN[name], step)


def test_a_connection_that_says_more_than_it_was_asked_is_not_used_again():
    answer = fed(fresh(), RESPONSES["a length"] + RESPONSES["close"], SCRATCH)
    assert (answer.status, bytes(answer.body), answer.reusable) == (200, b"hello", False)


@pytest.mark.parametrize(
    ("answered", "surplus"),
    [
        (b"HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n\r\n", b"0\r\n\r\n"),
        (RESPONSES["close"], b"junk"),
        (RESPONSES["a length"], b"junk"),
    ],
)
def test_a_complete_answer_counts_whatever_comes_with_it(answered, surplus):
    answer = fed(fresh(), answered + surplus, SCRATCH)
    alone = fed(fresh(), answered, SCRATCH)
    assert (answer.status, bytes(answer.body), answer.reusable) == (alone.status, bytes(alone.body), False)


def test_chunks_may_come_in_any_number():
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n"
    assert len(fed(fresh(), data, SCRATCH).body) == 100_000


def test_a_large_body_is_received_where_it_stays():
    answer = fresh()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\nab"
    answer.room()[: len(head)] = head
    answer.received(len(head))
    room = answer.room()
    assert len(room) == 999_998
    room[0] = ord("c")
    assert bytes(answer.body[:3]) == b"abc"
    assert not answer.body.readonly


def test_an_answer_is_freed_as_soon_as_nobody_holds_it():
    gc.disable()
    try:
        for data in (RESPONSES["a length"], b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + bytes(100_000)):
            answer = fed(fresh(), data, SCRATCH)
            gone = weakref.ref(answer)
            del answer
            assert gone() is None
    finally:
        gc.enable()


def test_requests_are_written_as_h11_reads_them():
    headers = {"x-a": "ä b".encode(), "content-length": b"3"}
    request = httpx.Request("PUT", "http://service.test:81/a%20b?c=d", headers=headers, content=b"abc")
    server = h11.Connection(h11.SERVER)
    server.receive_data(head_of(request) + request.content)
    event, body = server.next_event(), server.next_event()
    assert (event.method, event.target, body.data) == (b"PUT", b"/a%20b?c=d", b"abc")
    assert sorted(event.headers) == sorted((name.lower(), value) for name, value in request.headers.raw)


def test_chunks_are_written_as_h11_reads_them():
    request = httpx.Request("POST", "http://service.test/", content=iter([b"abc", b"", b"d"]))
    server = h11.Connection(h11.SERVER)
    server.receive_data(head_of(request) + sent(request))
    assert isinstance(server.next_event(), h11.Request)
    assert server.next_event().data + server.next_event().data == b"abcd"
    assert isinstance(server.next_event(), h11.EndOfMessage)


@pytest.mark.parametrize("header", [("x", "a\r\nevil: 1"), ("x", "a\nb"), ("x: y", "a"), ("", "a"), ("x", "\0")])
def test_a_header_cannot_smuggle_another(header):
    with pytest.raises(httpx.LocalProtocolError):
        head_of(httpx.Request("GET", "http://service.test/", headers=[header]))


@pytest.mark.parametrize("method", ["GET / HTTP/1.1\r\nevil: 1\r\nX", "", "GÄT", "A B"])
def test_a_method_cannot_smuggle_a_request(method):
    with pytest.raises(httpx.LocalProtocolError, match="method"):
        head_of(httpx.Request(method, "http://service.test/"))


def sent(request):
    """The body as it goes over the wire."""
    body = Body(request)
    return b"".join([body.piece(piece) for piece in request.stream]) + body.end()


@pytest.mark.parametrize("length", ["2", "4", "three", "-3", None])
def test_a_body_is_as_long_as_its_head_says(length):
    headers = {} if length is None else {"content-length": length}
    request = httpx.Request("POST", "http://service.test/", headers=headers, stream=httpx.ByteStream(b"abc"))
    with pytest.raises(httpx.LocalProtocolError, match="content-length"):
        sent(request)
