"""Differences between tensors of two attentions: how large they are, and where."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Difference:
    """One tensor of both sides."""

    tensor: str
    """A tap, or an input's gradient as ``∂L/∂query``."""
    max_abs: float
    """The largest absolute difference; infinite if the shapes differ or one number alone is finite."""
    relative: float
    """The same, beside the largest finite number of the second side."""
    cosine: float | None
    """Cosine of the angle between both; None if one is zero or the shapes differ."""
    where: dict[str, int]
    """Indices of the largest difference, by the name of each dimension."""
    note: str = ""

    def data(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def compare(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]]) -> list[Difference]:
    """Compare the tensors that both sides have, in the first side's order."""
    return [_difference(name, first, b[name]) for name, first in a.items() if name in b]


def _difference(name: str, a: NDArray[Any], b: NDArray[Any]) -> Difference:
    if a.shape != b.shape:
        shapes = f"shapes differ: {list(a.shape)} and {list(b.shape)}"
        return Difference(name, np.inf, np.inf, None, {}, shapes)
    if not a.size:
        return Difference(name, 0.0, 0.0, None, {})
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b))  # both −∞ where a mask forbids
    apart = np.where(np.isnan(apart), np.inf, apart)  # NaN is a difference
    at = np.unravel_index(int(apart.argmax()), a.shape)
    largest = float(np.abs(b[finite]).max(initial=0.0))
    a, b = a[finite], b[finite]
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    max_abs = float(apart.max())
    return Difference(
        name,
        max_abs,
        0.0 if max_abs == 0 else max_abs / max(largest, float(np.finfo(np.float64).tiny)),
        float(a @ b) / norms if norms else None,
        dict(zip(_dimensions(name, len(at)), map(int, at), strict=True)),
    )


def _dimensions(name: str, rank: int) -> list[str]:
    """Return the names of a tensor's dimensions."""
    pairs = {"scores", "capped_scores", "masked_scores", "weights"}
    row = "key" if name in {"k", "v", "∂L/∂key", "∂L/∂value"} else "query"
    last = "key" if name in pairs else "at"
    headed = ["sequence", "head", row, last] if rank == 4 else ["sequence", row, last]
    return [f"dimension {at}" for at in range(rank - len(headed))] + headed[max(len(headed) - rank, 0) :]
