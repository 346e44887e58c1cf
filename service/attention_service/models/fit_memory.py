"""The memory in which the server holds a fit to a model: it is admitted for the fit, and part of its price."""

from collections.abc import Collection
from typing import Final

_LENS_COPIES: Final = 3
"""Copies of the matrices of a lens in float32: their sum, the mean, and the file."""
_FITTED_COPIES: Final = 5
"""Copies of the features, or differences, of one layer in float64 while it is fitted."""
_OF_SAMPLE: Final = 160
"""Bytes of a sample beside its features: its label, its fold and its scores."""
_OF_TEXT: Final = 300
"""Bytes of a text, which the folds do not divide."""
_SQUARES: Final = 4
"""Square matrices in float64, as wide as the smaller side of the differences, of their decomposition."""


def lens_bytes(layers: int, width: int) -> int:
    """The memory of the Jacobians of so many layers."""
    return _LENS_COPIES * 4 * layers * width * width


def probe_bytes(texts: int, samples: int, widths: Collection[int]) -> int:
    """The memory of the features of samples of so many texts, of layers that are so wide, and of a fit to one layer."""
    return texts * _OF_TEXT + samples * (_OF_SAMPLE + 4 * sum(widths) + _FITTED_COPIES * 8 * max(widths))


def vector_bytes(pairs: int, layers: int, width: int) -> int:
    """The memory of the sums of two sides, and of the differences of so many pairs; 0 pairs of a mean difference."""
    of_pairs = pairs * width * (4 * layers + _FITTED_COPIES * 8) + _SQUARES * 8 * min(pairs, width) ** 2
    return of_pairs + 16 * width * layers
