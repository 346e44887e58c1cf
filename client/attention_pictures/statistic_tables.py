"""Statistics of heads as tables of rows × heads, for figures and notebooks."""

from collections.abc import Mapping, Sequence

import numpy as np

from attention_contract.schemas.weights import HeadStatistics
from attention_pictures.pooled_cells import Numbers


def named(statistics: HeadStatistics) -> dict[str, Numbers]:
    """The statistics that are there by name, ``[H]`` or ``[B, H]``; those of classes by the class."""
    found: dict[str, Numbers] = {}
    for name in HeadStatistics.model_fields:
        values = getattr(statistics, name)
        found |= values if isinstance(values, dict) else {} if values is None else {name: values}
    return found


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
