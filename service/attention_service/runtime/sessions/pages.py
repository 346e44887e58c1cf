"""Pages: the memory of sessions, in slabs, counted by how many sequences use each.

A page holds the keys and values of ``PAGE_TOKENS`` tokens. Adjacent pages of a slab are one view, so the pool gives a
sequence the page after its last one where that is free, and leaves room behind a new sequence.
Source: Kwon et al. 2023, section 4.
"""

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
"""Bytes of one slab. On a CPU a page takes memory only once it is written."""


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
    written: int = 0
    """The page after the last that was ever used."""

    @classmethod
    def of(cls, kind: PageKind, pages: int) -> "Slab":
        """A slab of this many unused pages."""
        slots = pages * PAGE_TOKENS

        def empty(width: int) -> Tensor:
            if kind.device.type == "cuda":  # as kernels with block tables take it
                return torch.empty(slots, kind.kv_heads, width, dtype=kind.dtype, device=kind.device).transpose(0, 1)
            return torch.empty(kind.kv_heads, slots, width, dtype=kind.dtype, device=kind.device)

        return cls(kind, empty(kind.key_dim), empty(kind.value_dim), np.zeros(pages, np.int32))

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return int(np.count_nonzero(self.users))

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The first page and the number of pages of each run of unused pages."""
        free = np.concatenate(([False], self.users == 0, [False]))
        edges = np.flatnonzero(free[1:] != free[:-1])
        for start, stop in edges.reshape(-1, 2).tolist():
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

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of the pages in use."""
        self.pages = 0
        """Number of pages in use."""
        self.hits = self.misses = 0
        """Pages that were found by their name, and that were not."""
        self._slabs: dict[PageKind, list[Slab]] = {}
        self._by_name: dict[bytes, Pages] = {}
        self._names: dict[tuple[Slab, int], bytes] = {}
        """The name of each page that has one. A page keeps it until it is free or written again."""

    @property
    def shared_pages(self) -> int:
        """Number of pages that more than one block table uses."""
        return sum(int((slab.users > 1).sum()) for slabs in self._slabs.values() for slab in slabs)

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
        pages.slab.users[pages.first : pages.stop] += 1

    def give_back(self, pages: Pages) -> None:
        """Count one user less. A slab without users is freed."""
        slab = pages.slab
        users = slab.users[pages.first : pages.stop]
        users -= 1
        freed = pages.count - int(np.count_nonzero(users))
        self._count(slab, -freed)
        if freed and self._names:
            for page in range(pages.first, pages.stop):
                if not slab.users[page]:
                    self.forget_name(slab, page)
        if freed and not slab.users.any():
            slabs = self._slabs[slab.kind]
            slabs.remove(slab)
            if not slabs:
                del self._slabs[slab.kind]

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
        slab.users[first : first + count] = 1
        slab.written = max(slab.written, first + count)
        self._count(slab, count)
        return Pages(slab, first, count)

    def _count(self, slab: Slab, pages: int) -> None:
        self.pages += pages
        self.bytes += pages * slab.kind.page_bytes

    def _largest_gap(self, kind: PageKind, wanted: int) -> tuple[Slab, int, int]:
        """The slab, first page and length of the longest run of unused pages, or of a new slab.

        Pages that were written before come first: on a CPU, others take memory only once they are written. Where the
        longest run is short, a new slab takes its place once an eighth of the old one is used: sequences in many runs
        take longer.
        """
        slabs = self._slabs.setdefault(kind, [])
        gaps = [(room, -index, slab, first) for index, slab in enumerate(slabs) for first, room in slab.gaps()]
        written = [(min(room, slab.written - first), index, slab, first) for room, index, slab, first in gaps]
        for found in (written, gaps):
            room, _, slab, first = max(found, key=lambda each: each[:2], default=(0, 0, None, 0))
            if slab is not None and room >= max(wanted, SHORT_RUN):
                return slab, first, room
        if slab is not None and room and (kind.device.type != "cpu" or 8 * slab.used < len(slab.users)):
            return slab, first, room
        slab = Slab.of(kind, max(SLAB_BYTES // kind.page_bytes, wanted))
        slabs.append(slab)
        return slab, 0, len(slab.users)
