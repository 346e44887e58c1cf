"""Statistics of heads as tables of rows × heads, for figures and notebooks."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from attention_contract.schemas.weights import BY_KEY, NEEDS_PAIRS, HeadStatistics
from attention_pictures.pooled_cells import Numbers

_UNITS: Final = {"entropy": "nats", "mean_distance": "tokens", "signed_distance": "tokens"}
"""Units of statistics that are no shares."""


def named(statistics: HeadStatistics) -> dict[str, Numbers]:
    """The statistics that are there by name, ``[H]`` or ``[B, H]``; those of classes by the class.

    Of one with a number for each key, the number of largest magnitude.
    """
    by_name: dict[str, Numbers] = {}
    for name in HeadStatistics.model_fields:
        values = getattr(statistics, name)
        if name in BY_KEY and values is not None:
            by_name[f"largest {name}"] = _largest(values)
        elif name in NEEDS_PAIRS and values is not None:
            by_name |= {f"{name} {number}": x for number, x in values.items()}
        else:
            by_name |= values if isinstance(values, dict) else {} if values is None else {name: values}
    return by_name


def _largest(values: Numbers) -> Numbers:
    """The number of largest magnitude ``[...]`` of ``[..., K]``, with its sign; NaN where all are."""
    sizes = np.where(np.isnan(values), -1.0, np.abs(values))
    return np.take_along_axis(values, sizes.argmax(-1)[..., None], -1)[..., 0]


def measured(name: str) -> str:
    """A statistic in words, with its unit."""
    unit = _UNITS.get(name)
    return name.replace("_", " ") + (f", {unit}" if unit else "")


def tables(rows: Sequence[Mapping[str, Numbers]], heads: int | None = None) -> dict[str, Numbers]:
    """A table ``[rows, heads]`` for each statistic ``[H]``; NaN where a row has fewer heads, or lacks the statistic.

    ``heads``: their largest number; default: that of the row with the most.
    """
    most = max((len(values) for row in rows for values in row.values()), default=0) if heads is None else heads
    made: dict[str, Numbers] = {}
    for at, row in enumerate(rows):
        for name, values in row.items():
            table = made.setdefault(name, np.full((len(rows), most), np.nan))
            table[at, : len(values)] = values[:most]
    return made
