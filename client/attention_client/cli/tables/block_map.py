"""A head's weights as a map of blocks: a row for each query, a block of two columns for each key."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from attention_client.cli.tables.table_output import print_out

MOST: Final = 48
"""The most keys that are drawn: a map of more does not fit a terminal."""
_SHADES: Final = " ░▒▓█"
_BOUNDS: Final = (0.05, 0.25, 0.5, 0.75)
"""Weights from which on each shade but the first stands."""
_FAINT: Final = np.array([120, 120, 170])
_STRONG: Final = np.array([70, 110, 255])
"""Colours of a weight of 0 and of 1, both legible on black and on white."""
_LONGEST: Final = 14
"""Characters of a token's name."""


def print_map(
    title: str, weights: NDArray[Any], queries: Sequence[str],
    rows: Sequence[int] | None = None, columns: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Print the map of one head, ``[queries, keys]``. One of more than ``MOST`` keys or queries is left out.

    ``rows`` and ``columns``: the numbers of the queries and of the keys, if they are not all.
    """
    if max(weights.shape) > MOST:
        return
    names = [name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in queries]
    width = max(map(len, names))
    print_out(title, "bold")
    drawn = Text(" " * (width + 4), "dim")
    drawn.append(" ".join(f"{key % 100:>2}" for key in columns or range(weights.shape[1])), "dim")
    for at, name, row in zip(rows or range(len(names)), names, weights, strict=True):
        drawn.append(f"\n{at % 100:>2} {name:<{width}} ", "dim")
        for weight in row:
            red, green, blue = (_FAINT + (_STRONG - _FAINT) * min(float(weight), 1.0)).astype(int)
            drawn.append(_SHADES[int(np.searchsorted(_BOUNDS, weight, "right"))] * 2, f"rgb({red},{green},{blue})")
            drawn.append(" ")
    print_out(drawn)
    print_out(
        "  ".join(f"{shade * 2} from {bound:g}" for shade, bound in zip(_SHADES[1:], _BOUNDS, strict=True)), "dim"
    )
