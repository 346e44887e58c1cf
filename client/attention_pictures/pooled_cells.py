"""Matrices beyond what a screen resolves, pooled to fewer cells."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_CELLS: Final = 512
"""Cells a side of a heat map."""
_FEWEST_CELLS: Final = 16

Numbers = NDArray[np.floating]


def pool(values: Numbers, most: tuple[int, int], *, signed: bool = False) -> tuple[Numbers, tuple[int, int]]:
    """Pool ``[…, rows, columns]`` by maximum to at most so many cells, and return the rows and columns of a cell.

    ``signed`` pools by largest magnitude and keeps the sign. NaN is left out where a cell has other values.
    """
    factors = []
    for axis, limit in zip((-2, -1), most, strict=True):
        factor = -(-values.shape[axis] // max(limit, 1))
        factors.append(max(factor, 1))
        if factor > 1:
            starts = np.arange(0, values.shape[axis], factor)
            highest = np.fmax.reduceat(values, starts, axis=axis)
            if signed:
                lowest = np.fmin.reduceat(values, starts, axis=axis)
                highest = np.where(-lowest > highest, lowest, highest)
            values = highest
    return values, (factors[0], factors[1])


def cells_in(inches: float, dpi: int) -> int:
    """The cells that so many inches resolve."""
    return max(_FEWEST_CELLS, min(MOST_CELLS, int(inches * dpi)))


def pooling_note(
    factors: tuple[int, int], axes_names: tuple[str, str] = ("query", "key"), *, signed: bool = False
) -> list[str]:
    """The sentence that states the pooling; none if there is none."""
    if factors == (1, 1):
        return []
    sides = [f"{count} {name if count == 1 else plural(name)}" for count, name in zip(factors, axes_names, strict=True)]
    way = "largest magnitude" if signed else "maximum"
    return [f"pooled by {way}: a cell is {' × '.join(sides)}"]


def plural(name: str) -> str:
    """The plural of the name of an axis."""
    return {"query": "queries"}.get(name, f"{name}s")
