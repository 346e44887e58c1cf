"""The blocked kernel on meta tensors: only its Pareto-maximal tiles are computed."""

from collections.abc import Iterator

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.extent import Extent
from attention_service.core.kernels.hiding import Limits
from attention_service.core.kernels.largest_tiles import Tile, largest_tiles
from attention_service.core.kernels.tiles import Group, scored_in
from attention_service.core.kernels.tiling import Block
from attention_service.core.masks import pattern_of
from attention_service.core.patterns import Pattern
from attention_service.core.types import Problem


class LargestTiles:
    """The blocks with a tile that may hold most, in place of all blocks."""

    def __init__(self, sizes: Extent) -> None:
        self._sizes = sizes

    def __call__(self, problem: Problem, *, whole_rows: bool) -> Iterator[tuple[Group, Block]]:
        """Yield each block in a group of as many sequences as are looked at together."""
        if not self._sizes.batch * self._sizes.queries * self._sizes.keys:
            return
        with _disable_current_modes():  # tiles are found by real numbers
            together, found = largest_tiles(self._sizes)
        pattern = pattern_of(problem.spec.masks, problem.q.shape[2], problem.keys, problem.past)
        for tile, first, block in found:
            yield Group(problem, slice(0, together), first, _Remembered(pattern, problem, tile), pattern), block


class _Remembered(Limits):
    """The limits that tiles before have left; those of this one are laid out where they look like none of them."""

    def __init__(self, pattern: Pattern, problem: Problem, tile: Tile) -> None:
        super().__init__(pattern, scored_in(problem), problem.q.device, 0)
        self._tile, self._left = tile, problem.q.new_empty(tile.remembered, dtype=scored_in(problem))
        self._kept: list[Tensor] = []

    def of(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[queries, keys]``."""
        rows, columns = queries[1] - queries[0], keys[1] - keys[0]
        if not self._tile.fresh and rows * columns <= len(self._left):
            return self._left[: rows * columns].view(rows, columns)
        limits = self._laid_out(queries, keys)
        if self._tile.limits > self._tile.remembered:
            self._kept.append(limits)
        return limits
