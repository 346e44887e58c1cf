"""The pairs that positional masks hide within a tile, laid out once for equal tiles."""

from bisect import bisect_right
from math import lcm

import torch
from torch import Tensor

from attention_service.core.masks.pattern import Pattern

KEPT = 2
"""Number of tiles of the largest size that are remembered."""


class Likeness:
    """Finds the remembered tile that a tile equals.

    Where edges of a pattern move with the query, one tile further along the diagonal it looks the same.
    """

    def __init__(self, pattern: Pattern, tile: int) -> None:
        """tile: the queries times the keys of the largest one."""
        self._room = self._most = KEPT * tile
        turns = [part.turns for part in pattern.parts()]
        self._rows = sorted({row for each in turns for row in each.rows})
        self._still = sorted({edge for each in turns for edge in each.still})
        periods = [each.period for each in turns]
        self._period = None if None in periods else lcm(*(period for period in periods if period is not None))
        self._sizes: dict[tuple[int, ...], int] = {}

    @property
    def held(self) -> int:
        """Pairs of the tiles that are remembered."""
        return self._most - self._room

    def remember(
        self, queries: tuple[int, int], keys: tuple[int, int]
    ) -> tuple[tuple[int, ...] | None, bool, list[tuple[int, ...]]]:
        """Return the key of a tile (None if it is not remembered), whether it is new, and the keys dropped for it."""
        key = self._likeness(queries, keys)
        size = (queries[1] - queries[0]) * (keys[1] - keys[0])
        if key is None or size > self._most:
            return None, True, []
        if key in self._sizes:
            return key, False, []
        forgotten = []
        while size > self._room:
            forgotten.append(next(iter(self._sizes)))
            self._room += self._sizes.pop(forgotten[-1])
        self._room -= size
        self._sizes[key] = size
        return key, True, forgotten

    def _likeness(self, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[int, ...] | None:
        """Return the key that equal tiles share; None if another pattern begins within the tile."""
        if self._period is None:
            return None
        kinds = []
        for (start, stop), edges in ((queries, self._rows), (keys, self._still)):
            first, last = bisect_right(edges, start), bisect_right(edges, stop - 1)
            if first != last:
                return None
            kinds.append(first)
        sizes = queries[1] - queries[0], keys[1] - keys[0]
        return (*kinds, *sizes, keys[0] - queries[0], queries[0] % self._period)


class Limits:
    """The largest that each score of a tile may be: ∞ where a query may look, −∞ where not.

    A minimum of finite scores and limits hides what it should, and is faster than a mask of booleans.
    """

    def __init__(self, pattern: Pattern, dtype: torch.dtype, device: torch.device, tile: int) -> None:
        """tile: the queries times the keys of the largest one."""
        self._pattern, self._dtype, self._device = pattern, dtype, device
        self._alike = Likeness(pattern, tile)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def of(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[queries, keys]``, of positions from the first to before the second of each pair."""
        key, _, forgotten = self._alike.remember(queries, keys)
        for each in forgotten:
            del self._known[each]
        if key is None:
            return self._laid_out(queries, keys)
        if key not in self._known:
            self._known[key] = self._laid_out(queries, keys)
        return self._known[key]

    def _laid_out(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        p = torch.arange(*queries, device=self._device)[:, None]
        j = torch.arange(*keys, device=self._device)[None]
        infinity = torch.tensor(torch.inf, dtype=self._dtype, device=self._device)
        return torch.where(self._pattern.allows(p, j), infinity, -infinity).expand(len(p), j.shape[1])
