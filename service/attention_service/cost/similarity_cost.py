"""Cost of comparing heads and layers: divergences of weights, and CKA of features, tile by tile in float64."""

from dataclasses import dataclass

from attention_service.core.inspection.similarity import ELEMENTS, FEATURES, GROUP, groups
from attention_service.cost.clock import Rates

_FLOAT64_BYTES = 8
_FLOPS = 5
"""FLOPs of each key of a row of a pair: add, halve, logarithm, multiply, add."""
_MOVED = 28
"""Elements whose traffic takes as long as these, as measured on a CPU."""
_WEIGHT_TILES, _FEATURE_TILES = 10, 5
"""Copies of a tile of weights and of features that are held at a time, at most."""
_STARTS_OF_A_PAIR, _STARTS_OF_A_PART = 0.25, 2.0
"""Small operations, in starts of an attention; measured."""
_PRODUCT_RATE = 0.4
"""Rate of products in float64, as a share of the device's rate; measured on a CPU."""


@dataclass(frozen=True)
class SimilarityWork:
    """The sizes of one comparison."""

    rows: int
    """Queries, or tokens."""
    left: tuple[int, ...]
    """Keys, or the width of the features, of each head or layer."""
    right: tuple[int, ...]
    features: bool
    """True for CKA."""
    same: bool = False
    """True if both sides are the same heads or layers."""

    @property
    def flops(self) -> int:
        """FLOPs of all pairs."""
        if not self.features:
            return _FLOPS * self._elements
        left, right = self._columns
        if self.same:
            return self.rows * (sum(left) ** 2 + sum(width**2 for width in left))
        return 2 * self.rows * (sum(left) * sum(right) + sum(width**2 for width in left + right))

    @property
    def peak_bytes(self) -> int:
        """Upper bound on the bytes that are held at a time, the reply included."""
        kept = 4 * len(self.left) * len(self.right)
        if not self.features:
            row = max(*self.left, *self.right) * max(len(self.left), len(self.right))
            return _FLOAT64_BYTES * (_WEIGHT_TILES * max(row, min(ELEMENTS, self.rows * row)) + kept)
        columns = [width for side in self._columns for width in side]
        widest = max(columns)
        tile = max(width * min(self.rows, max(1, FEATURES // max(width, GROUP))) for width in columns)
        means = sum(self.left) + sum(self.right)
        return _FLOAT64_BYTES * (_FEATURE_TILES * tile + 2 * widest**2 + means + kept)

    def seconds(self, rates: Rates) -> float:
        """Seconds of the comparison, by a device's rates."""
        pairs, parts = len(self.left) * len(self.right), len(self.left) + len(self.right)
        if self.features:
            starts = _STARTS_OF_A_PAIR * pairs + _STARTS_OF_A_PART * parts
            return self.flops / (_PRODUCT_RATE * rates.flops_per_s) + starts * rates.overhead_s
        tiles = -(-self.rows * max(self.left) * max(len(self.left), len(self.right)) // ELEMENTS)
        starts = _STARTS_OF_A_PART * tiles * parts
        return _FLOAT64_BYTES * _MOVED * self._elements / rates.bytes_per_s + starts * rates.overhead_s

    @property
    def _columns(self) -> tuple[list[int], list[int]]:
        """Columns of each group of features, of both sides."""
        left, right = (
            [sum(widths[at] for at in part) for part in groups(widths)] for widths in (self.left, self.right)
        )
        return left, right

    @property
    def _elements(self) -> int:
        """Keys of all rows of all pairs, and of the heads alone."""
        pairs = len(self.left) * len(self.right) // (2 if self.same else 1)
        return self.rows * max(self.left, default=0) * (pairs + len(self.left) + len(self.right))
