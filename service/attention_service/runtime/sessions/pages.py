"""Pages: the memory of sessions, in slabs. Each page counts the block tables that use it.

Adjacent pages of a slab are one view, so the pool gives a sequence the page after its last one where that is free, and
leaves room behind a new sequence.
Source: Kwon et al. 2023, section 4.
"""

from attention_service.core.kv_cache.slab import Page, PageKind, Slab

SHORT_RUN = 4
"""Pages of a run in which a sequence soon has to go on elsewhere."""
MOST_ROOM = 16
"""Pages that are left to grow into before a new sequence, at most."""
SLAB_BYTES = 2**28
"""Bytes of one slab, at most."""
_LEAST_SLABS = 16
"""Slabs that a pool's limit has room for, at least."""


class PagePool:
    """All pages of one engine. Used from the event loop only."""

    def __init__(self, limit: int = SLAB_BYTES * _LEAST_SLABS) -> None:
        """``limit``: bytes that pages may take."""
        self.bytes = 0
        """Bytes of the pages in use."""
        self.held = 0
        """Bytes of memory that their slabs take."""
        self.pages = 0
        """Number of pages in use."""
        self.shared_pages = 0
        """Number of pages that more than one block table uses."""
        self.hits = self.misses = 0
        """Pages that were found by their name, and that were not."""
        self._limit = limit
        self._slabs: dict[PageKind, list[Slab]] = {}
        self._by_name: dict[bytes, Page] = {}

    def take(self, kind: PageKind, count: int, after: Page | None = None) -> list[Page]:
        """Take unused pages, in runs as long as possible, and from the page after ``after`` on if it is unused."""
        taken: list[Page] = []
        while len(taken) < count:
            wanted, last = count - len(taken), taken[-1] if taken else after
            if last is not None and (room := last.slab.unused_from(last.index + 1, wanted)):
                slab, first = last.slab, last.index + 1
            else:
                slab, first, room = self._largest_gap(kind, wanted)
                if first and room > wanted:  # leave room to grow for the sequence before the gap
                    first += min((room - wanted) // 2, MOST_ROOM)
            before = slab.bytes
            taken += [slab.take(index) for index in range(first, first + min(room, wanted))]
            self._count(slab, min(room, wanted), before)
        return taken

    def share(self, page: Page) -> None:
        """Count one more user of a page in use."""
        page.users += 1
        self.shared_pages += page.users == 2

    def give_back(self, page: Page) -> None:
        """Count one user less, and give the memory of a page that nobody uses back. A slab without users is freed."""
        page.users -= 1
        self.shared_pages -= page.users == 1
        if page.users:
            return
        self.forget_name(page)
        slab = page.slab
        before = slab.bytes
        slab.release(page.index)
        self._count(slab, -1, before)
        if not slab.used:
            slabs = self._slabs[slab.kind]
            slabs.remove(slab)
            if not slabs:
                del self._slabs[slab.kind]

    def named(self, name: bytes, page: Page) -> Page:
        """The page of this name; if there is none, this full page is it from now on."""
        found = self._by_name.get(name)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        page.name = name
        self._by_name[name] = page
        return page

    def forget_name(self, page: Page) -> None:
        """Let a page have no name: it is free, or its tokens are about to change."""
        if page.name is not None:
            del self._by_name[page.name]
            page.name = None

    def _count(self, slab: Slab, pages: int, before: int) -> None:
        self.pages += pages
        self.bytes += pages * slab.kind.page_bytes
        self.held += slab.bytes - before

    def _largest_gap(self, kind: PageKind, wanted: int) -> tuple[Slab, int, int]:
        """The slab, first page and length of the longest run of unused pages, or of a new slab.

        On a CPU, where unused addresses cost nothing, a new slab takes the place of a short run once an eighth of the
        old slab is used: sequences in many runs take longer.
        """
        slabs, on_cpu = self._slabs.setdefault(kind, []), kind.device.type == "cpu"
        gaps = ((room, -index, slab, first) for index, slab in enumerate(slabs) for first, room in slab.gaps())
        room, _, slab, first = max(gaps, key=lambda each: each[:2], default=(0, 0, None, 0))
        if slab is not None and (room >= max(wanted, SHORT_RUN) or not on_cpu or 8 * slab.used < len(slab.taken)):
            return slab, first, room
        size = SLAB_BYTES if on_cpu else min(SLAB_BYTES, self._limit // _LEAST_SLABS)
        slab = Slab.of(kind, max(size // kind.page_bytes, wanted))
        slabs.append(slab)
        return slab, 0, len(slab.taken)
