"""The express: a request whose text came before is answered by what was found of it then.

Its path, its headers and the text of its body (``texts``) say everything but the numbers. Once an ordinary endpoint has
answered such a request, the next that says the same is neither routed nor read nor checked again, and all of its reply
is known but the output and the times. Whatever is not as it was then goes the ordinary way.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from attention_contract import operations
from attention_contract.errors import AttentionError, Cancelled
from attention_contract.forms import Forms
from attention_contract.tensors import Array
from attention_contract.wire import JSON, SAFETENSORS
from attention_service.api import negotiation, problems
from attention_service.api.bodies import UNCOUNTED
from attention_service.api.known import DECIDING, Headers, Incoming, Known, read_of
from attention_service.api.observing import Watch, given_id, request_id
from attention_service.api.texts import key_of, text_of
from attention_service.runtime.engine import Engine
from attention_service.runtime.operations.recurring import recurring
from attention_service.runtime.scheduling.budget import Body
from attention_service.runtime.scheduling.passes import Ended, Waiting

MOST_BYTES: Final = 2**20
"""Of a body: larger ones are not worth while, and must not be joined from their pieces."""
MOST: Final = 1024
"""The texts that are known; those that were not sent for the longest go first."""
_VAIN: Final = 8
_PASSED_OVER: Final = 1024
"""After so many bodies that were looked at in vain, so many are not looked at."""
_DIGITS: Final = 9
_PREFIX, _SUFFIX = b"/v1/modules/", b"/forward"
_NAME: Final = re.compile(rb"[A-Za-z0-9._~-]+")
_ID, _LENGTH = b"x-request-id", b"content-length"
_REPLY_HEADERS: Final = b"content-type: %b\r\ncontent-length: %d\r\nvary: Accept\r\nx-request-id: %b\r\n\r\n"


class Caller(Protocol):
    """A connection on which a request came."""

    known: "Known | None"
    """The last request that was answered by express: the next is likely to say the same."""

    def answer(self, status: int, *pieces: bytes | memoryview) -> None:
        """Send the answer: what comes behind the headers that every answer has."""


class Express:
    """Answers what is known. Used from the event loop only."""

    def __init__(self, engine: Callable[[], Engine | None], forms: Forms, watch: Watch, most_bytes: int) -> None:
        """``most_bytes``: of a body that the server reads."""
        self._most_bytes = min(most_bytes, MOST_BYTES)
        self._engine = engine
        self._forms = forms
        self._watch = watch
        self._known: OrderedDict[Hashable, Known | Literal["seen"]] = OrderedDict()
        """Texts that were seen once, and what is known of those that came again."""
        self._vain: OrderedDict[Hashable, int] = OrderedDict()
        """URLs and headers of requests whose last bodies could not be known, and how many those were."""

    def expect(self, url: bytes, headers: Headers, known: Known | None) -> Incoming | None:
        """Where to put the body of a request that may be known; None for one that can't be.

        known: what is known of the last one.
        """
        if known is not None and not known.says(url, headers):
            known = None
        if known is not None and known.is_small and headers == known.headers:
            return Incoming(0, None, known)
        engine, stated = self._engine(), self._stated(url, headers)
        if engine is None or stated is None or (known is None and self._is_vain(url, headers)):
            return None
        if stated <= UNCOUNTED:
            return Incoming(stated, None, known)
        memory = engine.budget.body()
        try:
            memory.expect(stated)
        except AttentionError:  # which the ordinary way tells
            return None
        return Incoming(stated, memory, known)

    def _stated(self, url: bytes, headers: Headers) -> int | None:
        """How long the body of a request is that may be known; None for one that can't be."""
        lengths = [value for name, value in headers if name == _LENGTH]
        if not url.startswith(_PREFIX) or not url.endswith(_SUFFIX) or len(lengths) != 1 or len(lengths[0]) > _DIGITS:
            return None
        stated = int(lengths[0])
        return stated if stated <= self._most_bytes else None

    def take(self, caller: Caller, url: bytes, headers: Headers, incoming: Incoming) -> "Asked | None":
        """Begin to answer a request if it is known, which may be over when this returns. None for the ordinary way."""
        started, known = time.perf_counter(), incoming.known
        try:
            inputs = None if known is None else known.text.inputs(incoming.read())
            if inputs is None:
                body = incoming.whole()
                known = self._find(url, headers, body)
                inputs = None if known is None else known.text.inputs(body)
        except Exception:  # which the ordinary way tells
            return None
        if known is None or inputs is None:
            return None
        caller.known = known
        identity = None if headers == known.headers else given_id(headers)
        asked = Asked(self._watch, caller, known, incoming, identity or self._watch.new_id(), started)
        return self._begun(asked, inputs)

    def memory(self, size: int) -> Body | None:
        """Memory for a body of a request that is known; None where there is none."""
        engine = self._engine()
        if engine is None:
            return None
        if engine.budget.bodies + size > engine.budget.room:  # which the ordinary way tells
            return None
        memory = engine.budget.body()
        try:
            memory.hold(size)
        except AttentionError:
            return None
        return memory

    def again(self, caller: Caller, known: Known, body: bytes | memoryview, memory: Body | None) -> "Asked | None":
        """As ``take``, of one that is known before its body, and has no id.

        memory: what the body holds, where it is counted.
        """
        if len(body) > self._most_bytes:
            return None
        started = time.perf_counter()
        try:
            inputs = known.text.inputs(body)
        except Exception:  # which the ordinary way tells
            return None
        if inputs is None:
            return None
        return self._begun(Asked(self._watch, caller, known, memory, self._watch.new_id(), started), inputs)

    def _begun(self, asked: "Asked", inputs: dict[str, Array]) -> "Asked | None":
        known = asked.known
        waiting = known.recurring.begin(inputs, asked)
        if waiting is None:
            self._known.pop(known.key, None)
            asked.caller.known = None
            return None
        if not asked.over:  # then they would hold each other
            asked.waiting = waiting
        return asked

    def _find(self, url: bytes, headers: Headers, body: bytes) -> Known | None:
        """What is known of a request. It is learnt when it comes for the second time."""
        read = read_of(url, headers)
        if read is None:
            return None
        sent, before = negotiation.headers_of({"headers": read}), (url, tuple(read))
        media_type = negotiation.content_type(sent)
        plain = sent.keys().isdisjoint(DECIDING) and media_type in (JSON, SAFETENSORS)
        text_key = key_of(body, media_type) if plain else None
        if text_key is None:
            self._give_up(before)
            return None
        key = before, text_key
        known = self._known.get(key)
        if isinstance(known, Known):
            self._known.move_to_end(key)
            self._vain.pop(before, None)
            return known
        learnt = None
        if known == "seen":
            learnt = self._learnt(key, url, headers, read, body)
            if learnt is None:
                self._give_up(before)
                return None
        self._known[key] = learnt or "seen"
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return learnt

    def _learnt(self, key: Hashable, url: bytes, headers: Headers, read: Headers, body: bytes) -> Known | None:
        engine, name = self._engine(), url.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        sent = negotiation.headers_of({"headers": read})
        media_type, accepted = negotiation.content_type(sent), negotiation.accepted(sent, operations.forward)
        if engine is None or accepted != media_type or not _NAME.fullmatch(name):
            return None
        found = text_of(body, media_type, self._forms)
        if found is None:
            return None
        text, request = found
        again = recurring(engine, str(name, "ascii"), request)
        if again is None or (media_type == JSON and not negotiation.is_quickly_written(again.output_bytes)):
            return None
        known = [each for each in headers if each[0] != _ID]
        return Known(key, url, known, read, media_type, text, again, len(body) <= UNCOUNTED)

    def _give_up(self, before: Hashable) -> None:
        """Look at no more bodies of such requests for a while, if this was not the first in vain."""
        self._vain[before] = self._vain.get(before, 0) + 1
        if len(self._vain) > MOST:
            self._vain.popitem(last=False)

    def _is_vain(self, url: bytes, headers: Headers) -> bool:
        """Whether not to look at the body of such a request this time."""
        read = read_of(url, headers)
        if read is None:
            return True
        before = url, tuple(read)
        passed = self._vain.get(before, 0)
        if passed < _VAIN:
            return False
        self._vain[before] = passed + 1 if passed < _VAIN + _PASSED_OVER else 0
        return True


@dataclass(eq=False, slots=True)
class Asked:
    """One request that is being answered: it takes the result of its pass."""

    watch: Watch
    caller: Caller
    known: Known
    held: Incoming | Body | None
    """What its body holds, where that is counted."""
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
            body = self.known.head(result).body(result)
        except Exception as fault:
            self.set_exception(fault)
        else:
            length = sum(map(len, body))
            head = _REPLY_HEADERS % (self.known.media_type.encode(), length, self.identity.encode())
            self._answer(200, head, *body)

    def set_exception(self, exception: BaseException) -> None:
        """Tell what went wrong."""
        set_for_now = request_id.set(self.identity)
        try:
            problem = problems.render(
                exception if isinstance(exception, AttentionError) else problems.unexpected(self.path, exception)
            )
        finally:
            request_id.reset(set_for_now)
            problems.forget(exception)
        headers = [*problem.raw_headers, (_ID, self.identity.encode())]
        self._answer(problem.status_code, lines(headers), b"\r\n", problem.body)

    def leave(self) -> None:
        """Answer nobody: the caller went away."""
        self.over = True
        self._give_back()
        if self.waiting is not None:
            self.known.recurring.engine.execution.leave(self.waiting)
            self.waiting = None
        self._note(Cancelled.status)

    def _answer(self, status: int, *pieces: bytes | memoryview) -> None:
        self.over, self.waiting = True, None
        self.caller.answer(status, *pieces)
        self._give_back()
        self._note(status)

    def _give_back(self) -> None:
        if self.held is not None:
            self.held.give_back()

    def _note(self, status: int) -> None:
        seconds = time.perf_counter() - self.started
        self.watch.answered("POST", self.path, operations.forward.name, status, seconds, self.identity)


def lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)
