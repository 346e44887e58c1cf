"""What can go wrong before or instead of an answer of the service.

::

    AttentionError             every error of the contract, and:
    ├── ConnectionFailed       the server cannot be reached, or the connection broke
    ├── DeadlineExceeded       the call's time ran out, over all of its attempts
    └── UnexpectedReply        something answered, but not as the service does
"""

from attention_contract.errors import AttentionError


class ConnectionFailed(AttentionError):
    """The server cannot be reached, or the connection broke before the answer was complete.

    The fact ``sent`` is False where the request cannot have reached the server.
    """

    status = 0
    code = "connection_failed"
    title = "No connection to the server"


class DeadlineExceeded(AttentionError):
    """The call did not end within its ``timeout``, waits between attempts included."""

    status = 0
    code = "deadline_exceeded"
    title = "The deadline has passed"


class UnexpectedReply(AttentionError):
    """The answer is neither a reply nor a problem document of this service, as when a proxy answers in its place.

    The fact ``answered`` is the HTTP status that came, where httpx tells it.
    """

    status = 0
    code = "unexpected_reply"
    title = "The answer is not one of this service"


__all__ = ["AttentionError", "ConnectionFailed", "DeadlineExceeded", "UnexpectedReply"]
