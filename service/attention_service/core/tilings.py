"""Parts of patterns that cut positions into blocks, documents and remainders, or draw blocks at random."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_service.core import steps
from attention_service.core.noise import noise, sketched_noise
from attention_service.core.patterns import Bounds, Coverage, Part, Tiles, Turns
from attention_service.core.tape import BOOL, INTEGER, Sketch, Tape

_DRAWS_OF_A_TILE = 256


@dataclass(frozen=True)
class Leading(Part):
    """j < length."""

    length: int

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """The same for all queries."""
        return j < self.length

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """One comparison of keys."""
        return steps.plain(tape, j, itemsize=BOOL)

    def coverage(self, tiles: Tiles) -> Coverage:
        """By the first and the last key."""
        return Coverage(tiles.j_first < self.length, tiles.j_last < self.length)

    @property
    def laid_out(self) -> bool:
        """One answer for each key."""
        return False

    @property
    def building(self) -> int:
        """Nothing over pairs."""
        return 0

    @property
    def bounds(self) -> Bounds:
        """Few keys for every query."""
        return Bounds(left=True, right=True, strips=frozenset({"g"}))

    def edges(self, p: Tensor) -> Tensor:
        """Its end."""
        return torch.full((len(p), 1), self.length)

    @property
    def turns(self) -> Turns:
        """The same for all rows."""
        return Turns(still=(self.length,))


@dataclass(frozen=True)
class Blocks(Part):
    """|⌊j / size⌋ − ⌊p / size⌋| ≤ neighbours."""

    size: int
    neighbours: int = 0

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By the numbers of the blocks."""
        own, other = p // self.size, j // self.size
        if not self.neighbours:
            return own == other
        return (other >= own - self.neighbours) & (other <= own + self.neighbours)

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """Both numbers, and one comparison or two."""
        own, other = steps.plain(tape, p), steps.plain(tape, j)
        if not self.neighbours:
            return steps.plain(tape, own, other, itemsize=BOOL)
        ends = [steps.plain(tape, other, steps.plain(tape, own), itemsize=BOOL) for _ in range(2)]
        return steps.plain(tape, *ends)

    def coverage(self, tiles: Tiles) -> Coverage:
        """As of a band, over the numbers of the blocks."""
        nearest = tiles.j_first // self.size - tiles.p_last // self.size
        farthest = tiles.j_last // self.size - tiles.p_first // self.size
        return Coverage(
            (farthest >= -self.neighbours) & (nearest <= self.neighbours),
            (nearest >= -self.neighbours) & (farthest <= self.neighbours),
        )

    @property
    def building(self) -> int:
        """Each comparison, and both together."""
        return 3 if self.neighbours else 1

    def edges(self, p: Tensor) -> Tensor:
        """Where the first block begins, and where the last has ended."""
        own = p[:, None] // self.size
        return (own + torch.tensor([-self.neighbours, self.neighbours + 1])) * self.size

    @property
    def turns(self) -> Turns:
        """They move by a block at a time."""
        beside = self.neighbours * self.size
        return Turns(moving=((1 - self.size - beside, -beside), (1 + beside, self.size + beside)), period=self.size)


@dataclass(frozen=True)
class Stripes(Part):
    """(p − j) mod stride = 0."""

    stride: int

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By the remainders."""
        return p % self.stride == j % self.stride

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """Both remainders, and one comparison."""
        return steps.plain(tape, steps.plain(tape, p), steps.plain(tape, j), itemsize=BOOL)

    def coverage(self, tiles: Tiles) -> Coverage:
        """Whether a multiple of the stride lies between the least and the largest j − p, and nothing else does."""
        least, largest = tiles.nearest, tiles.farthest
        some = largest // self.stride * self.stride >= least
        alone = least == largest
        return Coverage(some, some & alone if self.stride > 1 else torch.ones_like(some))

    @property
    def bounds(self) -> Bounds:
        """A share of all keys."""
        return Bounds(left=True, right=True, strips=frozenset({"n/s"}))

    def edges(self, p: Tensor) -> Tensor:
        """Each key that is seen, and the next."""
        return p[:, None] + torch.tensor([0, 1])

    @property
    def every(self) -> int:
        """The stride."""
        return self.stride

    @property
    def turns(self) -> Turns:
        """All move with p; after a stride the first is where another was."""
        return Turns(period=self.stride)


@dataclass(frozen=True)
class Remainder(Part):
    """j mod size ≥ least."""

    size: int
    least: int

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """The same for all queries."""
        return j % self.size >= self.least

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """The remainders of keys, and one comparison of them."""
        return steps.plain(tape, steps.plain(tape, j), itemsize=BOOL)

    def coverage(self, tiles: Tiles) -> Coverage:
        """By the block and the remainder of the first and the last key: what is seen is at the end of a block."""
        one = tiles.j_first // self.size == tiles.j_last // self.size
        some = (tiles.j_last % self.size >= self.least) | ~one & (self.least < self.size)
        return Coverage(some, (tiles.j_first % self.size >= self.least) & (one | (self.least <= 0)))

    @property
    def laid_out(self) -> bool:
        """One answer for each key."""
        return False

    @property
    def building(self) -> int:
        """Nothing over pairs."""
        return 0

    @property
    def bounds(self) -> Bounds:
        """A share of all keys."""
        return Bounds(left=True, right=True, strips=frozenset({"n·c/s"}))

    def edges(self, p: Tensor) -> Tensor:
        """Where a block begins, and where its seen part does."""
        return torch.tensor([0, self.least]).expand(len(p), -1)

    @property
    def every(self) -> int:
        """The size."""
        return self.size

    @property
    def turns(self) -> Turns:
        """The same for all rows; against what moves, it looks the same after a block."""
        return Turns(period=self.size)


@dataclass(frozen=True)
class Segments(Part):
    """p and j lie between the same two of the ends, or both beyond the last; p before the first sees nothing."""

    ends: tuple[int, ...]

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """By how many ends are at or before each; no key is before the first."""
        return self._number(p) == self._number(j)

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """Both looked up, and one comparison."""
        ends = Sketch((len(self.ends),), INTEGER)
        return steps.plain(tape, *(steps.plain(tape, x, ends, dims=x.dims) for x in (p, j)), itemsize=BOOL)

    def coverage(self, tiles: Tiles) -> Coverage:
        """By the segments of the first and the last query and key."""
        p_first, p_last = self._number(tiles.p_first), self._number(tiles.p_last)
        j_first, j_last = self._number(tiles.j_first), self._number(tiles.j_last)
        one = (p_first == p_last) & (j_first == j_last)
        return Coverage((p_first <= j_last) & (j_first <= p_last), one & (p_first == j_first))

    def _number(self, positions: Tensor) -> Tensor:
        return torch.searchsorted(torch.tensor(self.ends, device=positions.device), positions.contiguous(), right=True)

    @property
    def bounds(self) -> Bounds:
        """The last segment grows with the sequence."""
        return Bounds(left=False, right=False)

    def edges(self, p: Tensor) -> Tensor:
        """Both ends of the query's own segment."""
        ends = torch.tensor([-1, *self.ends, 2**62])
        number = self._number(p)
        return torch.stack([ends[number], ends[number + 1]], dim=1)

    @property
    def turns(self) -> Turns:
        """Rows differ from segment to segment."""
        return Turns(still=self.ends, rows=self.ends)


@dataclass(frozen=True)
class Drawn(Part):
    """⌊j / size⌋ is one of the blocks drawn, without repetition, for ⌊p / size⌋."""

    size: int
    count: int
    seed: int
    blocks: int
    """How many blocks of keys there are to draw from."""

    def allows(self, p: Tensor, j: Tensor) -> Tensor:
        """Compared with one draw after the other."""
        block = j // self.size
        seen = torch.zeros((1,) * j.ndim, dtype=torch.bool, device=j.device)
        for drawn in self._draws(p):
            seen = seen | (drawn == block)
        return seen

    def sketched(self, tape: Tape, p: Sketch, j: Sketch) -> Sketch:
        """Each draw, made another one where it was there before, and compared."""
        block = steps.plain(tape, j)
        seen = steps.filled(tape, (1,) * len(j.dims), BOOL)
        row = steps.plain(tape, p)
        for earlier in range(min(self.count, self.blocks)):
            number = steps.plain(tape, sketched_noise(tape, row))
            for _ in range(earlier):
                number = steps.choose(tape, steps.plain(tape, number, number, itemsize=BOOL), number)
            seen = steps.plain(tape, seen, steps.plain(tape, number, block, itemsize=BOOL))
        return seen

    def coverage(self, tiles: Tiles) -> Coverage:
        """By the blocks drawn for each row of blocks in the tile; where those are too many, it does not tell."""
        first, last = tiles.p_first // self.size, tiles.p_last // self.size
        low, high = tiles.j_first // self.size, tiles.j_last // self.size
        rows = int((last - first).max()) + 1 if first.numel() else 0
        if rows * min(self.count, self.blocks) > _DRAWS_OF_A_TILE:
            unknown = torch.ones((), dtype=torch.bool, device=first.device)
            return Coverage(unknown, ~unknown)
        some = torch.zeros((), dtype=torch.bool, device=first.device)
        every = ~some
        # Counts of at most 64 draws, in bytes, as there are many tiles. More blocks than are drawn are never all there.
        wide = (high - low + 1).clamp(max=self.count + 1).to(torch.uint8)
        for step in range(rows):
            row = torch.minimum(first + step, last)  # the last one again where a tile has fewer
            inside = torch.zeros((), dtype=torch.uint8, device=first.device)
            for drawn in self._draws(row * self.size):
                inside = inside + ((low <= drawn) & (drawn <= high)).view(torch.uint8)
            some, every = some | (inside > 0), every & (inside == wide)
        return Coverage(some, every)

    def _draws(self, p: Tensor) -> Iterator[Tensor]:
        """The blocks drawn for each query: Floyd's algorithm (Bentley and Floyd 1987), one number for each draw."""
        row = p // self.size
        taken: list[Tensor] = []
        for last in range(max(0, self.blocks - self.count), self.blocks):
            number = noise(self.seed, row, last) % (last + 1)
            for other in taken.copy():
                number = torch.where(number == other, last, number)
            taken.append(number)
            yield number

    @property
    def building(self) -> int:
        """What was found, one comparison, and both together."""
        return 3

    @property
    def bounds(self) -> Bounds:
        """Few keys, anywhere."""
        return Bounds(left=True, right=True, strips=frozenset({"r"}))

    def edges(self, p: Tensor) -> Tensor:
        """Both ends of each block."""
        drawn = list(self._draws(p[:, None]))
        if not drawn:
            return p.new_empty(len(p), 0)
        starts = torch.cat(drawn, dim=1) * self.size
        return torch.cat([starts, starts + self.size], dim=1)

    @property
    def turns(self) -> Turns:
        """Each block of rows is another."""
        return Turns(period=None)
