"""The service's errors: one class for each thing that can go wrong.

The same class is raised where the fault is found, rendered once as RFC 9457 problem+json, and raised again by the
client.

    AttentionError                    500
    ├── Unreadable                    400  the body is not JSON or not a safetensors file
    ├── Unauthorized                  401
    ├── Forbidden                     403
    ├── NotFound                      404  no such path
    │   ├── ModuleNotFound
    │   ├── ParameterNotFound
    │   ├── CheckpointNotFound
    │   ├── RecordingNotFound
    │   ├── PassNotFound
    │   └── SessionNotFound
    ├── MethodNotAllowed              405
    ├── NotAcceptable                 406
    ├── TooSlow                       408
    ├── Conflict                      409
    │   ├── ModuleExists
    │   ├── VersionMismatch
    │   └── LengthMismatch
    ├── SessionGone                   410
    ├── TooLarge                      413
    │   ├── BodyTooLarge                   bytes on the wire
    │   └── OverBudget                     bytes of memory
    ├── UnsupportedMediaType          415
    ├── Misdirected                   421  meant for another host
    ├── InvalidRequest                422  well-formed, but impossible
    │   ├── InvalidTensor
    │   ├── ShapeMismatch
    │   ├── KernelUnsuitable
    │   ├── TooLong
    │   └── InvalidCheckpoint
    ├── Overloaded                    429
    │   ├── TooManyConnections
    │   └── CallerLimit
    ├── HeadTooLarge                  431
    ├── Cancelled                     499
    ├── InternalError                 500
    ├── Unavailable                   503
    │   ├── Loading
    │   ├── Draining
    │   ├── ConnectionsExhausted
    │   ├── NoRoom                         for the reply
    │   ├── Stuck
    │   └── DeadlineExceeded
    ├── NeverFits                     507
    ├── StoreFull                     507
    └── StoreReadOnly                 507
"""

from collections.abc import Iterator
from typing import Any, ClassVar

PROBLEM_MEDIA_TYPE = "application/problem+json"
_MAX_DETAIL = 1000
_MAX_PARAM = 200
_MEMBERS = frozenset({"type", "title", "status", "detail", "code", "param", "request_id"})


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

    def __init__(
        self, detail: str, /, *, param: str | None = None, request_id: str | None = None, **facts: Any
    ) -> None:
        detail = detail if len(detail) <= _MAX_DETAIL else f"{detail[:_MAX_DETAIL]}…"
        super().__init__(detail)
        self.detail = detail
        self.param = param if param is None else param[:_MAX_PARAM]
        self.request_id = request_id
        self.facts = facts

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


class Unreadable(AttentionError):
    """The body cannot be parsed at all."""

    status = 400
    code = "unreadable"
    title = "The body cannot be read"


class Unauthorized(AttentionError):
    """No credentials came, or they are not known."""

    status = 401
    code = "unauthorized"
    title = "Credentials are missing or wrong"


class Forbidden(AttentionError):
    """The credentials do not allow this."""

    status = 403
    code = "forbidden"
    title = "Not allowed"


class NotFound(AttentionError):
    """There is nothing at this path."""

    status = 404
    code = "not_found"
    title = "Not found"


class ModuleNotFound(NotFound):
    """No module of this name is resident."""

    code = "module_not_found"
    title = "No such module"


class ParameterNotFound(NotFound):
    """The module has no parameter of this name."""

    code = "parameter_not_found"
    title = "No such parameter"


class CheckpointNotFound(NotFound):
    """The model repository holds no checkpoint at this path."""

    code = "checkpoint_not_found"
    title = "No such checkpoint"


class RecordingNotFound(NotFound):
    """The store holds no recording of this id."""

    code = "recording_not_found"
    title = "No such recording"


class PassNotFound(NotFound):
    """No pass with this id is kept: its backward pass ran already, its time is over, or its memory was needed."""

    code = "pass_not_found"
    title = "No such pass is kept"


class SessionNotFound(NotFound):
    """There never was a session with this id."""

    code = "session_not_found"
    title = "There is no session with this id"


class SessionGone(AttentionError):
    """The session is gone. ``reason``: expired, evicted, restarted or deleted."""

    status = 410
    code = "session_gone"
    title = "The session is gone"


class MethodNotAllowed(AttentionError):
    """The path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"
    title = "Method not allowed"


class NotAcceptable(AttentionError):
    """The service cannot write the reply in any accepted media type."""

    status = 406
    code = "not_acceptable"
    title = "No acceptable media type"


class TooSlow(AttentionError):
    """The head or the body of the request came too slowly."""

    status = 408
    code = "too_slow"
    title = "The request came too slowly"


class Conflict(AttentionError):
    """The request does not fit the present state."""

    status = 409
    code = "conflict"
    title = "Conflict with the present state"


class ModuleExists(Conflict):
    """A different module already has this name."""

    code = "module_exists"
    title = "The name is taken"


class VersionMismatch(Conflict):
    """The module is no longer at the pinned version."""

    code = "version_mismatch"
    title = "The module has another version"


class LengthMismatch(Conflict):
    """The session has another length than the caller believes; ``expected`` and ``actual`` are both."""

    code = "length_mismatch"
    title = "The session has another length"


class TooLarge(AttentionError):
    """More than the server takes."""

    status = 413
    code = "too_large"
    title = "Too large"


class BodyTooLarge(TooLarge):
    """The body has more bytes than the server reads."""

    code = "body_too_large"
    title = "The body is too large"


class OverBudget(TooLarge):
    """The estimated peak memory exceeds the server's budget."""

    code = "over_budget"
    title = "More memory than the budget allows"


class UnsupportedMediaType(AttentionError):
    """The body's media type is not one that the server reads."""

    status = 415
    code = "unsupported_media_type"
    title = "Unsupported media type"


class Misdirected(AttentionError):
    """The request names a host that this server is not."""

    status = 421
    code = "misdirected"
    title = "Not a name of this server"


class InvalidRequest(AttentionError):
    """The request is well-formed but cannot be carried out."""

    status = 422
    code = "invalid_request"
    title = "The request is not valid"


class InvalidTensor(InvalidRequest):
    """A tensor is ragged, truncated, of an unknown dtype or of one that its role does not allow."""

    code = "invalid_tensor"
    title = "A tensor is not valid"


class ShapeMismatch(InvalidRequest):
    """A tensor does not have the shape its role asks for."""

    code = "shape_mismatch"
    title = "A tensor has the wrong shape"


class KernelUnsuitable(InvalidRequest):
    """The requested kernel cannot compute this request."""

    code = "kernel_unsuitable"
    title = "The kernel cannot do this"


class TooLong(InvalidRequest):
    """The request would compute for longer than the server allows."""

    code = "too_long"
    title = "The request would take too long"


class InvalidCheckpoint(InvalidRequest):
    """The checkpoint exists but no attention layer can be read from it."""

    code = "invalid_checkpoint"
    title = "The checkpoint cannot be imported"


class Overloaded(AttentionError):
    """Too many requests wait already."""

    status = 429
    code = "overloaded"
    title = "Too many requests"
    retry_after = 1


class TooManyConnections(Overloaded):
    """One address has too many connections."""

    code = "too_many_connections"
    title = "Too many connections from one address"


class CallerLimit(Overloaded):
    """The caller has used as much as one caller may."""

    code = "caller_limit"
    title = "The caller's limit is reached"


class HeadTooLarge(AttentionError):
    """The head of the request has too many bytes or headers."""

    status = 431
    code = "head_too_large"
    title = "The head of the request is too large"


class Cancelled(AttentionError):
    """The caller went away before the answer was ready."""

    status = 499
    code = "cancelled"
    title = "Cancelled by the caller"


class InternalError(AttentionError):
    """A fault of the server."""

    status = 500
    code = "internal_error"
    title = "The server failed"


class Unavailable(AttentionError):
    """The server cannot answer now."""

    status = 503
    code = "unavailable"
    title = "Not available now"
    retry_after = 1


class Loading(Unavailable):
    """The modules of the store are not all resident yet."""

    code = "loading"
    title = "Still loading"


class Draining(Unavailable):
    """The server is stopping and takes no new work."""

    code = "draining"
    title = "Shutting down"
    retry_after = 5


class ConnectionsExhausted(Unavailable):
    """The server has as many connections as it takes."""

    code = "connections_exhausted"
    title = "The server has too many connections"


class NoRoom(Unavailable):
    """The memory budget has no room for the reply until others are sent."""

    code = "no_room"
    title = "No memory for the reply"


class Stuck(Unavailable):
    """The device, or a thread of the server, makes no progress."""

    code = "stuck"
    title = "The server is stuck"


class DeadlineExceeded(Unavailable):
    """The caller's deadline passed before the answer was ready.

    The server raises it for a request that waited too long, the client for a call that did not end in time. A client
    does not repeat it.
    """

    code = "deadline_exceeded"
    title = "The deadline has passed"


class NeverFits(AttentionError):
    """The request needs more memory than this device has."""

    status = 507
    code = "never_fits"
    title = "Does not fit this device"


class StoreFull(AttentionError):
    """The store, or its disk, has no room."""

    status = 507
    code = "store_full"
    title = "The store is full"


class StoreReadOnly(AttentionError):
    """The server may not write to its store."""

    status = 507
    code = "store_read_only"
    title = "The store is read-only"


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
