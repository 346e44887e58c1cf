"""Messages between the server and the process of a model, over two pipes.

A message is the lengths of its head and its body, the head as JSON, and the body: bytes of the contract. Nothing is
ever unpickled. Messages about a request carry its number, ``request``; any number of requests may be under way.

To the process go ``warm`` if it is to wait for its model, ``load``, ``ask``, which names the form of the reply, ``go``
once a request is admitted, with the facts of the reply that the server knows, and ``cancel``. From it come
``started``, ``progress``, ``loaded``; ``need``, which may come twice, ``event``, ``recording``, ``last``, ``reply`` or
``problem``, and ``done`` after the last word on a request; and ``pass`` before a pass that takes long. ``started``
tells which memory it takes without a model, ``loaded`` and ``done`` which memory of a GPU it holds.
"""

import struct
from collections.abc import Sequence
from io import RawIOBase
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

SPREAD: Final = "--spread"
"""The argument, before the number of devices, of a process that has the first part of a model and starts the others."""
_LENGTHS: Final = struct.Struct("<IQ")
_PART: Final = 2**20
"""Bytes that are read at once: what a pipe may hold."""
Piece = bytes | bytearray | memoryview


class WorkerMessage(NamedTuple):
    """One message."""

    kind: str
    facts: dict[str, Any]
    body: memoryview


def pieces_of(kind: str, facts: dict[str, Any] | None = None, body: Sequence[Piece] = ()) -> list[Piece]:
    """Return a message as pieces to be written one after another; the body's own memory is among them."""
    head = orjson.dumps([kind, facts or {}])
    return [_LENGTHS.pack(len(head), sum(map(len, body))) + head, *body]


def read_message(source: RawIOBase) -> WorkerMessage | None:
    """Wait for a message; None at the end of the pipe, also in the middle of a message."""
    if (lengths := _read(source, _LENGTHS.size)) is None:
        return None
    head_size, body_size = _LENGTHS.unpack(lengths)
    if (head := _read(source, head_size)) is None or (body := _read(source, body_size)) is None:
        return None
    kind, facts = orjson.loads(head)
    return WorkerMessage(kind, facts, body)


def _read(source: RawIOBase, size: int) -> memoryview | None:
    view = np.empty(size, np.uint8).data  # unlike a bytearray not cleared first
    filled = 0
    while filled < size:
        count = source.readinto(view[filled : filled + _PART])
        if not count:
            return None
        filled += count
    return view
