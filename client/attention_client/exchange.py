"""One call on its way: the request that can be sent again, what is retried and when it ends. Shared by both clients."""

import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, cast, get_args
from urllib.parse import quote

import httpx
import stamina

from attention_client.calls import Call, ReplyT
from attention_client.errors import ConnectionFailed, DeadlineExceeded, UnexpectedReply
from attention_contract.base import WireModel
from attention_contract.errors import (
    AttentionError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from attention_contract.wire import JSON, MAX_HEADER, SAFETENSORS, to_body

MediaType = Literal["safetensors", "json"]

WAIT_INITIAL: Final = 0.1
WAIT_JITTER: Final = 0.4
WAIT_MAX: Final = 4.0
"""Seconds before an attempt: 0.1·2ⁿ plus up to WAIT_JITTER, at most WAIT_MAX, unless the server names a time."""
CHUNK: Final = 2**20
"""Bytes handed to the socket at once, so that sending a large tensor copies no more than this."""
_CLOCKS_DIFFER: Final = 0.05
"""Seconds by which a transport's timer may be ahead of the deadline that it was set for."""
_WAITING: Final[dict[type[httpx.TimeoutException], str]] = {
    httpx.ConnectTimeout: " while connecting",
    httpx.WriteTimeout: " while sending the request",
    httpx.ReadTimeout: " while waiting for the reply",
    httpx.PoolTimeout: " while waiting for a free connection",
}


@dataclass(frozen=True)
class Policy:
    """How a client makes its calls."""

    timeout: float | None
    retries: int
    media_type: MediaType

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout: expected a positive number of seconds or None, got {self.timeout}")
        if self.retries < 0:
            raise ValueError(f"retries: expected 0 or more, got {self.retries}")
        if self.media_type not in get_args(MediaType):
            raise ValueError(f"media_type: expected one of {', '.join(get_args(MediaType))}; got {self.media_type!r}")


@dataclass(frozen=True)
class BlockingBody(httpx.SyncByteStream):
    """A body for ``httpx.Client`` that can be sent again."""

    chunks: Callable[[], Iterator[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()


@dataclass(frozen=True)
class AwaitedBody(httpx.AsyncByteStream):
    """A body for ``httpx.AsyncClient`` that can be sent again."""

    chunks: Callable[[], Iterator[bytes]]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks():
            yield chunk


class Collected:
    """A reply's body while it comes: the one buffer that the transport has filled, or its chunks put together."""

    def __init__(self) -> None:
        self.body: bytearray | memoryview = bytearray()

    def add(self, chunk: bytes | memoryview) -> None:
        """The next chunk. A writable view is the transport's to give away, and is kept while it is the only one."""
        if not len(self.body) and isinstance(chunk, memoryview) and not chunk.readonly:
            self.body = chunk
            return
        if isinstance(self.body, memoryview):
            self.body = bytearray(self.body)
        self.body += chunk


class Exchange(Generic[ReplyT]):
    """One call from its first attempt to its reply."""

    def __init__(self, call: Call[ReplyT], policy: Policy) -> None:
        self.call = call
        self.policy = policy
        self.ends = math.inf if policy.timeout is None else time.monotonic() + policy.timeout
        self.failure: AttentionError | None = None
        """Why the last attempt failed."""
        operation = call.operation
        self.url = operation.path.format_map({name: quote(part, safe="") for name, part in call.path.items()})
        self.media_type = SAFETENSORS if operation.tensors and policy.media_type == "safetensors" else JSON
        self.headers = {"Accept": self.media_type, **call.headers}
        self.params: Mapping[str, str] = {}
        self.pieces: list[memoryview] = []
        if call.request is not None:
            self._put(call.request)

    def _put(self, request: WireModel) -> None:
        """The request as a query string or a body."""
        if self.media_type == JSON and "encoding" in type(request).model_fields:
            request = request.model_copy(update={"encoding": "base64"})  # keeps the dtypes of the reply
        if self.call.operation.method == "GET":
            given = request.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
            self.params = {name: str(value) for name, value in given.items()}
            return
        media_type = self.media_type
        pieces = to_body(request, media_type, "request", "base64")
        if media_type == SAFETENSORS and len(pieces[0]) > MAX_HEADER:  # a very long nested list
            media_type = JSON
            pieces = to_body(request, media_type, "request", "base64")
        self.pieces = [memoryview(piece) for piece in pieces]
        self.headers |= {"Content-Type": media_type, "Content-Length": str(sum(map(len, self.pieces)))}

    def chunks(self) -> Iterator[bytes]:
        """The body in order, as long as the deadline allows. These are views, which httpx takes as well as bytes."""
        for piece in self.pieces:
            for start in range(0, len(piece), CHUNK):
                self.check()
                yield cast("bytes", piece[start : start + CHUNK])

    # ── attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def attempts(self) -> Any:
        """The attempts, to be iterated either way; each is a context manager that swallows what is to be retried."""
        return stamina.retry_context(
            on=self.backoff,
            attempts=self.policy.retries + 1,
            timeout=None,
            wait_initial=WAIT_INITIAL,
            wait_jitter=WAIT_JITTER,
            wait_max=WAIT_MAX,
        ).with_name(self.call.operation.name, (), {})

    def backoff(self, fault: Exception) -> bool | float:
        """Whether to try again after this fault, and after how many seconds where stamina is not to choose."""
        if not isinstance(fault, AttentionError) or not self._transient(fault):
            return False
        self.failure = fault
        left = max(self.remaining(), 0.0)
        asked = fault.facts.get("retry_after")
        if isinstance(asked, int | float):  # a problem document may say anything
            asked = max(asked, 0.0)
            return asked < left and min(asked + random.uniform(0, WAIT_JITTER), left)  # noqa: S311 - spreads load
        return True if left > WAIT_MAX else random.uniform(0, left / 2)  # noqa: S311

    def _transient(self, fault: AttentionError) -> bool:
        if isinstance(fault, ConnectionFailed):
            return not fault.facts["sent"] or self.call.operation.safe_to_repeat
        return self.call.patient and isinstance(fault, Overloaded | Unavailable)

    def remaining(self) -> float:
        """Seconds until the deadline."""
        return self.ends - time.monotonic()

    def timeouts(self, own: httpx.Timeout) -> dict[str, float | None]:
        """What each step of an attempt may take: what the httpx client allows, and no more than is left."""
        if self.policy.timeout is None:
            return own.as_dict()
        left = max(self.remaining(), 0.0)
        return {step: left if allowed is None else min(allowed, left) for step, allowed in own.as_dict().items()}

    def check(self) -> None:
        """Raise DeadlineExceeded if the deadline has passed."""
        if self.remaining() <= 0:
            raise self._late() from self.failure

    def _late(self, doing: str = "") -> DeadlineExceeded:
        last = f"; the attempt before failed: {self.failure.detail}" if self.failure else ""
        return DeadlineExceeded(
            f"{self.call.operation.name} did not end within {self.policy.timeout} s{doing}{last}",
            timeout=self.policy.timeout,
        )

    def error(self, fault: httpx.RequestError, response: httpx.Response | None) -> AttentionError:
        """The client's error for what httpx raised, before or after it had the head of a response."""
        if isinstance(fault, httpx.TimeoutException):
            return self._timed_out(fault)
        if isinstance(fault, httpx.ConnectError | httpx.ProxyError):
            return ConnectionFailed(f"cannot connect to {_origin(fault)}: {fault}", sent=False)
        if isinstance(fault, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
            return InvalidRequest(f"{self.call.operation.name} cannot be sent: {fault}")
        answered: dict[str, Any] = {} if response is None else {"answered": response.status_code}
        if isinstance(fault, httpx.DecodingError):
            return UnexpectedReply(f"the answer's content encoding is broken: {fault}", **answered)
        if isinstance(fault, httpx.TooManyRedirects):
            return UnexpectedReply(f"{_origin(fault)} redirects without end", **answered)
        what = str(fault) or type(fault).__name__
        return ConnectionFailed(f"the connection to {_origin(fault)} broke: {what}", sent=True)

    def _timed_out(self, fault: httpx.TimeoutException) -> AttentionError:
        doing = _WAITING.get(type(fault), "")
        if self.remaining() <= _CLOCKS_DIFFER:
            return self._late(doing)
        if isinstance(fault, httpx.ConnectTimeout | httpx.PoolTimeout):
            return ConnectionFailed(f"{_origin(fault)}: the httpx client's timeout has passed{doing}", sent=False)
        return DeadlineExceeded(f"{self.call.operation.name}: the httpx client's timeout has passed{doing}")


def _origin(fault: httpx.RequestError) -> str:
    url = fault.request.url
    return f"{url.scheme}://{url.netloc.decode()}"
