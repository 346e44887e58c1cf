"""File descriptors: as many as the system allows, a part of them kept from connections, and what one has queued."""

import fcntl
import resource
import socket
import struct
import termios
from contextlib import suppress
from typing import Final

MAX_CONNECTIONS: Final = 4096
"""Connections by default, where there are descriptors for them."""
BACKLOG: Final = 2048
"""Connections that wait to be accepted. All may be accepted before the first of them is counted."""
_OWN: Final = 128
"""Descriptors for files, listeners and threads."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard one. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a hard limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """The number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft


def reserve() -> int:
    """Descriptors that connections leave free."""
    return min(BACKLOG + _OWN, descriptor_limit() // 2)


def backlog() -> int:
    """Connections that may wait to be accepted, half of the reserve at most."""
    return min(BACKLOG, max(reserve() // 2, 16))


def most_connections(setting: int | None) -> int:
    """The limit of connections: the setting, or a default, but no more than there are descriptors."""
    return max(min(setting or MAX_CONNECTIONS, descriptor_limit() - reserve()), 1)


def unacknowledged(connection: socket.socket | None) -> int:
    """Bytes that the system keeps until the peer takes them (Linux's SIOCOUTQ); 0 where that is not known."""
    count = bytes(4)
    with suppress(OSError, ValueError):
        if connection is not None:
            count = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, count)
    return max(int(struct.unpack("i", count)[0]), 0)


def reset_at_close(connection: socket.socket | None) -> None:
    """Have the system discard what the peer has not taken when the connection is closed."""
    with suppress(OSError):
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
