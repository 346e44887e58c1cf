"""Exact number of pairs that any pattern allows, row by row and without laying them out.

A row is cut at the edges of all parts: between two cuts the pattern holds everywhere or nowhere, or repeats. Most rows
need no look. While p runs from one turn to the next, the order of the cuts stays, so that with each common period T of
all parts a row allows as many more keys as with the one before: the counts of rows T apart are an arithmetic
progression, and two periods of them tell the sum of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np
import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_service.core.masks.pattern import Part, Pattern, Turns

_AT_ONCE = 2**20
"""Cuts processed together."""
_MOST = 2**24
"""Cuts beyond which counting is refused: it would take more than some seconds."""
_REFUSED = (
    "these masks together take too long to count at this length; ask for a shorter one, for fewer positions and random "
    "blocks, or for strides and block sizes that divide one another"
)


@dataclass(frozen=True)
class Run:
    """Consecutive rows with the same multiplicity."""

    start: int
    stop: int
    times: int


@lru_cache(maxsize=32)  # one account of costs asks for the same count several times
def count(pattern: Pattern, first: int, queries: int, keys: int) -> int:
    """Return the number of allowed pairs of queries at positions first, first + 1, … and keys 0, 1, ….

    Raises InvalidRequest where that takes too long: where strides and blocks have a common multiple beyond the
    sequence and many edges, or where many blocks are drawn at random.
    """
    if not queries or not keys:
        return 0
    parts = list(pattern.parts())
    turns = [part.turns for part in parts]
    row = _Row(pattern, parts, keys)
    if (
        row.cuts > _AT_ONCE
        or sum(len(each.moving) for each in turns) * sum(len(each.still) for each in turns) > _AT_ONCE
    ):
        raise InvalidRequest(_REFUSED, param="spec.masks")
    runs = list(_runs(turns, first, queries, keys))
    if sum(run.stop - run.start for run in runs) * row.cuts > _MOST:
        raise InvalidRequest(_REFUSED, param="spec.masks")
    p = torch.cat([torch.arange(run.start, run.stop) for run in runs])
    counts = [row.allowed(chunk) for chunk in torch.split(p, _AT_ONCE // row.cuts)]
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), *counts]).cumsum(0)
    total = at = 0
    for run in runs:
        end = at + run.stop - run.start
        total += run.times * int(sums[end] - sums[at])
        at = end
    return total


class _Row:
    """The keys that a pattern allows, of those from 0 to before ``keys``."""

    def __init__(self, pattern: Pattern, parts: list[Part], keys: int) -> None:
        self.pattern, self.keys = pattern, keys
        self.once = [part for part in parts if part.every is None]
        self.again = [(part, part.every) for part in parts if part.every is not None]
        # Beyond this many keys a row repeats, unless it has fewer.
        self.period = min(lcm(*(every for _, every in self.again)), keys + 1)

    @property
    def cuts(self) -> int:
        """Number of cuts in one row."""
        probe = torch.zeros(1, dtype=torch.int64)
        once = 1 + sum(part.edges(probe).shape[1] for part in self.once)
        return once * (1 + sum(2 * -(-self.period // every) for _, every in self.again))

    def allowed(self, p: Tensor) -> Tensor:
        """Count the keys that each query sees: ``[R]`` to ``[R]``."""
        ends = p.new_tensor([0, self.keys]).expand(len(p), 2)
        cuts = torch.cat([ends, *(part.edges(p) for part in self.once)], dim=1).clamp(0, self.keys)
        cuts = _sorted(cuts)
        start, size = cuts[:, :-1], cuts.diff(dim=1)  # [R, C]
        if not self.again:
            return (self._allows(p, start) * size).sum(1)
        # Within a stretch only what repeats differs: a whole period of it, so often, and the beginning of one.
        whole, rest = size // self.period, size % self.period
        points = [start[..., None]]
        for part, every in self.again:
            nearest = start[..., None] + (part.edges(p)[:, None, :] - start[..., None]) % every  # [R, C, E]
            steps = torch.arange(0, self.period, every)
            points.append((nearest[..., None] + steps).flatten(2))
        stop = (start + self.period)[..., None]  # [R, C, P]
        point = _sorted(torch.cat(points, dim=2).minimum(stop))
        after = torch.cat([point[..., 1:], stop], dim=2)
        begun = (after.minimum((start + rest)[..., None]) - point).clamp(min=0)
        times = whole[..., None] * (after - point) + begun
        return (self._allows(p, point.flatten(1)) * times.flatten(1)).sum(1)

    def _allows(self, p: Tensor, keys: Tensor) -> Tensor:
        """Test whether each query of ``[R]`` may look at its keys ``[R, C]``.

        A single row is looked at twice: one row of keys alone would have to be side by side.
        """
        p, wide = p[:, None], keys
        if len(keys) == 1:
            p, wide = p.expand(2, 1), keys.expand(2, -1)
        return self.pattern.allows(p, wide).expand(wide.shape)[: len(keys)]


def _sorted(x: Tensor) -> Tensor:
    """Sort along the last dimension; numpy is faster for many short rows."""
    return torch.from_numpy(np.sort(x.numpy(), axis=-1))


def _runs(turns: list[Turns], first: int, queries: int, keys: int) -> Iterator[Run]:
    """Yield the rows to count, each with its multiplicity."""
    periods = [each.period for each in turns]
    still = {0, keys}.union(*(each.still for each in turns))
    cuts = {first, first + queries}.union(*(each.rows for each in turns))
    for low, high in {moving for each in turns for moving in each.moving}:
        # Where a moving edge may be on either side of one that stays.
        cuts.update(edge - high for edge in still)
        cuts.update(edge - low + 1 for edge in still)
    period = queries if None in periods else lcm(*(period for period in periods if period is not None))
    inside = sorted(cut for cut in cuts if first <= cut <= first + queries)
    for start, stop in pairwise(inside):
        rounds, more = divmod(stop - start, period)
        if rounds < 2 or stop - start <= 2 * period:
            yield Run(start, stop, 1)
            continue
        # Rows start + r, start + r + T, …: m of them add up to m · first + m (m − 1) / 2 · (second − first).
        for low, high, m in ((0, more, rounds + 1), (more, period, rounds)):
            gained = m * (m - 1) // 2
            yield Run(start + low, start + high, m - gained)
            yield Run(start + period + low, start + period + high, gained)
