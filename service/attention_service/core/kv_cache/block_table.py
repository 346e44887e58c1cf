"""Block tables: where the tokens of one sequence lie.

A block table names spans of slots rather than single pages, since adjacent pages are one view.
"""

from collections.abc import Sequence
from operator import attrgetter

from attention_service.core.kv_cache.pages import PagePool, Pages
from attention_service.core.kv_cache.past import Span
from attention_service.core.kv_cache.runs import after, first_of, merged
from attention_service.core.kv_cache.slab import PageKind

_TOKENS_OF = attrgetter("tokens")


class BlockTable:
    """The slots of one sequence's tokens, in order, and unused pages for its next ones.

    Slots beyond ``tokens`` may be written at any time: nobody reads them before ``append``.
    """

    def __init__(self, pool: PagePool, kind: PageKind) -> None:
        self._pool = pool
        self._kind = kind
        self._page = kind.page_tokens
        self._spare: list[Pages] = []
        self._hold(())

    def _hold(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        """The slots of the tokens."""
        self.tokens: int = sum(map(_TOKENS_OF, spans))
        """Number of tokens."""
        self._tail = -(spans[-1].start + spans[-1].tokens) % self._page if spans else 0
        """Number of slots behind the last token in its page."""

    @property
    def pages(self) -> list[Pages]:
        """All pages that it uses, spare ones included."""
        return [*map(pages_of, self.spans), *self._spare]

    def missing(self, tokens: int) -> int:
        """The number of pages that must be taken before this many more tokens can be written."""
        missing = self._new_pages(tokens)
        for pages in self._spare if missing else ():
            missing -= pages.count
        return max(missing, 0)

    def reserve(self, tokens: int) -> None:
        """Take pages for this many more tokens."""
        if missing := self.missing(tokens):
            end = self._spare[-1] if self._spare else pages_of(self.spans[-1]) if self.spans else None
            if end is not None and not self._kind.is_mapped and end.slab.unused < missing and self._move(tokens):
                return
            for pages in self._pool.take(self._kind, missing, end):
                last = self._spare[-1] if self._spare else None
                if last is not None and last.slab is pages.slab and last.stop == pages.first:
                    self._spare[-1] = Pages(last.slab, last.first, last.count + pages.count)
                else:
                    self._spare.append(pages)

    def _move(self, tokens: int) -> bool:
        """Copy the tokens into one slab, with room for this many more: a sequence in one slab is read in place.

        False if others use its pages too, or if no slab has room.
        """
        if any((run.slab.users[run.first : run.stop] > 1).any() for run in self.pages):
            return False
        taken = self._pool.take_together(self._kind, -(-(self.tokens + tokens) // self._page))
        if not taken:
            return False
        slots = [Span(run.slab, run.first * self._page, run.count * self._page) for run in taken]
        spans, start = first_of(slots, self.tokens), 0
        for span in spans:
            slot = span.start
            for part in first_of(after(self.spans, start), span.tokens):
                _copy(part, Span(span.slab, slot, part.tokens))
                slot += part.tokens
            start += span.tokens
        self.clear()
        self._hold(merged(spans))
        self._spare = [pages_of(rest) for rest in after(slots, self.tokens + self._tail)]
        return True

    def writable(self, tokens: int) -> tuple[Span, ...]:
        """The slots of the next tokens. Takes pages, and copies the last page if others use it."""
        spans: list[Span] = []
        shared = self._last_is_shared()
        if shared or tokens > self._tail:
            self.reserve(tokens)
        if tokens and self._tail:
            if shared:
                self._copy_last_page()
            last = self.spans[-1]
            stop = last.start + last.tokens
            self._pool.forget_name(last.slab, stop // self._page)
            spans.append(Span(last.slab, stop, min(self._tail, tokens)))
            tokens -= spans[-1].tokens
        for pages in self._spare if tokens else ():
            if not tokens:
                break
            here = min(tokens, pages.count * self._page)
            spans.append(Span(pages.slab, pages.first * self._page, here))
            tokens -= here
        return tuple(merged(spans) if len(spans) > 1 else spans)

    def append(self, spans: Sequence[Span]) -> None:
        """Count slots of ``writable`` as tokens from now on."""
        slots = self.tokens + self._tail
        self._hold(merged([*self.spans, *spans]))
        pages = -((slots - self.tokens) // self._page)
        while pages > 0:
            first = self._spare.pop(0)
            if first.count > pages:
                self._spare.insert(0, Pages(first.slab, first.first + pages, first.count - pages))
            pages -= min(first.count, pages)

    def trim(self, tokens: int = 0) -> None:
        """Give back the spare pages that are not needed for this many more tokens."""
        if not self._spare:
            return
        keep = self._new_pages(tokens)
        kept: list[Pages] = []
        for pages in self._spare:
            here = min(keep, pages.count)
            if here:
                kept.append(Pages(pages.slab, pages.first, here))
            if here < pages.count:
                self._pool.give_back(Pages(pages.slab, pages.first + here, pages.count - here))
            keep -= here
        self._spare = kept

    def fork(self) -> "BlockTable":
        """A table of the same tokens, which shares their pages."""
        table = BlockTable(self._pool, self._kind)
        table._hold(self.spans)
        for span in table.spans:
            self._pool.share(pages_of(span))
        return table

    def truncate(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self._replace(first_of(self.spans, tokens))

    def drop(self, start: int, stop: int) -> None:
        """Forget the tokens from ``start`` to before ``stop``, and give back the pages that hold no others."""
        self._replace(first_of(self.spans, start) + after(self.spans, stop))

    def page(self, index: int) -> Pages:
        """The page of the tokens from ``index`` pages on."""
        span = after(self.spans, index * self._page)[0]
        return Pages(span.slab, span.start // self._page, 1)

    def replace_page(self, index: int, page: Pages) -> None:
        """Use another page of the same content in the place of a full one."""
        start = index * self._page
        span = Span(page.slab, page.first * self._page, self._page)
        self._replace([*first_of(self.spans, start), span, *after(self.spans, start + self._page)])

    def clear(self) -> None:
        """Give back all pages."""
        self.trim()
        self._replace([])

    def _replace(self, spans: list[Span]) -> None:
        spans = merged(spans)  # a page counts once for a span that lies in it
        for span in spans:
            self._pool.share(pages_of(span))
        for span in self.spans:
            self._pool.give_back(pages_of(span))
        self._hold(spans)

    def _new_pages(self, tokens: int) -> int:
        """The number of unused pages that this many more tokens need, that of a copied last page included."""
        if tokens <= 0:
            return 0
        return self._last_is_shared() - (-max(tokens - self._tail, 0) // self._page)

    def _last_is_shared(self) -> bool:
        """True if others use the last page, too, and it has slots left."""
        if not self._tail:
            return False
        last = self.spans[-1]
        return bool(last.slab.users[(last.start + last.tokens - 1) // self._page] > 1)

    def _copy_last_page(self) -> None:
        """Put the last page's tokens into a spare page, so that only this table uses it."""
        last = self.spans[-1]
        page = (last.stop - 1) // self._page
        start = max(last.start, page * self._page)
        spare = self._spare.pop(0)
        if spare.count > 1:
            self._spare.insert(0, Pages(spare.slab, spare.first + 1, spare.count - 1))
        source = Span(last.slab, start, last.stop - start)
        copy = Span(spare.slab, spare.first * self._page + start % self._page, source.tokens)
        _copy(source, copy)
        self._pool.give_back(Pages(last.slab, page, 1))
        kept = [Span(last.slab, last.start, start - last.start)] if start > last.start else []
        self._hold(merged([*self.spans[:-1], *kept, copy]))


def _copy(source: Span, into: Span) -> None:
    into.keys.copy_(source.keys)
    into.values.copy_(source.values)


def pages_of(span: Span) -> Pages:
    """The pages that hold these slots."""
    size = span.slab.kind.page_tokens
    first = span.start // size
    return Pages(span.slab, first, -(-(span.start + span.tokens) // size) - first)
