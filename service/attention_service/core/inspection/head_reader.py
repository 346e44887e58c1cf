"""Heads or layers whose numbers are read in parts, so that a whole recording is never held."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor


class UnfitNumbers(ValueError):
    """Numbers that an analysis refuses: negative weights, NaN or infinity."""


class HeadReader(NamedTuple):
    """Heads or layers with the same rows."""

    read: Callable[[range, range], Tensor]
    """Reads rows of consecutive heads: from a range of heads and one of rows to ``[heads, rows, width]``, float64."""
    widths: tuple[int, ...]
    """Keys, or the width of the features, of each head or layer."""
    rows: int
    """Queries, or tokens."""


def row_tiles(rows: int, width: int, elements: int) -> Iterator[range]:
    """Yield ranges of rows with at most so many elements each, or of one row."""
    step = max(1, elements // max(width, 1))
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))
