"""Block tables against plain lists of tokens."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_service.core.kv_cache import pages as pages_module
from attention_service.core.kv_cache.block_table import BlockTable
from attention_service.core.kv_cache.pages import PagePool
from attention_service.core.kv_cache.past import Cached
from attention_service.core.kv_cache.slab import PAGE_TOKENS, PageKind

KIND = PageKind(1, 1, 1, torch.float64, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of a few pages, so that sequences lie in many runs."""
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 5 * KIND.page_bytes)


def _numbers(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.float64)[None, :, None]


def _append(table: BlockTable, tokens: Sequence[int], *, fails: bool = False) -> None:
    spans = table.writable(len(tokens))
    assert sum(span.tokens for span in spans) == len(tokens)
    Cached(table.spans, spans).write(_numbers(tokens), -_numbers(tokens))
    if fails:
        table.trim()
    else:
        table.append(spans)


def _read(table: BlockTable) -> list[int]:
    found = Cached(table.spans, ()).gathered()
    if found is None:
        return []
    keys, values = found
    assert torch.equal(keys, -values)
    return keys.flatten().long().tolist()


def _check(pool: PagePool, tables: Sequence[BlockTable], lists: Sequence[list[int]]) -> None:
    """Contents are those of the lists, and the pool counts each table's pages."""
    uses: Counter[tuple[int, int]] = Counter()
    for table, tokens in zip(tables, lists, strict=True):
        assert _read(table) == tokens
        assert table.tokens == len(tokens)
        uses.update((id(part.slab), page) for part in table.pages for page in range(part.first, part.stop))
    slabs = {id(slab): slab for slab in pool._slabs.get(KIND, ())}
    counted = {(key, page): int(n) for key, slab in slabs.items() for page, n in enumerate(slab.users) if n}
    assert counted == dict(uses)
    assert pool.pages == len(uses)


@pytest.mark.parametrize("seed", range(4))
def test_tables_hold_what_lists_hold(seed: int) -> None:
    rng, pool = np.random.default_rng(seed), PagePool()
    tables, lists = [BlockTable(pool, KIND)], [list[int]()]
    number = iter(range(1, 10**9))
    moves = ["append", "append", "append one", "fail", "reserve", "fork", "truncate", "drop", "clear"]
    for _ in range(120):
        at = int(rng.integers(len(tables)))
        table, tokens = tables[at], lists[at]
        move = rng.choice(moves)
        if move in {"append", "append one", "fail"}:
            count = 1 if move == "append one" else int(rng.integers(0, 160))
            new = [next(number) for _ in range(count)]
            _append(table, new, fails=move == "fail")
            if move != "fail":
                tokens += new
        elif move == "reserve":
            more = int(rng.integers(0, 300))
            missing, before = table.missing(more), pool.pages
            table.reserve(more)
            assert pool.pages == before + missing
            assert table.missing(more) == 0
        elif move == "fork" and len(tables) < 6:
            tables.append(table.fork())
            lists.append(list(tokens))
        elif move == "truncate":
            keep = int(rng.integers(0, len(tokens) + 1))
            table.truncate(keep)
            del tokens[keep:]
        elif move == "drop" and tokens:
            start, stop = sorted(int(x) for x in rng.integers(0, len(tokens) + 1, 2))
            table.drop(start, stop)
            del tokens[start:stop]
        elif move == "clear" and len(tables) > 1:
            table.clear()
            del tables[at], lists[at]
        _check(pool, tables, lists)
    for table in tables:
        table.clear()
    assert (pool.pages, pool.bytes, pool._slabs) == (0, 0, {})


def test_reserved_tokens_take_no_page_when_they_are_written() -> None:
    pool = PagePool()
    table = BlockTable(pool, KIND)
    table.reserve(200)
    taken = pool.pages
    for _ in range(200):
        _append(table, [1])
        table.trim(200 - table.tokens)
    assert pool.pages == taken == -(-200 // PAGE_TOKENS)


def test_the_page_to_copy_a_shared_one_stays_reserved() -> None:
    """A table that others share its last page with keeps the page to which it will be copied."""
    pool = PagePool()
    table = BlockTable(pool, KIND)
    _append(table, range(10))
    other = table.fork()
    table.reserve(20)
    table.trim(20)
    assert table.missing(20) == 0
    _append(table, range(10, 30))
    assert _read(table) == list(range(30))
    assert _read(other) == list(range(10))


def test_a_fork_shares_full_pages_and_copies_the_last_one() -> None:
    pool = PagePool()
    table = BlockTable(pool, KIND)
    _append(table, range(2 * PAGE_TOKENS + 5))
    fork = table.fork()
    assert pool.pages == 3
    assert pool.shared_pages == 3
    _append(fork, [7])
    assert pool.pages == 4
    assert pool.shared_pages == 2
    _append(table, [8])  # the only user of its last page now
    assert pool.pages == 4


def test_a_sequence_that_grows_alone_is_one_run() -> None:
    pool = PagePool()
    table = BlockTable(pool, KIND)
    for _ in range(4 * PAGE_TOKENS):
        _append(table, [1])
    assert len(table.spans) == 1


def test_a_page_that_is_written_again_loses_its_name() -> None:
    """A truncated sequence writes other tokens into a page that a prefix named."""
    pool = PagePool()
    table = BlockTable(pool, KIND)
    _append(table, range(PAGE_TOKENS))
    pool.named(b"first", table.page(0))
    table.truncate(10)
    _append(table, range(1000, 1000 + PAGE_TOKENS - 10))
    other = BlockTable(pool, KIND)
    _append(other, range(PAGE_TOKENS))
    assert pool.named(b"first", other.page(0)) == other.page(0)
