"""Similarity of heads and layers: Jensen-Shannon divergence of weights, and linear CKA of features.

Both read their inputs some rows at a time, so that neither holds a whole recording.

Notation for shapes: A, B compared heads or layers, R rows (queries or tokens) of a tile, K keys, D width.
"""

from collections.abc import Sequence
from itertools import pairwise, product

import torch
from torch import Tensor

from attention_service.core.cancellation import checkpoint
from attention_service.core.inspection.head_reader import HeadReader, UnfitNumbers, row_tiles

ELEMENTS = 2**18
"""Elements of a tile of weights: 2 MiB, which caches hold."""
FEATURES = 2**20
"""Elements of a tile of features."""
GROUP = 2048
"""Columns of features that are multiplied at once; a wider layer is a group of its own."""
_ROUNDING = 1e-26
"""Share of the squares of features that rounding leaves of them where all rows are the same, at most."""
_SMALLEST = 1e-300
"""Lower bound of a share in a logarithm; x ln x is 0 below it."""


def divergences(a: HeadReader, b: HeadReader | None) -> Tensor:
    """Mean Jensen-Shannon divergence ``[A, B]`` in nats of each pair of heads; b None stands for a.

    Rows where one of two heads has no weight are not counted; NaN without a row. Raises UnfitNumbers for a weight that
    is negative, NaN or infinite. Source: Lin 1991, eq. 4.1.
    """
    other = b or a
    sums: Tensor | None = None
    for rows in row_tiles(a.rows, max((*a.widths, *other.widths)) * max(len(a.widths), len(other.widths)), ELEMENTS):
        p = _shares(a.read(range(len(a.widths)), rows))
        q = p if b is None else _shares(b.read(range(len(b.widths)), rows))
        tile = _tile(p, q, same=b is None)
        sums = tile if sums is None else sums + tile
    if sums is None:
        return torch.full((len(a.widths), len(other.widths)), torch.nan, dtype=torch.float64)
    total, count = sums
    means: Tensor = total / count.masked_fill(count == 0, torch.nan)
    return means


def _shares(weights: Tensor) -> Tensor:
    """Divide by the sum of each row; a row of zeros stays."""
    total = weights.sum(-1, keepdim=True)
    if not total.isfinite().all() or (weights < 0).any():
        raise UnfitNumbers("expected weights that are finite and not negative")
    shares: Tensor = weights / total.masked_fill(total == 0, 1)
    return shares


def _tile(p: Tensor, q: Tensor, *, same: bool) -> Tensor:
    """Sums of the divergences and numbers of the rows, ``[2, A, B]``, of p ``[A, R, K]`` and q ``[B, R, K]``."""
    sums = p.new_zeros(2, len(p), len(q))
    of_p, of_q = _entropy(p), _entropy(q)  # [A, R], [B, R]
    real_p, real_q = (x.sum(-1) > 0 for x in (p, q))
    for at in range(len(p)):
        checkpoint()
        first = at if same else 0
        mixed = _entropy((p[at] + q[first:]).mul_(0.5))  # [B, R]
        counted = real_p[at] & real_q[first:]
        divergence = (mixed - (of_p[at] + of_q[first:]) / 2).clamp(min=0) * counted
        sums[:, at, first:] = torch.stack([divergence.sum(-1), counted.sum(-1)])
        if same:
            sums[:, at:, at] = sums[:, at, at:]
    return sums


def _entropy(p: Tensor) -> Tensor:
    """−Σ p ln p over the last dimension."""
    entropy: Tensor = -torch.linalg.vecdot(p, p.clamp(min=_SMALLEST).log_())
    return entropy


def linear_cka(a: HeadReader, b: HeadReader | None) -> Tensor:
    """Linear CKA ``[A, B]`` of each pair of features, centred over the rows; b None stands for a.

    0 if one of two is the same in all rows. Raises UnfitNumbers for NaN and infinity.
    Source: Kornblith et al. 2019, eq. 3.
    """
    own = _Centred.of(a)
    others = own if b is None else _Centred.of(b)
    squares: dict[tuple[int, int], Tensor] = {}  # ‖Yᵀ X‖² by groups
    for i, j in product(range(len(own)), range(len(others))):
        mirrored = b is None and j < i
        squares[i, j] = squares[j, i].mT if mirrored else _alignments(own[i], others[j])
    alignments = torch.cat([torch.cat([squares[i, j] for j in range(len(others))], 1) for i in range(len(own))])
    left = torch.cat([one.norms(squares[i, i] if b is None else None) for i, one in enumerate(own)])
    right = left if b is None else torch.cat([states.norms() for states in others])
    norms = left[:, None] * right  # ‖Xᵀ X‖ ‖Yᵀ Y‖
    return (alignments / norms.masked_fill(norms == 0, torch.inf)).clamp(max=1)


class _Centred:
    """Some consecutive heads or layers, whose features stand side by side with their means subtracted."""

    def __init__(self, compared: HeadReader, parts: range) -> None:
        self._compared, self._parts = compared, parts
        self.widths = compared.widths[parts.start : parts.stop]
        self.rows = compared.rows
        total = sum((tile.sum(0) for tile in map(self._read, self.tiles)), torch.zeros(()))
        self._mean = (total / max(self.rows, 1)).expand(sum(self.widths))

    @classmethod
    def of(cls, compared: HeadReader) -> "list[_Centred]":
        """Every head or layer, in groups of at most ``GROUP`` columns."""
        return [cls(compared, parts) for parts in groups(compared.widths)]

    @property
    def tiles(self) -> list[range]:
        """The rows to read at once."""
        return list(row_tiles(self.rows, max(sum(self.widths), GROUP), FEATURES))

    def norms(self, squares: Tensor | None = None) -> Tensor:
        """‖Xᵀ X‖ of each; 0 where only rounding is left of it. ``squares``: the alignments with itself, if known."""
        norms = (_alignments(self, self) if squares is None else squares).diagonal().sqrt()
        means = [part.square().sum() for part in self._mean.split_with_sizes(list(self.widths))]
        return norms.masked_fill(norms <= _ROUNDING * self.rows * torch.stack(means), 0)

    def read(self, rows: range) -> Tensor:
        """``[R, Σ D]``, centred."""
        return self._read(rows) - self._mean

    def _read(self, rows: range) -> Tensor:
        checkpoint()
        features = torch.cat([self._compared.read(range(at, at + 1), rows)[0] for at in self._parts], -1)
        if not features.isfinite().all():
            raise UnfitNumbers("expected finite features")
        return features


def groups(widths: Sequence[int]) -> list[range]:
    """Consecutive parts with at most ``GROUP`` columns together, or one part."""
    starts, columns = [0], 0
    for at, width in enumerate(widths):
        if columns and columns + width > GROUP:
            starts.append(at)
            columns = 0
        columns += width
    return [range(first, last) for first, last in pairwise([*starts, len(widths)])]


def _alignments(x: _Centred, y: _Centred) -> Tensor:
    """‖Yᵀ X‖² of each pair of two groups."""
    cross: Tensor | None = None
    for rows in x.tiles if sum(x.widths) > sum(y.widths) else y.tiles:
        left = x.read(rows)
        cross_product = left.mT @ (left if x is y else y.read(rows))
        cross = cross_product if cross is None else cross.add_(cross_product)
    if cross is None:
        return torch.zeros(len(x.widths), len(y.widths), dtype=torch.float64)
    rows_of = [part.sum(0) for part in cross.square_().split_with_sizes(list(x.widths))]
    return torch.stack(
        [torch.stack([block.sum() for block in row.split_with_sizes(list(y.widths))]) for row in rows_of]
    )
