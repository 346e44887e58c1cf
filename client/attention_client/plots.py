"""Calls whose reply is asked for as a picture, drawn by the server."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, Self, cast

from attention_client.calls import Call, ReplyT
from attention_contract.errors import InvalidRequest
from attention_contract.operations import Operation
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.picture_options import PictureFields, PictureFormat, PictureOptions
from attention_contract.validation import validate
from attention_contract.wire import PICTURES

P = ParamSpec("P")
MEDIA_TYPES: Final = {ending: media_type for media_type, ending in PICTURES.items()}


@dataclass(frozen=True)
class PictureForm:
    """The form and the look of the pictures that calls ask for."""

    media_type: str
    options: PictureOptions

    @classmethod
    def stated(cls, format: PictureFormat, fields: PictureFields) -> Self:  # noqa: A002 - the argument of ``plot``
        """Check a format and the fields. Raises InvalidRequest, which names the one at fault."""
        if format not in MEDIA_TYPES:
            raise InvalidRequest.at("format", f"expected one of {', '.join(MEDIA_TYPES)}, got {format!r}")
        return cls(MEDIA_TYPES[format], validate(PictureOptions, dict(fields)))

    def drawn(self, call: Call[ReplyT]) -> Call[ReplyT]:
        """Return the call, for a picture of its reply. Raises TypeError if there are none."""
        if not call.operation.pictures:
            raise TypeError(f"plot: the reply of {call.operation.name} has no pictures")
        operation: Any = replace(cast("Operation[Any]", call.operation), reply=Picture)
        params = {name: str(value) for name, value in self.options.stated().items()}
        headers = {**call.headers, "Accept": self.media_type}
        return replace(call, operation=operation, headers=headers, params=params)

    @contextmanager
    def in_calls(self) -> Iterator[None]:
        """Ask for pictures in the calls that this thread or task makes within."""
        token = picture_request.set(self)
        try:
            yield
        finally:
            picture_request.reset(token)


@dataclass(frozen=True)
class Plot(PictureForm):
    """Pictures of replies, of a blocking client."""

    def of(self, method: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Picture:
        """Call a method of the client and return the picture of its reply.

        Raises what the method raises, NotAcceptable if the server cannot draw, and TypeError for a method whose reply
        has no pictures.
        """
        with self.in_calls():
            return _picture(method(*args, **kwargs))


@dataclass(frozen=True)
class AsyncPlot(PictureForm):
    """Pictures of replies, of an awaited client."""

    async def of(self, method: Callable[P, Awaitable[Any]], /, *args: P.args, **kwargs: P.kwargs) -> Picture:
        """Call a method of the client and return the picture of its reply. See ``Plot.of``."""
        with self.in_calls():
            return _picture(await method(*args, **kwargs))


picture_request: ContextVar[PictureForm | None] = ContextVar("picture_request", default=None)
"""The form of the pictures that the caller asked for; None for replies as numbers."""


def _picture(reply: object) -> Picture:
    if not isinstance(reply, Picture):
        raise TypeError("plot: expected a method of the client that makes a call, such as client.weights")
    return reply
