"""The server that a command asks: the one that is named, the one at the default address, or one in the background."""

import os
import socket
from http.client import HTTPConnection, HTTPException
from typing import Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from attention_client.environment import AUTOSTART_VARIABLE, DEFAULT_URL, URL_VARIABLE
from attention_client.errors import ConnectionFailed, ServerNotStarted

_CONNECT_S: Final = 0.8
"""Seconds that an address may take to accept a connection."""
_OFF: Final = frozenset({"0", "false", "no", "off"})


class ReachedServer(NamedTuple):
    """A server that a client can be made of."""

    url: str | None
    """None for the default address."""
    key: str | None = None
    """None for the key of the environment."""


def named(url: str) -> ReachedServer:
    """Return the server at an address. Raises ConnectionFailed if nothing accepts connections there."""
    parts = urlsplit(url)
    if parts.hostname and not getproxies() and not _accepts(parts.hostname, parts.port or _port(parts.scheme)):
        raise ConnectionFailed(
            f"nothing answers at {url}, which --url or {URL_VARIABLE} names; start a server there, as by "
            "`attention serve`, or give --retries to wait for one",
            sent=False,
        )
    return ReachedServer(url)


def unnamed() -> ReachedServer:
    """Return the server at the default address, or else the one in the background, which is started.

    Raises ConnectionFailed if it is not to be started, and ServerNotStarted.
    """
    if _is_served(DEFAULT_URL):
        return ReachedServer(None)
    from attention_client.servers import background_server  # noqa: PLC0415 - not if a server is there
    from attention_client.servers.server_command import lack  # noqa: PLC0415

    setting = os.environ.get(AUTOSTART_VARIABLE, "")
    if setting.strip().lower() in _OFF:
        server = background_server.running()
        if server is None:
            raise ConnectionFailed(
                f"nothing answers at {DEFAULT_URL}, and {AUTOSTART_VARIABLE}={setting} forbids to start a server: "
                "start one by `attention serve`, or name one by --url",
                sent=False,
            )
    elif (reason := lack()) is not None:
        raise ServerNotStarted(f"nothing answers at {DEFAULT_URL}, and {reason}; or name a server by --url")
    else:
        server = background_server.running_or_started()
    return ReachedServer(server.url, server.key)


def _port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _is_served(url: str) -> bool:
    """Return True unless something else than this service answers there, or nothing."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=_CONNECT_S)
    try:
        connection.request("GET", "/health/live")
        return b'"status"' in connection.getresponse().read(4096)
    except TimeoutError:  # it is busy
        return True
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
