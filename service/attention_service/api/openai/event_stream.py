"""A reply as server-sent events (WHATWG HTML, section 9.2), each an object of OpenAI's API."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attention_contract.errors import AttentionError, Cancelled
from attention_contract.wire import EVENTS, to_json
from attention_service.api import problems
from attention_service.api.disconnection import unless_gone
from attention_service.api.openai.openai_errors import openai_error

_HEADERS: Final = (
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect them
)


class EventStream(Response):
    """Sends objects as they come. A fault in between is the last of them."""

    background = None

    def __init__(self, first: memoryview, objects: AsyncGenerator[memoryview], deadline: float | None) -> None:
        """``first``, ``objects``: JSON text, one object a line."""
        self.status_code = 200
        self.raw_headers = [*_HEADERS]
        self._first, self._objects, self._deadline = first, objects, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then every object, unless the caller goes away."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(Cancelled):
            try:
                await unless_gone(receive, self._send(send), self._deadline)
            except Cancelled:
                raise
            except AttentionError as error:
                error.request_id = problems.request_id.get()
                await _send_lines(send, to_json(openai_error(error)))
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send) -> None:
        async with aclosing(self._objects) as objects:
            await _send_lines(send, self._first)
            async for lines in objects:
                await _send_lines(send, lines)


async def _send_lines(send: Send, lines: bytes | memoryview) -> None:
    body = b"".join([b"data: %b\n\n" % line for line in bytes(lines).split(b"\n")])
    await send({"type": "http.response.body", "body": body, "more_body": True})
