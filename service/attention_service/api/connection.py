"""A connection of uvicorn's on which small requests for tensors wait for their body, and may be answered by express.

What express does not know is handed to uvicorn as if nothing had been kept back: an ordinary ASGI request.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from attention_contract.errors import AttentionError
from attention_service.api.bodies import UNCOUNTED
from attention_service.api.express import Asked, Express, lines
from attention_service.api.known import Incoming, Known
from attention_service.api.observing import given_id
from attention_service.api.receiving import Head, Receiver
from attention_service.runtime.scheduling.budget import Body

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

_UNHEARD: Final = asyncio.Event()
"""By which uvicorn tells a cycle of messages."""
_JOINED: Final = 2**15
"""Up to this size it costs less to copy a tensor than to send it by itself."""


class _Cycle:
    """Stands where uvicorn has the cycle of a request and its response, while express answers one."""

    message_event = _UNHEARD
    disconnected = False
    keep_alive = True
    response_complete = False


class Connection(HttpToolsProtocol):
    """One connection; its requests come one at a time, or one behind the other."""

    def __init__(self, express: Express, **settings: Any) -> None:
        super().__init__(**settings)
        self.known: Known | None = None
        self._express = express
        self._kept: Incoming | None = None
        """The body of a request that may be known."""
        self._between = True
        """Whether the parser has no part of a request."""
        self._piece = b""
        """What came last, where a request begins with it."""
        self._began = b""
        """What came with the beginning of a request that may be known."""
        self._head: Head | None = None
        """How the last request began, where express knew it, and could know others by it."""
        self._receiver: Receiver | None = None
        """What receives in the place of this, or did so last."""
        self._asked: Asked | None = None
        """What express is answering."""
        self._own: _Cycle | None = None
        self._starts: dict[int, bytes] = {}
        self._dated: object = None
        """How answers of each status begin, and the headers for which that holds."""
        self._idle_since: float | None = None
        """Since when no request has come; None while one does, or is answered."""
        self._begun: RequestResponseCycle | None = None
        """What uvicorn is answering; others may have come behind it."""

    # ── what the parser finds ────────────────────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        """Begin a request, without the scope that only the ordinary way needs."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._idle_since = None
        self._between = False
        self._receiver = None

    def on_headers_complete(self) -> None:
        """Keep back a request that may be known; hand on all others."""
        self._kept = self._expected()
        self._began = self._piece
        if self._kept is None:
            self._head, self._began = None, b""
            self._make_scope()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, or hand it on."""
        if self._kept is None:
            self._pass_on(body)
            return
        try:
            self._kept.add(body)
        except AttentionError:  # which the ordinary way tells, unless there is memory by then
            self._hand_on()
            self._pass_on(body)

    def on_message_complete(self) -> None:
        """Have a request answered that is known; hand on any other."""
        self._piece = b""  # a second request in it does not begin with it
        self._between, kept = True, self._kept
        asked = None if kept is None else self._express.take(self, self.url, self.headers, kept)
        if kept is None or asked is None:
            self._head = None
            self._hand_on()
            super().on_message_complete()
            return
        self._kept = None
        self._remember(asked.known, kept)
        self._answering(asked)

    def _remember(self, known: Known, kept: Incoming) -> None:
        """Remember the head of a request, unless it has an id. After two large ones alike, expect others."""
        began, self._began, last = self._began, b"", self._head
        first = kept.first()
        text = began[: -len(first)] if began.endswith(first) else began  # a head may come before its body
        self._head = None if given_id(self.headers) is not None else Head.of(text, known)
        if self._head is not None and self._head == last and not known.is_small and self.scheme == "http":
            self._receiver = Receiver(self, self._head, len(text) + kept.size())

    def _answers_small(self, data: bytes) -> bool:
        """Have express answer a whole small request that is the last one but for its body; whether it does.

        The parser would find nothing new in it.
        """
        head = self._head
        if head is None or not self._between or not head.known.is_small:
            return False
        body = head.body_in(data)
        if body is None or sum(body) != len(data) or body[1] > UNCOUNTED:
            return False
        return self.answers_again(head.known, data[body[0] :])

    def answers_again(self, known: Known, body: bytes | memoryview, memory: Body | None = None) -> bool:
        """Have express answer a request of which all is known but its body; whether it does.

        memory: what the body holds, where it is counted. It is given back when the request was answered.
        """
        if self.flow.write_paused or (self.cycle is not None and not self.cycle.response_complete):
            return False
        asked = self._express.again(self, known, body, memory)
        if asked is not None:
            self._answering(asked)
        return asked is not None

    def _answering(self, asked: Asked) -> None:
        if not asked.over:
            self._asked = asked
            self._own = self.cycle = _Cycle()  # type: ignore[assignment]

    def _expected(self) -> Incoming | None:
        """Where to put the body of a request that may be known; None for any other."""
        parser = self.parser
        if self.cycle is not None and not self.cycle.response_complete:
            return None  # it has to wait for another
        if self.expect_100_continue or self.flow.write_paused or parser.get_method() != b"POST":
            return None
        if parser.get_http_version() != "1.1" or parser.should_upgrade() or self.root_path:
            return None
        return self._express.expect(self.url, self.headers, self.known) if parser.should_keep_alive() else None

    def _make_scope(self) -> None:
        """What uvicorn makes when a request begins."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)

    def _hand_on(self) -> None:
        """Let uvicorn have what was kept back."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self._make_scope()
            super().on_headers_complete()
            kept.give_back()
            if (body := kept.whole()) and not self.transport.is_closing():
                self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        """Let uvicorn have a part of a body: as it is, where it would copy it into a buffer, and out of that again."""
        cycle = self.cycle
        if isinstance(cycle, RequestResponseCycle) and not cycle.response_complete:
            if not cycle.body:
                cycle.body, body = body, b""  # type: ignore[assignment]
            elif isinstance(cycle.body, bytes):  # still there: now there is something to put together
                cycle.body = bytearray(cycle.body)
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: "ASGI3Application") -> None:
        self._begun = cycle
        super()._start_asgi_task(cycle, app)

    # ── what express has to say ──────────────────────────────────────────────────────────────────────────────────────

    def answer(self, status: int, *pieces: bytes | memoryview) -> None:
        """Send the answer to the request that express has: what comes behind the headers that every answer has."""
        own, self._own, self._asked = self._own, None, None
        closing = own is not None and not own.keep_alive
        start = self._start(status) + b"connection: close\r\n" if closing else self._start(status)
        if max(map(len, pieces)) <= _JOINED:
            self.transport.write(b"".join((start, *pieces)))
        else:
            self.transport.writelines((start, *pieces))
        if own is not None:
            own.response_complete = True
        if closing:
            self.transport.close()
        self.on_response_complete()

    def _start(self, status: int) -> bytes:
        headers = self.server_state.default_headers
        if self._dated is not headers:  # uvicorn makes a new list each second
            self._dated, self._starts = headers, {}
        if status not in self._starts:
            self._starts[status] = STATUS_LINE[status] + lines(headers)
        return self._starts[status]

    # ── between requests ─────────────────────────────────────────────────────────────────────────────────────────────

    # A timer that is set anew for each request costs more than to look, once it has run out, whether it should have.

    def on_response_complete(self) -> None:
        """As uvicorn, but for the timer."""
        self._begun = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_again(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        """Something comes."""
        self.came()
        if not self._answers_small(data):
            self._piece = data if self._between else b""
            super().data_received(data)
            self._piece = b""
            if self._receiver is not None and not self.transport.is_closing():
                self._receive_by(self._receiver)

    def came(self) -> None:
        """Something came: the connection is not idle."""
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which nothing has come for too long."""
        self.timeout_keep_alive_task = None
        if self._idle_since is not None:
            left = self._idle_since + self.timeout_keep_alive - self.loop.time()
            if left > 0:
                self._look_again(left)
            else:
                super().timeout_keep_alive_handler()

    def _look_again(self, after: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(after, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        """Leave the timer alone until the connection ends."""
        if self.parser is None or self.transport.is_closing():
            super()._unset_keepalive_if_required()

    # ── requests like the last one ───────────────────────────────────────────────────────────────────────────────────

    def memory(self, size: int) -> Body | None:
        """Memory for the next request; None where there is none."""
        return self._express.memory(size)

    def receive_itself(self, came: bytes) -> None:
        """Receive what comes, and what came already, as any connection does."""
        self._receiver = self._head = None
        self._receive_by(self)
        if came:
            self.data_received(came)

    def _receive_by(self, protocol: "Connection | Receiver") -> None:
        """Have another receive what comes; uvloop takes notice of that when reading begins."""
        transport = self.transport
        reading = transport.is_reading() and not transport.is_closing()
        if reading:
            transport.pause_reading()
        transport.set_protocol(protocol)
        if reading:
            transport.resume_reading()

    # ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up what is being answered."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.leave()
        self._hand_on()  # which is told that the rest will never come
        if self._begun is not None:  # uvicorn tells the one that came last, which may still have to wait for this
            self._begun.disconnected = True
            self._begun.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Answer what is here, then close."""
        if self._receiver is not None:
            self._receiver.hand_back()
        self._hand_on()  # uvicorn would have begun to answer it
        super().shutdown()
