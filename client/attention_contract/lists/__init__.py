"""Nested lists of numbers from JSON text and to it, by compiled code.

orjson makes a Python number of each, and lists of them that are then walked; and takes twice as long to write an array.
The server has the code compiled when it starts (``load``). Where that isn't done, as by a client, which mostly reads
safetensors, everything is left to orjson; so is whatever could be read otherwise than orjson does, and every fault.
"""

import sys
from dataclasses import dataclass
from math import isfinite, prod
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Text = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Divided:
    """An object in JSON text without the lists of numbers that are its members."""

    rest: bytes
    """The text, with ``[0]`` in the place of the first list, ``[1]`` in that of the second. Lists of one integer are
    lists of numbers, so there is no other one like that."""
    arrays: list[NDArray[Any]]
    """int64 where all numbers are integers, else float64."""


class _Compiled:
    """The modules of compiled code, once they are loaded."""

    scanning: ModuleType | None = None
    printing: ModuleType | None = None


def load() -> None:
    """Compile the code, or load what was compiled before: some seconds, or a fraction of one.

    Raises ImportError where numba is not installed. On machines that store the highest byte first, nothing is done.
    """
    if sys.byteorder == "little":
        from attention_contract.lists import printing, scanning  # noqa: PLC0415

        _divide(memoryview(b'{"a": [1.5]}'), scanning)
        _write(np.ones(1, np.float32), printing)
        _Compiled.scanning, _Compiled.printing = scanning, printing


def divide(text: Text) -> Divided | None:
    """Take an object's lists of numbers out of its text; None where that isn't done. Nothing else of it is checked."""
    scanning = _Compiled.scanning
    return None if scanning is None or not len(text) else _divide(memoryview(text).toreadonly(), scanning)


def _divide(view: memoryview, scanning: ModuleType) -> Divided | None:
    numbers = np.empty(len(view) // 2 + 1)  # memory that is not written to is not taken
    lists = np.empty((scanning.MOST, scanning.ENTRIES), np.int64)
    later = np.empty((scanning.MOST, 3), np.int64)
    count = scanning.scan(np.frombuffer(view, np.uint8), numbers, lists, later)
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
    printing = _Compiled.printing
    if printing is None or array.dtype != np.float32 or not array.size or not array.ndim:
        return None
    return _write(np.ascontiguousarray(array), printing)


def _write(array: NDArray[Any], printing: ModuleType) -> memoryview | None:
    rows = array.size // array.shape[-1]
    text = np.empty(printing.MOST_CHARACTERS * array.size + rows * (2 * array.ndim + 1) + printing.SLACK, np.uint8)
    bits = array.reshape(-1).view(np.uint32)
    bits.flags.writeable = False
    size = printing.write(bits, np.array(array.shape, np.int64), text)
    return None if size < 0 else text[:size].data


__all__ = ["Divided", "Text", "divide", "load", "write"]
