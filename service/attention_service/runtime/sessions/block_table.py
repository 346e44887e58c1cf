"""Block tables: where the tokens of one sequence lie."""

from collections.abc import Sequence
from typing import NamedTuple

from attention_service.core.kv_cache.past import Span
from attention_service.core.kv_cache.runs import merged
from attention_service.core.kv_cache.slab import PAGE_TOKENS, Page, PageKind
from attention_service.runtime.sessions.pages import PagePool


class Block(NamedTuple):
    """Tokens of a sequence in adjacent slots of one page."""

    page: Page
    first: int
    tokens: int

    @property
    def stop(self) -> int:
        """The slot after the last, in its page."""
        return self.first + self.tokens


class BlockTable:
    """The blocks of one sequence's tokens, in order, and unused pages for its next ones.

    Slots beyond ``tokens`` may be written at any time: nobody reads them before ``append``.
    """

    def __init__(self, pool: PagePool, kind: PageKind) -> None:
        self.tokens = 0
        """Number of tokens."""
        self._pool = pool
        self._kind = kind
        self._blocks: list[Block] = []
        self._spare: list[Page] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        """The slots of the tokens."""
        return tuple(merged([block.page.run(block.first, block.tokens) for block in self._blocks]))

    @property
    def pages(self) -> list[Page]:
        """The page of each block, and spare ones."""
        return [block.page for block in self._blocks] + self._spare

    def missing(self, tokens: int) -> int:
        """The number of pages that must be taken before this many more tokens can be written."""
        return max(self._new_pages(tokens) - len(self._spare), 0)

    def reserve(self, tokens: int) -> None:
        """Take pages for this many more tokens."""
        if missing := self.missing(tokens):
            pages = self.pages
            self._spare += self._pool.take(self._kind, missing, pages[-1] if pages else None)

    def writable(self, tokens: int) -> tuple[Span, ...]:
        """The slots of the next tokens. Takes pages, and copies the last page if others use it."""
        self.reserve(tokens)
        spans: list[Span] = []
        if tokens and (tail := self._tail()):
            if self._blocks[-1].page.users > 1:
                self._copy_last_page()
            last = self._blocks[-1]
            self._pool.forget_name(last.page)
            spans.append(last.page.run(last.stop, min(tail, tokens)))
            tokens -= spans[-1].tokens
        for page, start in zip(self._spare, range(0, tokens, PAGE_TOKENS), strict=False):
            spans.append(page.run(0, min(tokens - start, PAGE_TOKENS)))
        return tuple(merged(spans))

    def append(self, spans: Sequence[Span]) -> None:
        """Count slots of ``writable`` as tokens from now on."""
        tokens = sum(span.tokens for span in spans)
        self.tokens += tokens
        if here := min(self._tail(), tokens):
            last = self._blocks[-1]
            self._blocks[-1] = Block(last.page, last.first, last.tokens + here)
        for start in range(here, tokens, PAGE_TOKENS):
            self._blocks.append(Block(self._spare.pop(0), 0, min(tokens - start, PAGE_TOKENS)))

    def trim(self, tokens: int = 0) -> None:
        """Give back the spare pages that are not needed for this many more tokens."""
        keep = self._new_pages(tokens)
        for page in self._spare[keep:]:
            self._pool.give_back(page)
        del self._spare[keep:]

    def fork(self) -> "BlockTable":
        """A table of the same tokens, which shares their pages."""
        table = BlockTable(self._pool, self._kind)
        table._blocks, table.tokens = list(self._blocks), self.tokens
        for block in table._blocks:
            self._pool.share(block.page)
        return table

    def truncate(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        self.drop(tokens, self.tokens)

    def drop(self, start: int, stop: int) -> None:
        """Forget the tokens from ``start`` to before ``stop``, and give back the pages that hold no others."""
        blocks, self._blocks, place = self._blocks, [], 0
        for block in blocks:
            page, first, tokens = block
            before, until = (min(max(each - place, 0), tokens) for each in (start, stop))
            place += tokens
            if before >= until:
                self._blocks.append(block)
                continue
            parts = [
                each for each in (Block(page, first, before), Block(page, first + until, tokens - until)) if each.tokens
            ]
            self._blocks += parts
            self.tokens -= until - before
            if len(parts) == 2:
                self._pool.share(page)
            elif not parts:
                self._pool.give_back(page)

    def page(self, index: int) -> Page:
        """The page of the tokens from ``index * PAGE_TOKENS`` on, of which none was dropped."""
        return self._blocks[index].page

    def replace_page(self, index: int, page: Page) -> None:
        """Use another page of the same content in the place of a full one."""
        self._pool.share(page)
        self._pool.give_back(self._blocks[index].page)
        self._blocks[index] = Block(page, 0, PAGE_TOKENS)

    def clear(self) -> None:
        """Give back all pages."""
        self.trim()
        self.truncate(0)

    def _new_pages(self, tokens: int) -> int:
        """The number of unused pages that this many more tokens need, that of a copied last page included."""
        if tokens <= 0:
            return 0
        tail = self._tail()
        copied = bool(tail) and self._blocks[-1].page.users > 1
        return copied - (-max(tokens - tail, 0) // PAGE_TOKENS)

    def _tail(self) -> int:
        """Number of slots behind the last token in its page."""
        return PAGE_TOKENS - self._blocks[-1].stop if self._blocks else 0

    def _copy_last_page(self) -> None:
        """Put the last page's tokens into a spare page, so that only this table uses it."""
        page, first, tokens = self._blocks[-1]
        spare = self._spare.pop(0)
        source, copy = page.run(first, tokens), spare.run(first, tokens)
        copy.keys.copy_(source.keys)
        copy.values.copy_(source.values)
        self._pool.give_back(page)
        self._blocks[-1] = Block(spare, first, tokens)
