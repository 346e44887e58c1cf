"""The text of a request for a forward pass and of its reply: all but their numbers, in each of the two media types.

The header of a safetensors file is its text. That of a JSON object is what it says beside its lists of numbers, and
their shapes. Requests with one text differ in their numbers alone, and so do their replies, but for the times.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from attention_contract.errors import InvalidRequest
from attention_contract.forms import Form, Forms, header_of
from attention_contract.reading import read_json
from attention_contract.schemas.attention import ForwardReply, ForwardRequest
from attention_contract.tensors import Array, TensorFault
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, dump_json, to_body, to_json
from attention_service.runtime.outlines import inputs_of
from attention_service.runtime.passes import Ended

_COPIED: Final = 2**14
"""Up to this size it costs less to copy a body, so that it can be written to, than to tell torch that it can't."""
_SECONDS, _QUEUED = 2.0**40, 2.0**41
"""Times that nothing takes, to be found again in the text of a reply."""
_OUTPUT: Final = np.full(1, 2.0**42)
"""And an output."""

Pieces = tuple[bytes | memoryview, ...]
Reply = Callable[[Ended], ForwardReply]
"""What is told of a request that ended."""


class Head(Protocol):
    """The text of a reply."""

    def body(self, ended: Ended) -> Pieces:
        """The body of the reply to a request that ended so."""


class Text(Protocol):
    """The text of a request."""

    def inputs(self, body: bytes) -> dict[str, Array] | None:
        """The tensors of a body by their field; None where its text is another."""

    def head(self, reply: Reply, ended: Ended) -> Head:
        """The text of the replies to those that ended as this one did, but for the times and the output."""


def key_of(body: bytes, media_type: str) -> Hashable:
    """Equal for bodies with one text; None for one that has none."""
    if media_type == SAFETENSORS:
        header = header_of(memoryview(body))
        return (header, len(body)) if header else None
    divided = _divided(body)
    return None if divided is None else (dump_json(divided[0]), _shapes(divided[1]))


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
    divided = _divided(body)
    if divided is None:
        return None
    said, arrays = divided
    request = validate(ForwardRequest, said | arrays, by_name=False)
    if request.encoding != "list" or arrays.keys() != inputs_of(request).keys():
        return None
    return Object(said, _shapes(arrays)), request


# ── safetensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Header:
    """The text of a safetensors file."""

    header: bytes
    """Its length before it."""
    length: int
    """Of the whole file."""
    form: Form[ForwardRequest]

    def inputs(self, body: bytes) -> dict[str, Array] | None:
        """The tensors of a file with this header."""
        if len(body) != self.length or not body.startswith(self.header):
            return None
        try:
            return self.form.arrays(memoryview(bytearray(body) if len(body) <= _COPIED else body))
        except TensorFault:
            return None

    def head(self, reply: Reply, ended: Ended) -> "HeaderOfReply":
        """As of any ``Text``."""
        header, _ = to_body(reply(replace(ended, seconds=_SECONDS, queued=_QUEUED)), SAFETENSORS, "reply")
        before, rest = bytes(header[8:]).rstrip().split(_marked(_SECONDS))
        between, after = rest.split(_marked(_QUEUED))
        return HeaderOfReply(before, between, after)


@dataclass(frozen=True, slots=True)
class HeaderOfReply:
    """Before the times, between the two, and after both."""

    before: bytes
    between: bytes
    after: bytes

    def body(self, ended: Ended) -> Pieces:
        """Length, header and output."""
        text = b"%b%r%b%r%b" % (self.before, ended.seconds * 1e3, self.between, ended.queued * 1e3, self.after)
        size = -(-len(text) // 8) * 8
        output: Array = ended.fields["output"]
        return size.to_bytes(8, "little") + text.ljust(size), output.reshape(-1).view(np.uint8).data


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Object:
    """The text of a JSON object."""

    said: dict[str, Any]
    """All but the lists of numbers."""
    shapes: Hashable

    def inputs(self, body: bytes) -> dict[str, Array] | None:
        """The tensors of an object that says the same."""
        divided = _divided(body)
        if divided is None or divided[0] != self.said or _shapes(divided[1]) != self.shapes:
            return None
        return {name: array.view(np.ndarray) for name, array in divided[1].items()}  # what was stated is known

    def head(self, reply: Reply, ended: Ended) -> "ObjectOfReply":
        """As of any ``Text``."""
        marked = replace(ended, fields={"output": _OUTPUT}, seconds=_SECONDS, queued=_QUEUED)
        before, rest = to_json(reply(marked)).split(dump_json(_OUTPUT))
        behind, rest = rest.split(_marked(_SECONDS))
        between, after = rest.split(_marked(_QUEUED))
        return ObjectOfReply(before, behind, between, after)


@dataclass(frozen=True, slots=True)
class ObjectOfReply:
    """Before the output, behind it, between the times, and after both."""

    before: bytes
    behind: bytes
    between: bytes
    after: bytes

    def body(self, ended: Ended) -> Pieces:
        """The object."""
        times = b"%b%r%b%r%b" % (self.behind, ended.seconds * 1e3, self.between, ended.queued * 1e3, self.after)
        return self.before, dump_json(ended.fields["output"]), times


def _divided(body: bytes) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """What an object says beside its lists of numbers, and these; None where that is not told quickly."""
    try:
        data = read_json(body, ForwardRequest)
    except InvalidRequest:
        return None
    if data is None:
        return None
    arrays = {name: value for name, value in data.items() if isinstance(value, np.ndarray)}
    return {name: value for name, value in data.items() if name not in arrays}, arrays


def _shapes(arrays: dict[str, Array]) -> Hashable:
    return tuple((name, array.shape, array.dtype.char) for name, array in arrays.items())


def _marked(seconds: float) -> bytes:
    return b"%r" % (seconds * 1e3)
