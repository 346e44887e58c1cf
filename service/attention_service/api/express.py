"""The express: a request whose text came before is answered by what was found of it then.

Its path, its headers and the header of its safetensors body say everything but the numbers. Once an ordinary endpoint
has answered such a text, the next with the same text is neither routed nor read nor checked again, and the head of its
reply is known but for the times. Whatever is not as it was then goes the ordinary way, and so does what fails, which is
told there what is wrong.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from attention_contract import operations
from attention_contract.errors import AttentionError, Cancelled
from attention_contract.forms import Form, Forms, header_of
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.tensors import Array, TensorFault
from attention_contract.wire import SAFETENSORS, to_body
from attention_service.api import negotiation, problems
from attention_service.api.bodies import UNCOUNTED
from attention_service.api.observing import Watch, given_id, request_id
from attention_service.runtime.budget import Body
from attention_service.runtime.engine import Engine
from attention_service.runtime.outlines import inputs_of
from attention_service.runtime.passes import Ended, Waiting
from attention_service.runtime.planning import Plan
from attention_service.runtime.recurring import Recurring, recurring

Headers = list[tuple[bytes, bytes]]

MOST_BYTES: Final = 2**20
"""Of a body: larger ones are not worth while, and must not be joined from their pieces."""
_COPIED: Final = 2**14
"""Up to this size it costs less to copy a body, so that it can be written to, than to tell torch that it can't."""
MOST: Final = 1024
"""The texts that are known; those that were not sent for the longest go first."""
_HEADS: Final = 256
"""Of the replies to one of them: there is one for each size of a batch."""
_DIGITS: Final = 9
_PREFIX, _SUFFIX = b"/v1/modules/", b"/forward"
_NAME: Final = re.compile(rb"[A-Za-z0-9._~-]+")
_ID: Final = b"x-request-id"
_DECIDING: Final = frozenset({b"if-match", b"prefer", b"content-encoding", b"transfer-encoding"})
"""Headers with which a request always goes the ordinary way."""
_SECONDS, _QUEUED = 2.0**40, 2.0**41
"""Times that nothing takes, to be found again in the text of a reply."""
_REPLY_HEADERS: Final = (
    b"content-type: %b\r\ncontent-length: %%d\r\nvary: Accept\r\nx-request-id: %%b\r\n\r\n" % SAFETENSORS.encode()
)


class Caller(Protocol):
    """A connection on which a request came."""

    known: "Known | None"
    """The last request that was answered by express: the next is likely to say the same."""

    def answer(self, status: int, *pieces: bytes | memoryview) -> None:
        """Send the answer: what comes behind the headers that every answer has."""


@dataclass(eq=False, slots=True)
class Known:
    """What is known of requests that say the same, but for the numbers of their tensors."""

    url: bytes
    headers: Headers
    header: bytes
    """That of the body, its length before it."""
    length: int
    """Of the body."""
    form: Form[ForwardRequest]
    recurring: Recurring
    heads: dict[int, tuple[Plan, "Head"]] = field(default_factory=dict)
    """The heads of its replies, by the identity of the plan that ran."""

    def head(self, ended: Ended) -> "Head":
        """That of the reply to a request that ended so."""
        kept = self.heads.get(id(ended.plan))
        if kept is None:
            if len(self.heads) >= _HEADS:
                self.heads.clear()
            marked = replace(ended, seconds=_SECONDS, queued=_QUEUED)
            kept = self.heads[id(ended.plan)] = ended.plan, Head.of(self.recurring.reply(marked))
        return kept[1]


class Incoming:
    """The body so far of a request that may be known; its memory is counted."""

    __slots__ = ("_memory", "_pieces", "_stated")

    def __init__(self, memory: Body, stated: int) -> None:
        self._memory = memory
        self._stated = stated
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """What came of it. Raises what ``Body.hold`` does."""
        if not self._pieces and self._stated > UNCOUNTED:
            self._memory.hold(self._stated)
        self._pieces.append(piece)

    def whole(self) -> bytes:
        """All that came; nothing more comes."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def give_back(self) -> None:
        """The body is done with."""
        self._memory.give_back()


class Express:
    """Answers what is known. Used from the event loop only."""

    def __init__(self, engine: Callable[[], Engine | None], forms: Forms, watch: Watch, most_bytes: int) -> None:
        """``most_bytes``: of a body that the server reads."""
        self._most_bytes = min(most_bytes, MOST_BYTES)
        self._engine = engine
        self._forms = forms
        self._watch = watch
        self._known: OrderedDict[Any, Known | None] = OrderedDict()

    def expect(self, url: bytes, headers: Headers) -> Incoming | None:
        """Where to put the body of a request that may be known; None for one that can't be."""
        engine = self._engine()
        if engine is None or not url.startswith(_PREFIX) or not url.endswith(_SUFFIX):
            return None
        lengths = [value for name, value in headers if name == b"content-length"]
        if len(lengths) != 1 or len(lengths[0]) > _DIGITS or int(lengths[0]) > self._most_bytes:
            return None
        memory = engine.budget.body()
        if int(lengths[0]) > UNCOUNTED:
            try:
                memory.expect(int(lengths[0]))
            except AttentionError:  # which the ordinary way tells
                return None
        return Incoming(memory, int(lengths[0]))

    def take(self, caller: Caller, url: bytes, headers: Headers, incoming: Incoming) -> "Asked | None":
        """Begin to answer a request if it is known, which may be over when this returns. None for the ordinary way."""
        body = incoming.whole()
        started, identity, known = time.perf_counter(), None, caller.known
        if known is None or headers != known.headers or not _same(known, url, body):
            identity = given_id(headers)
            known = self._find(url, [each for each in headers if each[0] != _ID], body)
            if known is None:
                return None
            caller.known = known
        asked = Asked(self._watch, caller, known, incoming, identity or self._watch.new_id(), started)
        try:
            inputs = known.form.arrays(memoryview(bytearray(body) if len(body) <= _COPIED else body))
        except TensorFault:
            return None
        asked.waiting = known.recurring.begin(inputs, asked)
        if asked.waiting is None:
            self._known.pop(_key(known.url, known.headers, known.header, known.length), None)
            caller.known = None
            return None
        return asked

    def _find(self, url: bytes, headers: Headers, body: bytes) -> Known | None:
        view = memoryview(body)
        header = header_of(view)
        key = _key(url, headers, header, len(body))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        form, engine = self._forms.find(ForwardRequest, view), self._engine()
        if form is None or engine is None:  # it was never read
            return None
        try:
            found = self._learnt(engine, url, headers, form, view)
        except (AttentionError, TensorFault):  # which the ordinary way tells
            return None
        known = None if found is None else Known(url, headers, header, len(body), form, found)
        self._known[key] = known
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return known

    def _learnt(
        self, engine: Engine, url: bytes, headers: Headers, form: Form[ForwardRequest], body: memoryview
    ) -> Recurring | None:
        sent = negotiation.headers_of({"headers": headers})
        if not sent.keys().isdisjoint(_DECIDING) or negotiation.content_type(sent) != SAFETENSORS:
            return None
        name = url.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if negotiation.accepted(sent, operations.forward) != SAFETENSORS or not _NAME.fullmatch(name):
            return None
        request = form.filled(body)
        if form.arrays(body).keys() != inputs_of(request).keys():  # some are part of the text
            return None
        return recurring(engine, str(name, "ascii"), request)


def _same(known: Known, url: bytes, body: bytes) -> bool:
    return len(body) == known.length and url == known.url and body.startswith(known.header)


def _key(url: bytes, headers: Headers, header: bytes, length: int) -> Hashable:
    return url, tuple(headers), header, length


@dataclass(eq=False, slots=True)
class Asked:
    """One request that is being answered: it takes the result of its pass."""

    watch: Watch
    caller: Caller
    known: Known
    incoming: Incoming
    identity: str
    started: float
    waiting: Waiting | None = None
    over: bool = False

    @property
    def path(self) -> str:
        """That of its URL."""
        return str(self.known.url, "ascii")

    def done(self) -> bool:
        """Whether it was answered, or the caller went away."""
        return self.over

    def set_result(self, result: Ended) -> None:
        """Send the reply."""
        try:
            pieces = self.known.head(result).pieces(self.identity, result)
        except Exception as fault:
            self.set_exception(fault)
        else:
            self._answer(200, *pieces)

    def set_exception(self, exception: BaseException) -> None:
        """Tell what went wrong."""
        set_for_now = request_id.set(self.identity)
        try:
            problem = problems.render(
                exception if isinstance(exception, AttentionError) else problems.unexpected(self.path, exception)
            )
        finally:
            request_id.reset(set_for_now)
        headers = [*problem.raw_headers, (_ID, self.identity.encode())]
        self._answer(problem.status_code, lines(headers), b"\r\n", problem.body)

    def leave(self) -> None:
        """Answer nobody: the caller went away."""
        self.over = True
        self.incoming.give_back()
        if self.waiting is not None:
            self.known.recurring.engine.execution.leave(self.waiting)
        self._note(Cancelled.status)

    def _answer(self, status: int, *pieces: bytes | memoryview) -> None:
        self.over = True
        self.caller.answer(status, *pieces)
        self.incoming.give_back()
        self._note(status)

    def _note(self, status: int) -> None:
        seconds = time.perf_counter() - self.started
        self.watch.answered("POST", self.path, operations.forward.name, status, seconds, self.identity)


@dataclass(frozen=True)
class Head:
    """All of a reply but its tensor, its times and its id."""

    before: bytes
    between: bytes
    after: bytes
    """The header of its body, before, between and after the times of computing and of waiting."""
    size: int
    """Bytes of the tensor."""

    @classmethod
    def of(cls, reply: ForwardReply) -> "Head":
        """That of replies like this one, whose times are marked."""
        header, tensor = to_body(reply, SAFETENSORS, "reply")
        before, rest = bytes(header[8:]).rstrip().split(_marked(_SECONDS))
        between, after = rest.split(_marked(_QUEUED))
        return cls(before, between, after, len(tensor))

    def pieces(self, identity: str, ended: Ended) -> tuple[bytes | memoryview, ...]:
        """The rest of an answer's headers, and its body."""
        text = b"%b%r%b%r%b" % (self.before, ended.seconds * 1e3, self.between, ended.queued * 1e3, self.after)
        size = -(-len(text) // 8) * 8
        length = 8 + size + self.size
        head = _REPLY_HEADERS % (length, identity.encode())
        tensor: Array = ended.fields["output"]
        return head, size.to_bytes(8, "little"), text.ljust(size), tensor.reshape(-1).view(np.uint8).data


def lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def _marked(seconds: float) -> bytes:
    return b"%r" % (seconds * 1e3)
