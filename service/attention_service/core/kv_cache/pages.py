"""Pages: the memory of sessions, in slabs, counted by how many sequences use each.

A page holds the keys and values of 64 or 256 tokens. Adjacent pages of a slab are one view, so the pool gives a
sequence the page after its last one where that is free, and leaves room behind a new sequence.
Source: Kwon et al. 2023, section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attention_service.core.kv_cache.slab import PageKind, Slab, runs

SHORT_RUN = 16
"""Pages of a run in which a sequence soon has to go on elsewhere."""
MOST_SPARE = 64
"""Pages that are left to grow into before a new sequence, at most."""
SLAB_BYTES = 2**28
"""Bytes of addresses of one slab on a CPU."""
LEAST_SLAB_BYTES = 2**24
"""Bytes of the first slab of a kind on another device, unless its first sequences need more."""
_LEAST_SLABS = 16
"""Slabs that a pool's limit has room for on another device, at least."""


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

    def __init__(self, limit: int = 2**32, free_bytes: Callable[[], int] | None = None) -> None:
        """``limit``: bytes that pages may take. ``free_bytes`` returns those that new slabs may take now."""
        self.paged = False
        """True if PyTorch's kernel for block tables is to read the slabs. Set before the first is made."""
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
        self._free_bytes = free_bytes
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
        own = None if kind.is_mapped or not count else self._slab_for(kind, count, after)
        while count:
            slab, first, pages = self._largest_gap(kind, count) if own is None else _largest_gap_of(own)
            here = min(count, pages)
            if first and pages > here:  # leave pages to grow for the sequence before the gap
                first += min((pages - here) // 2, MOST_SPARE)
            taken.append(self._use(slab, first, here))
            count -= here
        return taken

    def take_together(self, kind: PageKind, count: int) -> list[Pages]:
        """Take unused pages of one slab, made for them if none has so many; none if memory is short for it."""
        return [] if self._slab_for(kind, count, None) is None else self.take(kind, count)

    def spare_bytes(self, kind: PageKind) -> int:
        """Bytes of unused pages whose memory is taken nevertheless: those of slabs that take it all at once."""
        return 0 if kind.is_mapped else sum(slab.unused for slab in self._slabs.get(kind, ())) * kind.page_bytes

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
        for start, stop in runs(unused):
            slab.release(around.start + start * slab.grain, around.start + stop * slab.grain)

    def named(self, name: bytes, page: Pages) -> Pages:
        """The page of this name; if there is none, this full page is it from now on."""
        held_page = self._by_name.get(name)
        if held_page is not None:
            self.hits += 1
            return held_page
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
        slabs = self._slabs.setdefault(kind, [])
        gaps = ((length, -index, slab, first) for index, slab in enumerate(slabs) for first, length in slab.gaps())
        length, _, slab, first = max(gaps, key=lambda gap: gap[:2], default=(0, 0, None, 0))
        if slab is not None and (
            length >= max(wanted, SHORT_RUN) or not kind.is_mapped or 8 * slab.used < len(slab.users)
        ):
            return slab, first, length
        slab = self._new_slab(kind, max(SLAB_BYTES // kind.page_bytes, wanted) if kind.is_mapped else wanted)
        return slab, 0, len(slab.users)

    def _slab_for(self, kind: PageKind, wanted: int, after: Pages | None) -> Slab | None:
        """A slab with so many unused pages, wherever they lie: a sequence in one slab is read in place.

        That of the sequence's last pages if it has them, or a new one if none has. A new one is three times as large as
        all of its kind before it, so that they stay few, but takes no more than half of the room unless it must. None
        if memory is short for that too.
        """
        slabs = self._slabs.setdefault(kind, [])
        if after is not None and after.slab.unused >= wanted:
            return after.slab
        if slabs and (emptiest := max(slabs, key=lambda slab: slab.unused)).unused >= wanted:
            return emptiest
        free_bytes = self._limit if self._free_bytes is None else self._free_bytes()
        if free_bytes < wanted * kind.page_bytes:
            return None
        usual = max(LEAST_SLAB_BYTES, 3 * sum(slab.grain_bytes for slab in slabs))
        most = min(self._limit // _LEAST_SLABS, (self._limit - self.held) // 2, free_bytes // 2)
        return self._new_slab(kind, max(min(usual, most) // kind.page_bytes, wanted))

    def _new_slab(self, kind: PageKind, pages: int) -> Slab:
        slab = Slab.of(kind, pages, paged=self.paged)
        self._slabs.setdefault(kind, []).append(slab)
        return slab


def _largest_gap_of(slab: Slab) -> tuple[Slab, int, int]:
    first, length = max(slab.gaps(), key=lambda gap: gap[1])
    return slab, first, length
