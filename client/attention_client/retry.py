"""The policy of calls, and the attempts of one: its end, the failures that are repeated, and the waits in between."""

import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

import httpx

from attention_client.calls import CallOptions, MediaType
from attention_client.errors import ConnectionFailed, DeadlineExceeded, UnexpectedReply
from attention_contract.errors import AttentionError, InvalidRequest, Overloaded, Unavailable
from attention_contract.operations import Operation

WAIT_INITIAL: Final = 0.1
WAIT_JITTER: Final = 0.4
WAIT_MAX: Final = 4.0
"""Seconds before repeat n: 0.1·2ⁿ, at most WAIT_MAX, or what ``Retry-After`` asks for; plus up to WAIT_JITTER."""
PATIENCE: Final = 40.0
"""Seconds that the waits of one call may add up to, unless ``retries`` states a number of attempts."""
MAX_BREAKS: Final = 3
"""Repeats after connections that broke under the request: the request itself may be what breaks them."""
_LOST_BEHIND_A_PROXY: Final = (500, 502)
"""Statuses by which a proxy says that its server was lost. The service's own 500 is a problem document."""
_CLOCKS_DIFFER: Final = 0.05
"""Seconds by which a transport's timer may be ahead of the deadline that it was set for."""
_LONGEST: Final = 2**31 // 1000 - 1
"""Seconds, about 24 days: a socket counts its timeout in milliseconds of 32 bits."""
_WAITING: Final[dict[type[httpx.TimeoutException], str]] = {
    httpx.ConnectTimeout: " while connecting",
    httpx.WriteTimeout: " while sending the request",
    httpx.ReadTimeout: " while waiting for the reply",
    httpx.PoolTimeout: " while waiting for a free connection",
}
_log = logging.getLogger("attention_client")
_log.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class CallPolicy:
    """The deadline of each call, its repeats, its headers beside the connection's, and how tensors travel."""

    timeout: float | None
    retries: int | None
    media_type: MediaType
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def changed(self, options: CallOptions) -> "CallPolicy":
        """Return the settings with these in place of the same ones; headers are added."""
        if not options:
            return self
        if unknown := options.keys() - CallOptions.__annotations__.keys():
            known = ", ".join(CallOptions.__annotations__)
            raise TypeError(f"unexpected {', '.join(sorted(unknown))}; the options of a call are {known}")
        given = {**options, "headers": {**self.headers, **(options.get("headers") or {})}}
        return replace(self, **given)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.timeout is not None and not 0 < self.timeout <= _LONGEST:
            raise ValueError(
                f"timeout: expected seconds above 0 and up to {_LONGEST}, or None for no limit; got {self.timeout}"
            )
        if self.retries is not None and self.retries < 0:
            raise ValueError(f"retries: expected 0 or more, or None, got {self.retries}")
        if self.media_type not in get_args(MediaType):
            raise ValueError(f"media_type: expected one of {', '.join(get_args(MediaType))}; got {self.media_type!r}")


class Attempts:
    """One call from its first attempt to its reply. Shared by both clients, which do the waiting."""

    def __init__(self, operation: Operation[Any], timeout: float | None, retries: int | None) -> None:
        self._operation = operation
        self._timeout = timeout
        self._retries = retries
        self._ends = math.inf if timeout is None else time.monotonic() + timeout
        self._failures = 0
        self._breaks = 0
        self._waited = 0.0
        self._last: AttentionError | None = None
        self._began = time.monotonic()

    # ── repeating ────────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_after(self, fault: AttentionError | httpx.RequestError, response: httpx.Response | None = None) -> float:
        """Return the seconds to wait before the next attempt. Raise the fault if there is to be none."""
        if isinstance(fault, httpx.RequestError):
            error = self.error(fault, response)
            error.__cause__ = fault
            fault = error
        seconds = self._pause(fault)
        self._failures += 1
        self._waited += seconds
        spent = self._waited > PATIENCE if self._retries is None else self._failures > self._retries
        if spent or seconds >= self.remaining() or not self._is_transient(fault):
            raise fault
        self._last = fault
        _log.warning("%s: %s; trying again in %.1f s", self._operation.name, fault.detail, seconds)
        return seconds

    def _pause(self, fault: AttentionError) -> float:
        wait = fault.facts.get("retry_after")
        if not isinstance(wait, int | float):  # a problem document may say anything
            wait = min(WAIT_INITIAL * 2.0 ** min(self._failures, 16), WAIT_MAX, self.remaining() / 2)
        jitter = min(WAIT_JITTER, self.remaining() / 4)
        return max(wait, 0.0) + random.uniform(0, max(jitter, 0.0))  # noqa: S311 - spreads load

    def _is_transient(self, fault: AttentionError) -> bool:
        if isinstance(fault, ConnectionFailed):
            if not fault.facts["sent"]:
                return "CERTIFICATE_VERIFY_FAILED" not in fault.detail
            return self._is_repeated_after_break()
        if isinstance(fault, UnexpectedReply) and fault.facts.get("answered") in _LOST_BEHIND_A_PROXY:
            return self._is_repeated_after_break()
        if self._operation.path.startswith("/health/"):  # asks how the server is right now
            return False
        return isinstance(fault, Overloaded | Unavailable) and not isinstance(fault, DeadlineExceeded)

    def _is_repeated_after_break(self) -> bool:
        self._breaks += 1
        return self._operation.safe_to_repeat and self._breaks <= MAX_BREAKS

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def remaining(self) -> float:
        """Return the seconds until the deadline."""
        return self._ends - time.monotonic()

    def timeouts(self, own: httpx.Timeout) -> dict[str, float | None]:
        """Return the timeouts of one attempt: those of the httpx client, but none beyond the deadline."""
        self.check()
        left = None if self._timeout is None else max(self.remaining(), 0.0)
        return {
            step: allowed if left is None else left if allowed is None else min(allowed, left)
            for step, allowed in own.as_dict().items()
        }

    def preference(self) -> dict[str, str]:
        """Return the header that tells the server how long the caller still waits (RFC 7240)."""
        return {} if self._timeout is None else {"Prefer": f"wait={max(self.remaining(), 0.0):.3f}"}

    def answered(self, method: str, url: str, response: httpx.Response) -> None:
        """Log an answer, on the level debug: method, path, status, milliseconds, request id, attempts."""
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s %s %d %.1f ms request_id=%s attempts=%d",
                method, url, response.status_code, (time.monotonic() - self._began) * 1e3,
                response.headers.get("x-request-id"), self._failures + 1,
            )  # fmt: skip

    def check(self) -> None:
        """Raise DeadlineExceeded if the deadline has passed."""
        if self.remaining() <= 0:
            raise self._late() from self._last

    def _late(self, doing: str = "") -> DeadlineExceeded:
        before = f"; the attempt before failed: {self._last.detail}" if self._last else ""
        return DeadlineExceeded(
            f"{self._asked} did not end within {self._timeout} s{doing}{before}{self._load}", timeout=self._timeout
        )

    @property
    def _asked(self) -> str:
        """The request, as the documentation names it."""
        return f"{self._operation.method} {self._operation.path}"

    @property
    def _load(self) -> str:
        """A hint for a request that a model may have been loaded for."""
        if not self._operation.path.startswith("/v1/models/{model}/"):
            return ""
        return "; a model that is not resident is loaded first: GET /v1/models/{model} tells its state and progress"

    # ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def error(self, fault: httpx.RequestError, response: httpx.Response | None) -> AttentionError:
        """Return the client's error for one of httpx, raised before or after the head of a response came."""
        origin = f"{fault.request.url.scheme}://{fault.request.url.netloc.decode()}"
        if isinstance(fault, httpx.TimeoutException):
            return self._timed_out(fault, origin)
        if isinstance(fault, httpx.ConnectError | httpx.ProxyError):
            return ConnectionFailed(f"cannot connect to {origin}: {fault}", sent=False)
        if isinstance(fault, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
            return InvalidRequest(f"{self._asked} cannot be sent: {fault}")
        answered: dict[str, Any] = {} if response is None else {"answered": response.status_code}
        if isinstance(fault, httpx.DecodingError):
            return UnexpectedReply(f"the answer's content encoding is broken: {fault}", **answered)
        if isinstance(fault, httpx.TooManyRedirects):
            return UnexpectedReply(f"{origin} redirects without end", **answered)
        what = str(fault) or type(fault).__name__
        return ConnectionFailed(f"the connection to {origin} broke: {what}", sent=True)

    def _timed_out(self, fault: httpx.TimeoutException, origin: str) -> AttentionError:
        doing = _WAITING.get(type(fault), "")
        if self.remaining() <= _CLOCKS_DIFFER:
            return self._late(doing)
        if isinstance(fault, httpx.ConnectTimeout | httpx.PoolTimeout):
            return ConnectionFailed(f"{origin}: the httpx client's timeout has passed{doing}", sent=False)
        return DeadlineExceeded(f"{self._asked}: the httpx client's timeout has passed{doing}{self._load}")
