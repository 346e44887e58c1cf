"""A call of the service, validated and encoded, without I/O.

``call`` and ``sized`` take the arguments of a method as a dict, its ``locals()``. Where a field is a model (config,
spec, shape, …), a plain dict does as well; where it is a tensor, see ``TensorLike``. They raise InvalidRequest or
InvalidTensor if the service would refuse the request whatever the module.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

from attention_client.array_likes import SCALARS, plain
from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.operations import Operation
from attention_contract.schemas.costs.sweeps import Sweep
from attention_contract.validation import validate
from attention_contract.wire import JSON, MAX_HEADER, SAFETENSORS, to_body

ReplyT = TypeVar("ReplyT", bound=WireModel | None)
MediaType = Literal["safetensors", "json"]
CHUNK: Final = 2**18
"""Bytes that are handed to the transport at once. A smaller body is one chunk."""


class CallOptions(TypedDict, total=False):
    """Settings of one call, which every method takes as keywords; those left out are the client's."""

    timeout: float | None
    """Seconds that the whole call may take; None for no limit."""
    retries: int | None
    """The most repeats after transient failures; None to repeat until the waits add up to 40 s."""
    headers: Mapping[str, str]
    """Headers beside those of the client; they win over equal ones."""


@dataclass(frozen=True)
class HttpMessage:
    """A call as HTTP, independent of the library that sends it."""

    method: str
    url: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    chunks: list[bytes | memoryview]
    """The body in pieces of at most ``CHUNK`` bytes; large pieces are views of the tensors' own memory."""


@dataclass(frozen=True)
class Call(Generic[ReplyT]):
    """One call, ready to be sent any number of times."""

    operation: Operation[ReplyT]
    path: Mapping[str, str] = field(default_factory=dict)
    request: WireModel | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    options: CallOptions = field(default_factory=CallOptions)
    params: Mapping[str, str] = field(default_factory=dict)
    """The query string, of an operation whose request is not it."""

    def encode(self, media_type: MediaType) -> HttpMessage:
        """Encode the call; tensors travel as ``media_type`` says."""
        operation, request, params, chunks = self.operation, self.request, dict(self.params), []
        accepted = SAFETENSORS if operation.tensors and media_type == "safetensors" else JSON
        headers = {"Accept": accepted, **self.headers}
        if request is not None and accepted == JSON and "encoding" in type(request).model_fields:
            request = request.model_copy(update={"encoding": "base64"})  # keeps the dtypes of the reply
        if request is not None and operation.method == "GET":
            given = request.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
            params = {name: str(value) for name, value in given.items()}
        elif request is not None:
            sent, pieces = accepted, to_body(request, accepted, "request", "base64")
            if sent == SAFETENSORS and len(pieces[0]) > MAX_HEADER:  # a very long nested list
                sent, pieces = JSON, to_body(request, JSON, "request", "base64")
            headers |= {"Content-Type": sent, "Content-Length": str(sum(map(len, pieces)))}
            chunks = _chunks(pieces)
        url = operation.path.format_map({name: quote(part, safe="") for name, part in self.path.items()})
        return HttpMessage(operation.method, url, params, headers, chunks)


def _chunks(pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    if sum(map(len, pieces)) <= CHUNK:
        return [b"".join(pieces)]
    return [memoryview(piece)[at : at + CHUNK] for piece in pieces for at in range(0, len(piece), CHUNK)]


def call(operation: Operation[ReplyT], arguments: Mapping[str, Any]) -> Call[ReplyT]:
    """Validate the arguments as the path and the request of an operation. None stands for a field's default.

    ``options`` among the arguments holds the settings of the call, and may hold fields of the request too.
    """
    given = {name: value for name, value in arguments.items() if name not in {"self", "options"}}
    options: Any = arguments.get("options", {})
    if operation.request is not None and not options.keys() <= CallOptions.__annotations__.keys():
        known = operation.request.model_fields
        given |= {name: value for name, value in options.items() if name in known}
        options = {name: value for name, value in options.items() if name not in known}
    fields = {
        name: value if type(value) in SCALARS else _plain(name, value)
        for name, value in given.items()
        if value is not None
    }
    path = {name: _checked(name, fields.pop(name, None)) for _, name, _, _ in Formatter().parse(operation.path) if name}
    if operation.request is None:
        version = fields.pop("version", None)
        headers = {} if version is None else {"If-Match": f'"{version}"'}
        return Call(operation, path, headers=headers, options=options)
    return Call(operation, path, validate(operation.request, fields), options=options)


_SURROGATES: Final = re.compile("[\ud800-\udfff]")
"""Half characters, as of a byte of the command line that is not UTF-8. No URL holds them."""


def _plain(param: str, value: Any) -> Any:
    try:
        return plain(value)
    except InvalidTensor as fault:
        raise InvalidTensor.at(param.rstrip("_"), fault.detail) from None


def _checked(param: str, value: Any) -> str:
    if not isinstance(value, str) or value in {"", ".", ".."} or _SURROGATES.search(value):
        raise InvalidRequest.at(param, f"expected a name, got {value!r}")
    if "/" in value and param != "path":  # the server would read it as another path
        raise InvalidRequest.at(param, f"expected a name without a slash, got {value[:80]!r}")
    return value


def sized(operation: Operation[ReplyT], arguments: Mapping[str, Any]) -> Call[ReplyT]:
    """Build a call about costs. A shape may be a number of queries, a sweep a list of lengths."""
    shape, sweep = arguments["shape"], arguments["sweep"]
    if isinstance(shape, int):
        shape = {"queries": shape}
    if sweep is not None and not isinstance(sweep, Sweep | Mapping):
        sweep = {"values": list(sweep)}
    return call(operation, {**arguments, "shape": shape, "sweep": sweep})
