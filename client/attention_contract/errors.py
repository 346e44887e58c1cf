"""The service's errors: one class for each thing that can go wrong.

The same class is raised where the fault is found, rendered once as RFC 9457 problem+json, and raised again by the
client.
"""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Self

__all__ = [
    "AttentionError",
    "BodyTooLarge",
    "CallerLimit",
    "Cancelled",
    "CheckpointNotFound",
    "Conflict",
    "ConnectionsExhausted",
    "DeadlineExceeded",
    "Draining",
    "Forbidden",
    "HeadTooLarge",
    "InternalError",
    "InvalidCheckpoint",
    "InvalidRequest",
    "InvalidTensor",
    "KernelUnsuitable",
    "LengthMismatch",
    "LensNotFound",
    "Loading",
    "MethodNotAllowed",
    "Misdirected",
    "ModelEnded",
    "ModelExists",
    "ModelNotFound",
    "ModuleExists",
    "ModuleNotFound",
    "NeverFits",
    "NoRoom",
    "NotAcceptable",
    "NotFinite",
    "NotFound",
    "OverBudget",
    "Overloaded",
    "ParameterNotFound",
    "PassNotFound",
    "ProbeNotFound",
    "RecordingNotFound",
    "SessionGone",
    "SessionNotFound",
    "ShapeMismatch",
    "StoreFull",
    "StoreReadOnly",
    "Stuck",
    "TooLarge",
    "TooLong",
    "TooManyConnections",
    "TooSlow",
    "Unauthorized",
    "Unavailable",
    "Unreadable",
    "UnsupportedMediaType",
    "VectorNotFound",
    "VersionMismatch",
]  # fmt: skip
PROBLEM_MEDIA_TYPE = "application/problem+json"
_MAX_DETAIL = 1000
_MAX_PARAM = 200
_MEMBERS = frozenset({"type", "title", "status", "detail", "code", "param", "request_id", "error"})


class AttentionError(Exception):
    """Error reply of the service.

    ``detail`` says what was expected, what came and what to do; ``param`` names the request field at fault, dotted when
    nested; ``facts`` are the numbers behind the sentence, and become fields of the problem document.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"
    title: ClassVar[str] = "The request could not be answered"
    retry_after: int | None = None
    """Seconds after which the same request may succeed; None where it never will."""

    def __init_subclass__(
        cls, *, title: str | None = None, status: int | None = None, retry_after: int | None = None
    ) -> None:
        """Note what is particular to a class; the code is its name in lower case. All else is that of its base."""
        if title is not None:
            cls.title, cls.code = title, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        if status is not None:
            cls.status = status
        if retry_after is not None:
            cls.retry_after = retry_after

    def __init__(
        self, detail: str, /, *, param: str | None = None, request_id: str | None = None, **facts: Any
    ) -> None:
        detail = detail if len(detail) <= _MAX_DETAIL else f"{detail[: _MAX_DETAIL - 1]}…"
        super().__init__(detail)
        self.detail = detail
        self.param = param if param is None else param[:_MAX_PARAM]
        self.request_id = request_id
        self.facts = facts

    @classmethod
    def at(cls, param: str, detail: str, /, **facts: Any) -> Self:
        """Return the error of one request field, with whose name its sentence begins."""
        return cls(f"{param}: {detail}", param=param, **facts)

    def to_problem(self) -> dict[str, Any]:
        """The problem document of RFC 9457, section 3."""
        problem: dict[str, Any] = {
            "type": f"urn:attention-service:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.param is not None:
            problem["param"] = self.param
        if self.request_id is not None:
            problem["request_id"] = self.request_id
        return problem | {name: value for name, value in self.facts.items() if name not in _MEMBERS}


class Unreadable(AttentionError, status=400, title="The body cannot be read"):
    """The body cannot be parsed at all."""


class Unauthorized(AttentionError, status=401, title="Credentials are missing or wrong"):
    """The credentials are missing or unknown."""


class Forbidden(AttentionError, status=403, title="Not allowed"):
    """The credentials do not allow this."""


class NotFound(AttentionError, status=404, title="Not found"):
    """Nothing exists at this path."""


class ModuleNotFound(NotFound, title="No such module"):
    """No module of this name is resident."""


class ModelNotFound(NotFound, title="No such model"):
    """Neither a whole model nor a checkpoint has this name."""


class ParameterNotFound(NotFound, title="No such parameter"):
    """The module has no parameter of this name."""


class CheckpointNotFound(NotFound, title="No such checkpoint"):
    """The model repository holds no checkpoint at this path."""


class RecordingNotFound(NotFound, title="No such recording"):
    """The store holds no recording of this id."""


class LensNotFound(NotFound, title="No such lens"):
    """The store holds no lens of this id."""


class ProbeNotFound(NotFound, title="No such probe"):
    """The store holds no probe of this id."""


class VectorNotFound(NotFound, title="No such vector"):
    """The store holds no steering vector of this id."""


class PassNotFound(NotFound, title="No such pass is kept"):
    """No pass with this id is kept: it was used, it is too old, or its memory was needed."""


class SessionNotFound(NotFound, title="There is no session with this id"):
    """No session ever had this id."""


class SessionGone(AttentionError, status=410, title="The session is gone"):
    """The session ended. ``reason``: expired, evicted, restarted, deleted, or elsewhere_or_gone with replicas."""


class MethodNotAllowed(AttentionError, status=405, title="Method not allowed"):
    """The path exists, but not for this method."""


class NotAcceptable(AttentionError, status=406, title="No acceptable media type"):
    """The service cannot write the reply in any accepted media type."""


class TooSlow(AttentionError, status=408, title="The request came too slowly"):
    """The head or the body of the request arrived too slowly."""


class Conflict(AttentionError, status=409, title="Conflict with the present state"):
    """The request does not fit the present state."""


class ModuleExists(Conflict, title="The name is taken"):
    """A different module already has this name."""


class ModelExists(Conflict, title="The name is taken"):
    """A model of another checkpoint, or of another dtype, already has this name."""


class VersionMismatch(Conflict, title="The module has another version"):
    """The module is no longer at the pinned version."""


class LengthMismatch(Conflict, title="The session has another length"):
    """The session has another length than the caller expects; the facts are ``expected`` and ``actual``."""


class TooLarge(AttentionError, status=413, title="Too large"):
    """The request is larger than the server accepts."""


class BodyTooLarge(TooLarge, title="The body is too large"):
    """The body has more bytes than the server reads."""


class OverBudget(TooLarge, title="More memory than the budget allows"):
    """The estimated peak memory exceeds the server's budget."""


class UnsupportedMediaType(AttentionError, status=415, title="Unsupported media type"):
    """The body's media type is not one that the server reads."""


class Misdirected(AttentionError, status=421, title="Not a name of this server"):
    """The request names a host that is not a name of this server."""


class InvalidRequest(AttentionError, status=422, title="The request is not valid"):
    """The request is well-formed but cannot be carried out."""


class InvalidTensor(InvalidRequest, title="A tensor is not valid"):
    """A tensor is ragged, truncated, of an unknown dtype or of one that its role does not allow."""


class ShapeMismatch(InvalidRequest, title="A tensor has the wrong shape"):
    """A tensor does not have the shape its role asks for."""


class KernelUnsuitable(InvalidRequest, title="The kernel cannot do this"):
    """The requested kernel cannot compute this request."""


class TooLong(InvalidRequest, title="The request would take too long"):
    """The request would compute for longer than the server allows."""


class NotFinite(InvalidRequest, title="The model's numbers are not finite"):
    """The numbers of a pass overflow in the dtype of the model, or are NaN, though all that was given is finite."""


class InvalidCheckpoint(InvalidRequest, title="The checkpoint cannot be imported"):
    """The checkpoint exists but no attention layer can be read from it."""


class Overloaded(AttentionError, status=429, title="Too many requests", retry_after=1):
    """Too many requests are already waiting."""


class TooManyConnections(Overloaded, title="Too many connections from one address"):
    """One address has too many connections."""


class CallerLimit(Overloaded, title="The caller's limit is reached"):
    """The caller has reached one of its limits."""


class HeadTooLarge(AttentionError, status=431, title="The head of the request is too large"):
    """The head of the request has too many bytes or headers."""


class Cancelled(AttentionError, status=499, title="Cancelled by the caller"):
    """The caller disconnected before the reply was ready."""


class InternalError(AttentionError, status=500, title="The server failed"):
    """A fault of the server."""


class Unavailable(AttentionError, status=503, title="Not available now", retry_after=1):
    """The server cannot answer now."""


class Loading(Unavailable, title="Still loading"):
    """The modules of the store are not all resident yet."""


class Draining(Unavailable, title="Shutting down", retry_after=5):
    """The server is stopping and takes no new work."""


class ConnectionsExhausted(Unavailable, title="The server has too many connections"):
    """The server has reached its limit of connections."""


class NoRoom(Unavailable, title="No memory for the reply"):
    """The memory budget has no room for the reply until other replies are sent."""


class Stuck(Unavailable, title="The server is stuck"):
    """The device, or a thread of the server, makes no progress."""


class ModelEnded(Unavailable, title="The model's process ended"):
    """The process of the model ended while it computed the reply. The same request starts it again."""


class DeadlineExceeded(Unavailable, title="The deadline has passed"):
    """The caller's deadline passed before the reply was ready.

    The server raises it for a request that waited too long, the client for a call that did not end in time. A client
    does not repeat it.
    """


class NeverFits(AttentionError, status=507, title="Does not fit this device"):
    """The request needs more memory than this device has."""


class StoreFull(AttentionError, status=507, title="The store is full"):
    """The store has reached its limit, or the disk is full."""


class StoreReadOnly(AttentionError, status=507, title="The store is read-only"):
    """The server may not write to its store."""


def _tree(root: type[AttentionError]) -> Iterator[type[AttentionError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def error_classes() -> dict[str, type[AttentionError]]:
    """Every error class of the contract by its ``code``; not what others derive from them."""
    return {error.code: error for error in _tree(AttentionError) if error.__module__ == __name__}


def from_problem(status: int, problem: dict[str, Any]) -> AttentionError:
    """The error that a problem document describes; an unknown code gives the class of its status."""
    classes = error_classes()
    known = classes.get(str(problem.get("code")))
    if known is None:
        by_status = (error for error in classes.values() if error.status == status)
        known = next(by_status, InternalError if status >= 500 else AttentionError)
    return known(
        str(problem.get("detail") or problem.get("title") or f"the server answered {status}"),
        param=problem.get("param"),
        request_id=problem.get("request_id"),
        **{name: value for name, value in problem.items() if name not in _MEMBERS},
    )
