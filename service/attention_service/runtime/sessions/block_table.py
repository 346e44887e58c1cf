"""Block tables: where the tokens of one sequence lie.

A block table names spans of slots rather than single pages, since adjacent pages are one view.
"""

from collections.abc import Sequence

from attention_service.core.kv_cache.past import Span
from attention_service.core.kv_cache.runs import after, first_of, merged
from attention_service.core.kv_cache.slab import PAGE_TOKENS, PageKind
from attention_service.runtime.sessions.pages import PagePool, Pages


class BlockTable:
    """The slots of one sequence's tokens, in order, and unused pages for its next ones.

    Slots beyond ``tokens`` may be written at any time: nobody reads them before ``append``.
    """

    def __init__(self, pool: PagePool, kind: PageKind) -> None:
        self._pool = pool
        self._kind = kind
        self._spans: list[Span] = []
        self._spare: list[Pages] = []

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(span.tokens for span in self._spans)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The slots of the tokens."""
        return tuple(self._spans)

    @property
    def pages(self) -> list[Pages]:
        """All pages that it uses, spare ones included."""
        return [pages_of(span) for span in self._spans] + self._spare

    def missing(self, tokens: int) -> int:
        """The number of pages that must be taken before this many more tokens can be written."""
        return max(self._new_pages(tokens) - sum(pages.count for pages in self._spare), 0)

    def reserve(self, tokens: int) -> None:
        """Take pages for this many more tokens."""
        if missing := self.missing(tokens):
            after = self._spare[-1] if self._spare else pages_of(self._spans[-1]) if self._spans else None
            for pages in self._pool.take(self._kind, missing, after):
                last = self._spare[-1] if self._spare else None
                if last is not None and last.slab is pages.slab and last.stop == pages.first:
                    self._spare[-1] = Pages(last.slab, last.first, last.count + pages.count)
                else:
                    self._spare.append(pages)

    def writable(self, tokens: int) -> tuple[Span, ...]:
        """The slots of the next tokens. Takes pages, and copies the last page if others use it."""
        self.reserve(tokens)
        spans: list[Span] = []
        if tokens and (tail := self._tail()):
            if self._last_is_shared():
                self._copy_last_page()
            last = self._spans[-1]
            self._pool.forget_name(last.slab, last.stop // PAGE_TOKENS)
            spans.append(Span(last.slab, last.stop, min(tail, tokens)))
            tokens -= spans[-1].tokens
        for pages in self._spare:
            if not tokens:
                break
            here = min(tokens, pages.count * PAGE_TOKENS)
            spans.append(Span(pages.slab, pages.first * PAGE_TOKENS, here))
            tokens -= here
        return tuple(merged(spans))

    def append(self, spans: Sequence[Span]) -> None:
        """Count slots of ``writable`` as tokens from now on."""
        used = sum(span.tokens for span in spans) - self._tail()
        pages = -(-used // PAGE_TOKENS) if used > 0 else 0
        while pages:
            first = self._spare.pop(0)
            if first.count > pages:
                self._spare.insert(0, Pages(first.slab, first.first + pages, first.count - pages))
            pages -= min(first.count, pages)
        self._spans = merged([*self._spans, *spans])

    def trim(self, tokens: int = 0) -> None:
        """Give back the spare pages that are not needed for this many more tokens."""
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
        table._spans = list(self._spans)
        for span in table._spans:
            self._pool.share(pages_of(span))
        return table

    def truncate(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self._replace(first_of(self._spans, tokens))

    def drop(self, start: int, stop: int) -> None:
        """Forget the tokens from ``start`` to before ``stop``, and give back the pages that hold no others."""
        self._replace(first_of(self._spans, start) + after(self._spans, stop))

    def page(self, index: int) -> Pages:
        """The page of the tokens from ``index * PAGE_TOKENS`` on."""
        span = after(self._spans, index * PAGE_TOKENS)[0]
        return Pages(span.slab, span.start // PAGE_TOKENS, 1)

    def replace_page(self, index: int, page: Pages) -> None:
        """Use another page of the same content in the place of a full one."""
        start = index * PAGE_TOKENS
        span = Span(page.slab, page.first * PAGE_TOKENS, PAGE_TOKENS)
        self._replace([*first_of(self._spans, start), span, *after(self._spans, start + PAGE_TOKENS)])

    def clear(self) -> None:
        """Give back all pages."""
        self.trim()
        self._replace([])

    def _replace(self, spans: list[Span]) -> None:
        spans = merged(spans)  # a page counts once for a span that lies in it
        for span in spans:
            self._pool.share(pages_of(span))
        for span in self._spans:
            self._pool.give_back(pages_of(span))
        self._spans = spans

    def _new_pages(self, tokens: int) -> int:
        """The number of unused pages that this many more tokens need, that of a copied last page included."""
        if tokens <= 0:
            return 0
        tail = self._tail()
        copied = bool(tail) and self._last_is_shared()
        return copied - (-max(tokens - tail, 0) // PAGE_TOKENS)

    def _tail(self) -> int:
        """Number of slots behind the last token in its page."""
        return -self._spans[-1].stop % PAGE_TOKENS if self._spans else 0

    def _last_is_shared(self) -> bool:
        last = self._spans[-1]
        return int(last.slab.users[(last.stop - 1) // PAGE_TOKENS]) > 1

    def _copy_last_page(self) -> None:
        """Put the last page's tokens into a spare page, so that only this table uses it."""
        last = self._spans[-1]
        page = (last.stop - 1) // PAGE_TOKENS
        start = max(last.start, page * PAGE_TOKENS)
        spare = self._spare.pop(0)
        if spare.count > 1:
            self._spare.insert(0, Pages(spare.slab, spare.first + 1, spare.count - 1))
        source = Span(last.slab, start, last.stop - start)
        copy = Span(spare.slab, spare.first * PAGE_TOKENS + start % PAGE_TOKENS, source.tokens)
        copy.keys.copy_(source.keys)
        copy.values.copy_(source.values)
        self._pool.give_back(Pages(last.slab, page, 1))
        kept = [Span(last.slab, last.start, start - last.start)] if start > last.start else []
        self._spans = merged([*self._spans[:-1], *kept, copy])


def pages_of(span: Span) -> Pages:
    """The pages that hold these slots."""
    first = span.start // PAGE_TOKENS
    return Pages(span.slab, first, -(-span.stop // PAGE_TOKENS) - first)
