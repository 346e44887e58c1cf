"""Nested lists of numbers from JSON text and to it, by compiled code.

orjson makes a Python number of each, and lists of them that are then walked; and takes twice as long to write an array.
The server has the code compiled when it starts (``load``). Where that isn't done, as by a client, which mostly reads
safetensors, everything is left to orjson; so is whatever could be read otherwise than orjson does, and every fault.
"""

import sys
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attention_contract.lists.layout import (
    AT_ONCE,
    ENTRIES,
    LATER_ENTRIES,
    MOST,
    MOST_CHARACTERS,
    SLACK,
    SPARE,
    STATE,
    WINDOW,
)
from attention_contract.tensors import MAX_RANK

if TYPE_CHECKING:
    from attention_contract.lists.linking import Linked

Text = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Divided:
    """An object in JSON text without the lists of numbers that are its members."""

    rest: bytes
    """The text, with ``[0]`` in the place of the first list, ``[1]`` in that of the second. Lists of one integer are
    lists of numbers, so there is no other one like that."""
    arrays: list[NDArray[Any]]
    """int64 where all numbers are integers, else float64."""


class _Code:
    """What is compiled, once it is loaded."""

    linked: "Linked | None" = None


def load() -> None:
    """Get at the compiled code: no time to speak of, but ten seconds where it isn't kept from an earlier time.

    Raises ImportError where what compiles is not installed, OSError, RuntimeError or subprocess.SubprocessError where
    that could not be done. Where a byte's place in a word is another one, or a word is shorter, nothing is done.
    """
    if _Code.linked is None and sys.byteorder == "little" and sys.maxsize > 2**32:
        from attention_contract.lists.linking import link  # noqa: PLC0415

        _Code.linked = link()


def give_up() -> None:
    """Stop what compiles, if anything does: ``load``, on its thread, then raises subprocess.SubprocessError."""
    if linking := sys.modules.get("attention_contract.lists.linking"):
        linking.give_up()


def divide(text: Text) -> Divided | None:
    """Take an object's lists of numbers out of its text; None where that isn't done. Nothing else of it is checked."""
    linked = _Code.linked
    if linked is None or not len(text):
        return None
    view = memoryview(text).toreadonly()
    numbers = np.empty(len(view) // 2 + 1)  # memory that is not written to is not taken
    lists = np.empty((MOST, ENTRIES), np.int64)
    later = np.empty((MOST, LATER_ENTRIES), np.int64)
    address = linked.address
    room = address(np.empty(STATE + MAX_RANK + WINDOW + SPARE, np.int64))
    counts = room + STATE * numbers.itemsize
    found = counts + MAX_RANK * numbers.itemsize
    count = linked.scan(address(view), len(view), address(numbers), address(lists), address(later), room, counts, found)
    if count < 0 or not _read_later(view, later, numbers):
        return None
    pieces: list[bytes | memoryview] = []
    arrays = []
    end = 0
    for index, (start, after, first, integral, rank, *sizes) in enumerate(lists[:count].tolist()):
        pieces += view[end:start], b"[%d]" % index
        array = numbers[first : first + prod(sizes[:rank])].reshape(sizes[:rank])
        arrays.append(array.astype(np.int64) if integral else array)
        end = after
    return Divided(b"".join([*pieces, view[end:]]), arrays)


def _read_later(text: memoryview, later: NDArray[np.int64], numbers: NDArray[np.float64]) -> bool:
    """Read what was left to Python; whether that could be done."""
    for start, end, place in later.tolist() if later[0, 0] else ():
        if start == 0:
            break
        number = bytes(text[start:end]).lower()
        value = float(number)
        if not isfinite(value) or not (b"." in number or b"e" in number):  # an integer that doesn't fit
            return False
        numbers[place] = value
    return True


def write(array: NDArray[Any]) -> memoryview | None:
    """A float32 array as nested lists; None where that is left to orjson."""
    linked = _Code.linked
    if linked is None or array.dtype != np.float32 or not array.size or not array.ndim:
        return None
    array = np.ascontiguousarray(array)
    rows = array.size // array.shape[-1]
    text = np.empty(MOST_CHARACTERS * array.size + rows * (2 * array.ndim + 1) + SLACK, np.uint8)
    sizes = np.array(array.shape, np.int64)
    address = linked.address
    room = map(address, np.empty((4, AT_ONCE), np.int64))
    size = linked.write(address(array), array.size, address(sizes), sizes.size, *room, address(text), text.size)
    return None if size < 0 else text[:size].data


__all__ = ["Divided", "Text", "divide", "give_up", "load", "write"]
