"""The text of a request for a forward pass and of its reply: all but their numbers, in each of the two media types.

The header of a safetensors file is its text. That of a JSON object is what it says beside its lists of numbers, and
their shapes. Requests with one text differ in their numbers alone, and so do their replies, but for the times.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

import numpy as np
import orjson

from attention_contract import lists
from attention_contract.forms import MAX_HEADER, Form, Forms, header_of
from attention_contract.reading import joined
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.tensors import Array, TensorFault
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, dump_array, dump_json, to_body, to_json
from attention_service.api import negotiation
from attention_service.cost import Estimate
from attention_service.runtime.operations.recurring import inputs_of
from attention_service.runtime.planning.planner import Plan
from attention_service.runtime.scheduling.passes import Ended

_COPIED: Final = 2**14
"""Up to this size it costs less to copy a body, so that it can be written to, than to tell torch that it can't."""
_TIMES: Final = 2.0**40, 2.0**41, 2.0**42, 2.0**43, 2.0**44
"""Seconds that nothing takes, to be found again in the text of a reply."""
_BATCH: Final = 2**45
_OUTPUT: Final = np.full(1, 2.0**46)
"""A batch that never was, and an output."""

Pieces = tuple[bytes | memoryview, ...]
Reply = Callable[[Ended], ForwardReply]
"""What is told of a request that ended."""


class Head(Protocol):
    """The text of a reply."""

    def body(self, ended: Ended) -> Pieces:
        """The body of the reply to a request that ended so."""


class Text(Protocol):
    """The text of a request."""

    writes: ClassVar[bool]
    """Whether tensors are views of a body, which torch takes sooner where they may be written to."""

    def inputs(self, body: bytes | bytearray | memoryview) -> dict[str, Array] | None:
        """The tensors of a body by their field; None where its text is another."""

    def head(self, reply: Reply, ended: Ended) -> Head:
        """The text of all replies, made of one of them."""


def key_of(body: bytes, media_type: str) -> Hashable:
    """Equal for bodies with one text; None for one that has none."""
    if media_type == SAFETENSORS:
        header = header_of(memoryview(body))
        return (header, len(body)) if header else None
    divided = lists.divide(body) if negotiation.is_quickly_read(memoryview(body)) else None
    if divided is None or len(divided.rest) > MAX_HEADER:
        return None
    return divided.rest, _shapes(divided)


def text_of(body: bytes, media_type: str, forms: Forms) -> tuple[Text, ForwardRequest] | None:
    """The text of a body, and its request; None where they don't tell everything.

    Raises what reading a request does. ``forms``: those that are known.
    """
    view = memoryview(body)
    if media_type == SAFETENSORS:
        request = forms.read(ForwardRequest, view)
        form = forms.find(ForwardRequest, view)
        # Some of its tensors may be part of the header.
        if form is None or form.arrays(view).keys() != inputs_of(request).keys():
            return None
        return Header(header_of(view), len(body), form), request
    divided = lists.divide(body)
    data = None if divided is None else joined(divided, ForwardRequest)
    if divided is None or data is None:
        return None
    request = validate(ForwardRequest, data, by_name=False)
    names = inputs_of(request).keys()
    if request.encoding != "list" or len(divided.arrays) != len(names) or not names <= data.keys():
        return None
    # A name may come twice: the first says where it is among the others, the last what it is, a list or something else.
    places = orjson.loads(divided.rest)
    if any(type(places[name]) is not list for name in names):
        return None
    in_order = sorted(names, key=lambda name: places[name])
    return Object(divided.rest, tuple(in_order), _shapes(divided)), request


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Header:
    """The text of a safetensors file."""

    writes: ClassVar[bool] = True
    header: bytes
    """Its length before it."""
    length: int
    """Of the whole file."""
    form: Form[ForwardRequest]

    def inputs(self, body: bytes | bytearray | memoryview) -> dict[str, Array] | None:
        """The tensors of a file with this header."""
        if len(body) != self.length or body[: len(self.header)] != self.header:
            return None
        copied = isinstance(body, bytes) and len(body) <= _COPIED
        try:
            return self.form.arrays(memoryview(bytearray(body) if copied else body))
        except TensorFault:
            return None

    def head(self, reply: Reply, ended: Ended) -> "HeaderOfReply":
        """As of any ``Text``."""
        header, _ = to_body(reply(_marked(ended)), SAFETENSORS, "reply")
        return HeaderOfReply(Filling(bytes(header[8:]).rstrip()))


@dataclass(frozen=True, slots=True)
class HeaderOfReply:
    """With places for its numbers."""

    filling: "Filling"

    def body(self, ended: Ended) -> Pieces:
        """Length, header and output."""
        text = self.filling.text(ended)
        size = -(-len(text) // 8) * 8
        output: Array = ended.fields["output"]
        return size.to_bytes(8, "little") + text.ljust(size), output.reshape(-1).view(np.uint8).data


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Object:
    """The text of a JSON object."""

    writes: ClassVar[bool] = False
    rest: bytes
    """All but the lists of numbers."""
    names: tuple[str, ...]
    shapes: Hashable

    def inputs(self, body: bytes | bytearray | memoryview) -> dict[str, Array] | None:
        """The tensors of an object that says the same."""
        divided = lists.divide(body)
        if divided is None or divided.rest != self.rest or _shapes(divided) != self.shapes:
            return None
        return dict(zip(self.names, divided.arrays, strict=True))

    def head(self, reply: Reply, ended: Ended) -> "ObjectOfReply":
        """As of any ``Text``."""
        text = to_json(reply(replace(_marked(ended), fields={"output": _OUTPUT})))
        before, after = text.split(dump_json(_OUTPUT))
        return ObjectOfReply(before, Filling(after))


@dataclass(frozen=True, slots=True)
class ObjectOfReply:
    """Before the output, and after it with places for its numbers."""

    before: bytes
    after: "Filling"

    def body(self, ended: Ended) -> Pieces:
        """The object."""
        return self.before, dump_array(ended.fields["output"]), self.after.text(ended)


def _shapes(divided: lists.Divided) -> Hashable:
    return tuple((array.shape, array.dtype.char) for array in divided.arrays)


# ── what differs from reply to reply ─────────────────────────────────────────────────────────────────────────────────


def _marked(ended: Ended) -> Ended:
    """The same with numbers that are found again in the text of its reply."""
    median, low, high, seconds, queued = _TIMES
    plan = replace(ended.plan, predicted=Estimate(median, low, high))
    return replace(ended, plan=plan, seconds=seconds, queued=queued, batch=_BATCH)


class Filling:
    """The text of a reply with a place for each number: milliseconds to the nanosecond, and how many ran at once.

    All the digits of a float take four times as long to find, and say nothing about a time. What was predicted is
    filled in once for each plan: of many requests that ran together, or one after the other, it is the same.
    """

    __slots__ = ("_plan", "_planned", "_text")

    def __init__(self, marked: bytes) -> None:
        """``marked``: the text of a reply to a request that was ``_marked``."""
        text = marked.replace(b"%", b"%%%%")
        for seconds, place in zip(_TIMES, [b"%.6f"] * 3 + [b"%%.6f"] * 2, strict=True):
            text = _replaced(text, b"%r" % (seconds * 1e3), place)
        self._text = _replaced(text, b"%d" % _BATCH, b"%%d")
        self._plan: Plan | None = None
        self._planned = b""

    def text(self, ended: Ended) -> bytes:
        """With the numbers of a request that ended so."""
        if ended.plan is not self._plan:
            predicted = ended.plan.predicted
            self._planned = self._text % (predicted.median * 1e3, predicted.low * 1e3, predicted.high * 1e3)
            self._plan = ended.plan
        return self._planned % (ended.seconds * 1e3, ended.queued * 1e3, ended.batch)


def _replaced(text: bytes, number: bytes, place: bytes) -> bytes:
    """With a place for a number that is there once."""
    before, after = text.split(number)
    return before + place + after
