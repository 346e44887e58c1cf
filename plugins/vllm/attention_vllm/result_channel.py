"""The way of results out of a worker: a list in its process, or a Unix socket. Nothing is ever unpickled.

A message is a head in JSON, in which ``{"$array": [dtype, shape]}`` stands for an array, and behind it the bytes of
these arrays in their order.
"""

import json
import logging
import os
import socket
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

SOCKETS: Final = "ATTENTION_VLLM_SOCKETS"
"""The variable that names the folder of sockets."""
_LENGTHS: Final = struct.Struct("<IQ")
_MOST_WAITING: Final = 65_536
"""Results of one request that wait in a process for somebody who takes them."""
_log = logging.getLogger(__name__)
Message = dict[str, Any]
"""An object with the ``id`` of an ask, and ``refused``, a problem document, or fields of a token."""


class ResultChannel:
    """The results of one process."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Message]] = defaultdict(list)
        self._sockets: dict[str, socket.socket] = {}

    def put(self, message: Message, reply_to: str | None) -> None:
        """Hand on a message: to the socket of this name, or keep it for ``take``."""
        if reply_to is not None:
            self._send(packed(message), reply_to)
            return
        waiting = self._waiting[message["id"]]
        if len(waiting) < _MOST_WAITING:
            waiting.append(message)
        elif len(waiting) == _MOST_WAITING:
            waiting.append({"id": message["id"], "refused": {"detail": f"{_MOST_WAITING} results were not taken"}})

    def take(self, name: str) -> list[Message]:
        """Return the results of an ask since the last call."""
        return self._waiting.pop(name, [])

    def close(self) -> None:
        """Close the sockets."""
        while self._sockets:
            self._sockets.popitem()[1].close()

    def _send(self, message: bytes, reply_to: str) -> None:
        try:
            if reply_to not in self._sockets:
                self._sockets[reply_to] = _connected(reply_to)
            self._sockets[reply_to].sendall(message)
        except OSError as fault:  # who asked has gone; the door tells of a missing answer itself
            if (own := self._sockets.pop(reply_to, None)) is not None:
                own.close()
            _log.warning("a result of attention could not be sent: %s", fault)


def _connected(reply_to: str) -> socket.socket:
    folder = os.environ.get(SOCKETS)
    if folder is None:
        raise OSError(f"{SOCKETS} names no folder")
    own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    own.settimeout(10)
    try:
        own.connect(str(Path(folder) / reply_to))
    except OSError:
        own.close()
        raise
    return own


def packed(message: Message) -> bytes:
    """Return the bytes of a message."""
    arrays: list[bytes] = []

    def marked(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(np.ascontiguousarray(value).tobytes())
            return {"$array": [value.dtype.str, value.shape]}
        if isinstance(value, dict):
            return {key: marked(member) for key, member in value.items()}
        return [marked(member) for member in value] if isinstance(value, list) else value

    head = json.dumps(marked(message)).encode()
    return b"".join([_LENGTHS.pack(len(head), sum(map(len, arrays))), head, *arrays])


def unpacked(head: bytes, body: bytes) -> Message:
    """Return the message of these bytes. Raises ValueError for others."""
    at = 0

    def read(value: Any) -> Any:
        nonlocal at
        if isinstance(value, list):
            return [read(member) for member in value]
        if not isinstance(value, dict):
            return value
        if value.keys() != {"$array"}:
            return {key: read(member) for key, member in value.items()}
        kind, sizes = value["$array"]
        dtype = np.dtype(kind)
        if dtype.hasobject:
            raise ValueError("an array of objects")
        array = np.frombuffer(body, dtype, int(np.prod(sizes, dtype=int)), at).reshape(sizes)
        at += array.nbytes
        return array

    message: Message = read(json.loads(head))
    return message


def lengths_of(prefix: bytes) -> tuple[int, int]:
    """Return the lengths of head and body that the first bytes of a message say."""
    head, body = _LENGTHS.unpack(prefix)
    return head, body


PREFIX: Final = _LENGTHS.size
"""The number of these bytes."""


def read_message(source: BinaryIO) -> Message | None:
    """Read a message from a file; None at its end."""
    if len(prefix := source.read(PREFIX)) < PREFIX:
        return None
    head, body = lengths_of(prefix)
    return unpacked(source.read(head), source.read(body))
