"""WebSocket connections to a server, as both clients of websockets open them."""

import logging
import ssl
from contextlib import suppress
from typing import Any, Final

from websockets.exceptions import InvalidStatus

from attention_client.connection_settings import StreamSettings
from attention_client.errors import ConnectionFailed, UnexpectedReply
from attention_client.trace_context import trace_headers
from attention_contract.errors import AttentionError, Unreadable, from_problem
from attention_contract.json_reading import from_json

CLOSE_TIMEOUT_S: Final = 1.0
"""Seconds that the end of a connection waits for the server's agreement."""
_WIRE: Final = logging.getLogger("attention_client.wire")
_WIRE.setLevel(logging.INFO)
"""The logger of websockets. At debug, it writes every header of a handshake, the API key among them."""


def connection_arguments(settings: StreamSettings, path: str, context: ssl.SSLContext | None) -> dict[str, Any]:
    """Return the arguments of ``connect`` of websockets, equal in both of its clients."""
    return {
        "uri": settings.url + path,
        "additional_headers": {name: value for name, value in settings.headers.items() if name != "user-agent"}
        | trace_headers(),
        "user_agent_header": settings.headers.get("user-agent"),
        "compression": None,
        "logger": _WIRE,
        "max_size": None,
        "open_timeout": settings.policy.timeout,
        "close_timeout": CLOSE_TIMEOUT_S,
    } | ({} if context is None else {"ssl": context})


def refused(fault: Exception, settings: StreamSettings) -> AttentionError:
    """Return the error of a connection that was not opened."""
    if not isinstance(fault, InvalidStatus):
        return ConnectionFailed(f"cannot connect to {settings.url}: {fault}", sent=False)
    response = fault.response
    with suppress(Unreadable):
        return from_problem(response.status_code, from_json(response.body or b""))
    return UnexpectedReply(f"{settings.url} answered {response.status_code} to a WebSocket's handshake")
