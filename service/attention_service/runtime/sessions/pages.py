"""Pages: the memory of sessions, in slabs, counted by how many sequences use each.

A page holds the keys and values of ``PAGE_TOKENS`` tokens. Adjacent pages of a slab are one view, so the pool gives a
sequence the page after its last one where that is free, and leaves room behind a new sequence.
Source: Kwon et al. 2023, section 4.

A slab on a CPU is a range of addresses: a page takes memory when it is written, and the pool gives that back with the
page. The system does so in whole pages of its own, so memory is counted in grains: as few pages of the pool as fill
some of the system's. On another device a slab is one grain.
"""

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE_TOKENS = 64
"""Tokens of one page. On one core, attention over pages that do not adjoin costs 48 % more than over one block with
pages of 64, 15 % with pages of 256; pages that adjoin cost nothing, and small pages waste less at the end."""
SHORT_RUN = 16
"""Pages of a run in which a sequence soon has to go on elsewhere."""
MOST_ROOM = 64
"""Pages that are left to grow into before a new sequence, at most."""
SLAB_BYTES = 2**28
"""Bytes of one slab, at most."""
_LEAST_SLABS = 16
"""Slabs that a pool's limit has room for, at least."""


@dataclass(frozen=True)
class PageKind:
    """The properties that pages of one slab have in common. The key of the pool's slabs."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return PAGE_TOKENS * self.token_bytes


@dataclass(eq=False)
class Slab:
    """Pages side by side: slot s of a slab is slot s % ``PAGE_TOKENS`` of its page s // ``PAGE_TOKENS``."""

    kind: PageKind
    keys: Tensor = field(repr=False)
    """``[Hkv, slots, D]``"""
    values: Tensor = field(repr=False)
    """``[Hkv, slots, Dv]``"""
    users: NDArray[np.int32] = field(repr=False)
    """For each page, the number of block tables that use it."""
    grain: int
    """Pages whose memory is taken and given back together."""
    memory: tuple[mmap.mmap, ...] = field(default=(), repr=False)
    """The memory of keys and values on a CPU."""

    @classmethod
    def of(cls, kind: PageKind, pages: int) -> "Slab":
        """A slab of at least this many unused pages."""
        if kind.device.type == "cpu":
            return cls._mapped(kind, pages)
        slots = pages * PAGE_TOKENS
        keys, values = (  # as kernels with block tables take it
            torch.empty(slots, kind.kv_heads, width, dtype=kind.dtype, device=kind.device).transpose(0, 1)
            for width in (kind.key_dim, kind.value_dim)
        )
        return cls(kind, keys, values, np.zeros(pages, np.int32), pages)

    @classmethod
    def _mapped(cls, kind: PageKind, pages: int) -> "Slab":
        """A slab on a CPU. Its grains lie one behind the other in each head, from a border of the system's pages on."""
        rows = [PAGE_TOKENS * width * kind.dtype.itemsize for width in (kind.key_dim, kind.value_dim)]
        grain = math.lcm(*(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row) for row in rows))
        pages = -(-pages // grain) * grain
        memory: list[mmap.mmap] = []
        tensors: list[Tensor] = []
        for row in rows:
            mapped = mmap.mmap(-1, kind.kv_heads * pages * row, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take memory beside what is written
                mapped.madvise(mmap.MADV_NOHUGEPAGE)
            memory.append(mapped)
            tensors.append(torch.frombuffer(mapped, dtype=kind.dtype).view(kind.kv_heads, pages * PAGE_TOKENS, -1))
        keys, values = tensors
        return cls(kind, keys, values, np.zeros(pages, np.int32), grain, tuple(memory))

    @property
    def grain_bytes(self) -> int:
        """Bytes of one grain."""
        return self.grain * self.kind.page_bytes

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return int(np.count_nonzero(self.users))

    def around(self, first: int, stop: int) -> slice:
        """The pages of the grains in which these lie."""
        return slice(first // self.grain * self.grain, -(-stop // self.grain) * self.grain)

    def grains(self, users: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each grain of whole grains of pages, True if a page of it is in use."""
        return np.asarray(users.reshape(-1, self.grain).any(1))

    def release(self, first: int, stop: int) -> None:
        """Give the memory of whole grains of pages, which hold nothing, back to the system."""
        for mapped in self.memory:
            head = len(mapped) // self.kind.kv_heads
            page = head // len(self.users)
            for start in range(0, len(mapped), head):
                mapped.madvise(mmap.MADV_DONTNEED, start + first * page, (stop - first) * page)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The first page and the number of pages of each run of unused pages."""
        for start, stop in _runs(self.users == 0):
            yield start, stop - start

    def unused_from(self, page: int, most: int) -> int:
        """The number of unused pages from this one on, at most ``most``."""
        users = self.users[page : page + most]
        used = np.flatnonzero(users)
        return int(used[0]) if used.size else len(users)


@dataclass(frozen=True, slots=True)
class Pages:
    """Adjacent pages of one slab."""

    slab: Slab
    first: int
    count: int

    @property
    def stop(self) -> int:
        """The page after the last."""
        return self.first + self.count


class PagePool:
    """All pages of one engine. Used from the event loop only."""

    def __init__(self, limit: int = SLAB_BYTES * _LEAST_SLABS) -> None:
        """``limit``: bytes that pages may take."""
        self.bytes = 0
        """Bytes of the pages in use."""
        self.held = 0
        """Bytes of memory that these take, with the rest of their grains."""
        self.pages = 0
        """Number of pages in use."""
        self.shared_pages = 0
        """Number of pages that more than one block table uses."""
        self.hits = self.misses = 0
        """Pages that were found by their name, and that were not."""
        self._limit = limit
        self._slabs: dict[PageKind, list[Slab]] = {}
        self._by_name: dict[bytes, Pages] = {}
        self._names: dict[tuple[Slab, int], bytes] = {}
        """The name of each page that has one. A page keeps it until it is free or written again."""

    def take(self, kind: PageKind, count: int, after: Pages | None = None) -> list[Pages]:
        """Take unused pages, in runs as long as possible, and from the page after ``after`` on if it is unused."""
        taken: list[Pages] = []
        if after is not None and (here := after.slab.unused_from(after.stop, count)):
            taken.append(self._use(after.slab, after.stop, here))
            count -= here
        while count:
            slab, first, room = self._largest_gap(kind, count)
            here = min(count, room)
            if first and room > here:  # leave room to grow for the sequence before the gap
                first += min((room - here) // 2, MOST_ROOM)
            taken.append(self._use(slab, first, here))
            count -= here
        return taken

    def share(self, pages: Pages) -> None:
        """Count one more user of pages in use."""
        users = pages.slab.users[pages.first : pages.stop]
        users += 1
        self.shared_pages += int(np.count_nonzero(users == 2))

    def give_back(self, pages: Pages) -> None:
        """Count one user less, and give the memory of what nobody uses back. A slab without users is freed."""
        slab = pages.slab
        users = slab.users[pages.first : pages.stop]
        users -= 1
        freed = pages.count - int(np.count_nonzero(users))
        self.shared_pages -= int(np.count_nonzero(users == 1))
        if not freed:
            return
        self._count(slab, -freed)
        if self._names:
            for page in range(pages.first, pages.stop):
                if not slab.users[page]:
                    self.forget_name(slab, page)
        self._release(slab, pages)
        if not slab.users.any():
            slabs = self._slabs[slab.kind]
            slabs.remove(slab)
            if not slabs:
                del self._slabs[slab.kind]

    def _release(self, slab: Slab, pages: Pages) -> None:
        """Give back the grains that no page holds any more, after a user of these pages has gone."""
        around = slab.around(pages.first, pages.stop)
        unused = ~slab.grains(slab.users[around])
        self.held -= int(np.count_nonzero(unused)) * slab.grain_bytes
        for start, stop in _runs(unused):
            slab.release(around.start + start * slab.grain, around.start + stop * slab.grain)

    def named(self, name: bytes, page: Pages) -> Pages:
        """The page of this name; if there is none, this full page is it from now on."""
        found = self._by_name.get(name)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        self._by_name[name] = page
        self._names[page.slab, page.first] = name
        return page

    def forget_name(self, slab: Slab, page: int) -> None:
        """Let a page have no name: it is free, or its tokens are about to change."""
        if (name := self._names.pop((slab, page), None)) is not None:
            del self._by_name[name]

    def _use(self, slab: Slab, first: int, count: int) -> Pages:
        around = slab.around(first, first + count)
        fresh = ~slab.grains(slab.users[around])
        self.held += int(np.count_nonzero(fresh)) * slab.grain_bytes
        slab.users[first : first + count] = 1
        self._count(slab, count)
        return Pages(slab, first, count)

    def _count(self, slab: Slab, pages: int) -> None:
        self.pages += pages
        self.bytes += pages * slab.kind.page_bytes

    def _largest_gap(self, kind: PageKind, wanted: int) -> tuple[Slab, int, int]:
        """The slab, first page and length of the longest run of unused pages, or of a new slab.

        On a CPU, where unused addresses cost nothing, a new slab takes the place of a short run once an eighth of the
        old slab is used: sequences in many runs take longer.
        """
        slabs, on_cpu = self._slabs.setdefault(kind, []), kind.device.type == "cpu"
        gaps = ((room, -index, slab, first) for index, slab in enumerate(slabs) for first, room in slab.gaps())
        room, _, slab, first = max(gaps, key=lambda each: each[:2], default=(0, 0, None, 0))
        if slab is not None and (room >= max(wanted, SHORT_RUN) or not on_cpu or 8 * slab.used < len(slab.users)):
            return slab, first, room
        size = SLAB_BYTES if on_cpu else min(SLAB_BYTES, self._limit // _LEAST_SLABS)
        slab = Slab.of(kind, max(size // kind.page_bytes, wanted))
        slabs.append(slab)
        return slab, 0, len(slab.users)


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The start and the stop of each run of true flags."""
    padded = np.concatenate(([False], flags, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
