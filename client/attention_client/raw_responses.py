"""Responses as they came, beside their replies."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class RawResponse(Generic[AnswerT]):
    """A response of the server and the reply that it holds."""

    status: int
    """The HTTP status."""
    headers: Mapping[str, str]
    """The headers; their names match in any case."""
    body: bytes = field(repr=False)
    """The body as it came, decompressed."""
    reply: AnswerT
    """The result of the method."""


@dataclass
class KeptResponse:
    """The last response that a call received."""

    response: httpx.Response | None = None
    body: bytes = b""

    def beside(self, reply: AnswerT) -> RawResponse[AnswerT]:
        """Return the response and its reply. Raises TypeError if none came, as when the method makes no call."""
        if self.response is None:
            raise TypeError("raw: expected a method of the client that makes a call, such as client.forward")
        return RawResponse(self.response.status_code, self.response.headers, self.body, reply)


kept_response: ContextVar[KeptResponse | None] = ContextVar("kept", default=None)
"""The place of the response, of whoever asked for it."""


@contextmanager
def keeping() -> Iterator[KeptResponse]:
    """Keep the responses of the calls that this thread or task makes within."""
    kept = KeptResponse()
    token = kept_response.set(kept)
    try:
        yield kept
    finally:
        kept_response.reset(token)
