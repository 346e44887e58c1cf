"""The difference of numbers from those that are expected, as one share."""

from typing import Any, Final

import numpy as np
from torch import Tensor

CLOSE: Final = 1e-4
"""The largest difference that counts as equal, as a share of the largest number that is compared."""


def error(found: Any, expected: Any, least: float = 1e-30) -> float:
    """Return the largest difference as a share of the largest expected number, which counts as ``least`` at least.

    Infinity if NaN and infinities are not those that are expected, at the same places.
    """
    a, b = (np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, np.float64) for x in (found, expected))
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    return float(abs(a - b)[finite].max(initial=0) / max(abs(b)[finite].max(initial=0), least))
