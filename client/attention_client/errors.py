"""The errors that the client adds to those of the service.

    AttentionError             every error of the contract, and:
    ├── ConnectionFailed       the server cannot be reached, or the connection broke
    ├── ServerNotStarted       a server on this machine is not installed, or ended while it started
    └── UnexpectedReply        something answered, but not as the service does

The contract's ``DeadlineExceeded`` serves both sides: the server raises it for a request that waited too long, the
client for a call that did not end within its ``timeout``.
"""

from attention_contract.errors import AttentionError, DeadlineExceeded


class ConnectionFailed(AttentionError, status=0, title="No connection to the server"):
    """The server cannot be reached, or the connection broke before the answer was complete.

    The fact ``sent`` is False if the request cannot have reached the server.
    """


class ServerNotStarted(AttentionError, status=0, title="No server was started"):
    """A server on this machine is not installed, or ended while it started."""


class UnexpectedReply(AttentionError, status=0, title="The answer is not one of this service"):
    """The answer is neither a reply nor a problem document of this service, as when a proxy answers in its place.

    The fact ``answered`` is the HTTP status of the answer, if httpx knows it.
    """


__all__ = ["AttentionError", "ConnectionFailed", "DeadlineExceeded", "ServerNotStarted", "UnexpectedReply"]
