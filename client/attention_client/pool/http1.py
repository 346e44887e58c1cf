"""HTTP/1.1 without I/O: requests to bytes, and the bytes of a response to what it holds."""

import re
from collections.abc import AsyncIterator, Iterator
from typing import Final, cast

import httptools
import httpx
import numpy as np

SCRATCH: Final = 2**16
"""Bytes of a connection's buffer for heads and for bodies of unknown length."""
MAX_HEAD: Final = 2**18
"""Bytes of a head that are read, and of what comes in a row between and after chunks, as trailers do."""
PACKET: Final = 2**16
"""Pieces are joined up to this size, so that a small request leaves at once; larger ones are sent as they lie."""
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE: Final = re.compile(rb"[^\0\r\n]*")
_BODILESS: Final = frozenset({204, 304})


def head_of(request: httpx.Request) -> bytes:
    """The request line and the headers. Raises LocalProtocolError for a name or value that would end before its end.

    The extension ``head`` holds them where they have been made before.
    """
    made = request.extensions.get("head")
    if isinstance(made, bytes):
        return made
    method = request.method.encode("ascii", "replace")
    if not _NAME.fullmatch(method):
        raise httpx.LocalProtocolError(f"method {request.method!r} cannot be sent", request=request)
    lines = [b"%b %b HTTP/1.1" % (method, request.url.raw_path)]
    for name, value in request.headers.raw:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise httpx.LocalProtocolError(f"header {name!r} cannot be sent", request=request)
        lines.append(b"%b: %b" % (name, value))
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def is_chunked(request: httpx.Request) -> bool:
    """Whether the body goes without a length, in chunks that state theirs."""
    return "head" not in request.extensions and "transfer-encoding" in request.headers


LAST_CHUNK: Final = b"0\r\n\r\n"


def as_chunk(piece: bytes) -> bytes:
    """A piece of a body that goes in chunks."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


class Body:
    """A request's body on its way: each piece as it is sent, held against the length that the head announces.

    A length is not looked at where the head was made before: who made it knows the body.
    """

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self._chunked = is_chunked(request)
        self._missing: int | None = None
        if not self._chunked and "head" not in request.extensions:
            announced = request.headers.get("content-length", "0")
            if not (announced.isascii() and announced.isdecimal()):
                raise httpx.LocalProtocolError(f"content-length {announced!r} cannot be sent", request=request)
            self._missing = int(announced)

    def piece(self, data: bytes) -> bytes:
        """What is sent for a piece. Raises LocalProtocolError for one that goes beyond the length."""
        if self._chunked:
            return as_chunk(data)
        if self._missing is not None:
            self._missing -= len(data)
            if self._missing < 0:
                raise self._fault(f"{-self._missing} bytes more than its content-length says")
        return data

    def end(self) -> bytes:
        """What is sent after the last piece. Raises LocalProtocolError where the body was too short."""
        if self._missing:
            raise self._fault(f"{self._missing} bytes less than its content-length says")
        return LAST_CHUNK if self._chunked else b""

    def _fault(self, message: str) -> httpx.LocalProtocolError:
        return httpx.LocalProtocolError(f"the body has {message}", request=self._request)


class Answer:
    """One response while its bytes come.

    A connection receives into ``room()``, says how many bytes came (``received``) or that no more will (``ended``), and
    goes on until it is ``complete``. A body whose length was announced is received where it stays; the parser sees of
    it only what came along with the head. Interim responses (status 1xx) are passed over.
    """

    def __init__(self, request: httpx.Request, scratch: memoryview) -> None:
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = memoryview(b"")
        self.begun = False
        """Some of it has come."""
        self.complete = False
        self.reusable = False
        """The connection can carry another request."""
        self.request = request
        self._scratch = scratch
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._without_body = 0
        """Bytes fed to the parser since it last found some of the body."""
        self._in_head = True
        self._chunked = False
        self._length: int | None = None
        self._filled = 0
        self._parts = bytearray()

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        return self.body[self._filled :] if self._direct else self._scratch

    @property
    def _direct(self) -> bool:
        return self._length is not None and not self._in_head and not self.complete

    def received(self, count: int) -> None:
        """So many bytes lie in what ``room`` gave. Raises RemoteProtocolError where they are not HTTP."""
        self.begun = True
        if self._direct:
            self._filled += count
            self.complete = self._filled == self._length
            return
        self._without_body += count
        assert self._parser is not None  # noqa: S101 - a complete answer is not fed
        try:
            self._parser.feed_data(self._scratch[:count])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as fault:
            if self.complete:  # what follows it is no part of it
                self.reusable = False
                self._parser = None
                return
            if isinstance(fault.__context__, httpx.RemoteProtocolError):
                raise fault.__context__ from None
            raise self._fault(f"the answer is not HTTP/1.1: {fault}") from None
        if self._without_body > MAX_HEAD and not self.complete:
            part = "head is" if self._in_head else "trailers are"
            raise self._fault(f"the answer's {part} longer than {MAX_HEAD} bytes")
        if self.complete or self._direct:
            self._parser = None  # which knows this answer: a circle that would keep the body until it is collected

    def ended(self) -> None:
        """No more bytes will come. Raises RemoteProtocolError where some are missing."""
        self.reusable = False
        if self.complete:
            return
        if not self.begun:
            raise self._fault("the server closed the connection without an answer")
        if self._in_head or self._chunked or self._length is not None:
            raise self._fault("the server closed the connection before the end of its answer")
        self._finish()

    def response(self) -> httpx.Response:
        """The complete response. Its stream gives the body as one writable memoryview."""
        response = httpx.Response(
            self.status,
            headers=self.headers,
            stream=Whole(self.body),
            extensions={"http_version": b"HTTP/1.1", "reason_phrase": self.reason},
        )
        response.request = self.request
        return response

    # ── what the parser calls ────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """A response begins."""
        if self.complete:
            self.reusable = False  # nobody asked for a second answer

    def on_status(self, reason: bytes) -> None:
        """The reason phrase, or a part of it."""
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if not self._in_head:
            return  # a trailer, or a second answer
        self.headers.append((name, value))
        lowered = name.lower()
        if lowered == b"content-length":
            self._length = int(value)
        elif lowered == b"transfer-encoding":
            self._chunked = True

    def on_headers_complete(self) -> None:
        """The head is complete: what follows is said by status, method and headers."""
        parser = self._parser
        if not self._in_head or parser is None:
            return
        self.status = parser.get_status_code()
        if self.status < 200:
            return
        self.reusable = parser.should_keep_alive()
        self._in_head = False
        self._without_body = 0
        if self.request.method == "HEAD" or self.status in _BODILESS:
            self._length = None
            self.complete = True
        elif self._chunked:
            self._length = None
        elif self._length is not None:
            self.body = self._place(self._length)
            self.complete = self._length == 0

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        self._without_body = 0
        if self.complete:
            self.reusable = False  # the body of an answer that has none
        elif self._length is None:
            self._parts += part
        else:
            self.body[self._filled : self._filled + len(part)] = part
            self._filled += len(part)

    def on_message_complete(self) -> None:
        """The response is complete; an interim one is forgotten."""
        if self.status < 200:
            self.headers, self.reason, self._length, self._chunked, self._without_body = [], b"", None, False, 0
        elif not self.complete:
            self._finish()

    # ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        if self._length is None:
            self.body = memoryview(self._parts)
        self.complete = True

    def _place(self, length: int) -> memoryview:
        try:
            return np.empty(length, np.uint8).data  # a bytearray would be filled with zeros first
        except (MemoryError, ValueError):
            raise self._fault(f"the answer announces {length} bytes, more than there is memory for") from None

    def _fault(self, message: str) -> httpx.RemoteProtocolError:
        return httpx.RemoteProtocolError(message, request=self.request)


class Whole(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that is all there, given in one piece."""

    def __init__(self, body: memoryview) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield cast("bytes", self._body)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield cast("bytes", self._body)
