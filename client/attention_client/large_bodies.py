"""The bodies of responses; those of large ones are received straight into the memory that their tensors keep.

httpx reads 64 KiB at a time, and its parser and its streams copy each byte five times: a large body takes four times as
long as the kernel's own copy. The rest of a large body of a known length is therefore read from the connection's
socket, and the parser is told that it has come. On a connection that is not httpx's own, or that does not speak
HTTP/1.1, and for a body that is compressed or comes in chunks, httpx reads all of it.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httpx
import numpy as np

LARGE: Final = 2**20
"""Bytes that must be missing of a body for reading them from the socket."""
_PART: Final = 2**20
"""Bytes that are read before the deadline is looked at again."""
_INNER: Final = ("_stream", "_httpcore_stream", "_connection")
"""Attributes that lead from a response's stream to its connection."""


class _Direct(NamedTuple):
    """A connection whose parser has given out all that it was given, in the middle of a body."""

    socket: Any
    reader: Any
    """The parser's count of the bytes that are missing."""


def received(response: httpx.Response, check: Callable[[], None]) -> bytearray | memoryview:
    """Receive the body of a response. ``check`` raises once it is too late. Raises httpx's errors."""
    content: bytearray | memoryview = bytearray()
    for chunk in response.iter_bytes():
        check()
        content += chunk  # type: ignore[operator]  # nothing is left to come after a large body
        missing = _stated_length(response) - len(content)
        if missing >= LARGE and (direct := _direct(response, missing)) is not None:
            begun, content = content, np.empty(len(content) + missing, np.uint8).data  # not cleared, on large pages
            content[: len(begun)] = begun
            _read_rest(direct, response, content[len(begun) :], check)
    return content


async def received_in_chunks(response: httpx.Response, check: Callable[[], None]) -> bytearray | memoryview:
    """Receive the body of an awaited response: a large one into memory of its size, which then need not grow.

    ``check`` raises once it is too late. Raises httpx's errors.
    """
    length = _stated_length(response)
    content: Any = bytearray() if length < LARGE else np.empty(length, np.uint8).data
    filled = 0
    async for chunk in response.aiter_bytes():
        check()
        filled += len(chunk)
        if isinstance(content, bytearray):
            content += chunk
        elif filled > length:
            raise httpx.RemoteProtocolError(f"the body has more than its {length} bytes", request=response.request)
        else:
            content[filled - len(chunk) : filled] = chunk
    return content if isinstance(content, bytearray) else content[:filled]


def _stated_length(response: httpx.Response) -> int:
    """Bytes of a body that is not compressed; 0 if the head does not tell."""
    stated = response.headers.get("content-length", "")
    return 0 if "content-encoding" in response.headers or not stated.isdecimal() else int(stated)


def _direct(response: httpx.Response, missing: int) -> _Direct | None:
    """The connection, if exactly these bytes are missing of the body and none of them was read yet."""
    node: Any = response.stream
    while node is not None and not hasattr(node, "_h11_state"):
        node = next((getattr(node, name) for name in _INNER if hasattr(node, name)), None)
    parser, stream = getattr(node, "_h11_state", None), getattr(node, "_network_stream", None)
    reader = getattr(parser, "_reader", None)
    if parser is None or stream is None or getattr(reader, "_remaining", None) != missing or parser.trailing_data[0]:
        return None
    if hasattr(stream, "ssl_obj"):  # TLS within TLS, whose socket has the outer one
        return None
    return _Direct(stream.get_extra_info("socket"), reader)


def _read_rest(direct: _Direct, response: httpx.Response, rest: memoryview, check: Callable[[], None]) -> None:
    """Fill ``rest`` from the socket, and tell the parser. Raises httpx's errors."""
    filled = 0
    try:
        direct.socket.settimeout(response.request.extensions.get("timeout", {}).get("read"))
        while filled < len(rest):
            count = direct.socket.recv_into(rest[filled : filled + _PART])
            if not count:
                raise httpx.RemoteProtocolError(
                    f"peer closed the connection before the body was complete: {len(rest) - filled} bytes missing",
                    request=response.request,
                )
            filled += count
            check()
    except TimeoutError as fault:
        raise httpx.ReadTimeout(str(fault), request=response.request) from fault
    except OSError as fault:
        raise httpx.ReadError(str(fault), request=response.request) from fault
    direct.reader._remaining = 0
