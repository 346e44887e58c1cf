"""The pool of pages against a plain count of who uses which page."""

from collections import Counter

import numpy as np
import pytest
import torch

from attention_service.core.kv_cache.slab import PAGE_TOKENS, Page, PageKind
from attention_service.runtime.sessions import pages as pages_module
from attention_service.runtime.sessions.pages import PagePool

KIND = PageKind(2, 4, 3, torch.float32, torch.device("cpu"))
OTHER = PageKind(1, 4, 4, torch.float64, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of a few pages, so that a walk fills and frees many."""
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 12 * KIND.page_bytes)


@pytest.mark.parametrize("seed", range(2))
def test_no_page_is_given_twice_and_all_come_back(seed: int) -> None:
    rng, pool = np.random.default_rng(seed), PagePool()
    held: list[Page] = []
    for _ in range(200):
        move = rng.choice(["take", "take after", "share", "give back"])
        if move.startswith("take"):
            kind, after = (KIND, OTHER)[rng.integers(2)], None
            if move == "take after" and held:
                after = held[rng.integers(len(held))]
                kind = after.slab.kind
            found = pool.take(kind, int(rng.integers(1, 30)), after)
            places = {(id(page.slab), page.index) for page in held}
            assert not places & {(id(page.slab), page.index) for page in found}
            assert all(page.slab.kind == kind for page in found)
            held += found
        elif held:
            page = held[rng.integers(len(held))]
            if move == "share":
                pool.share(page)
                held.append(page)
            else:
                held.remove(page)
                pool.give_back(page)
        uses = Counter(held)
        assert all(page.users == count for page, count in uses.items())
        assert pool.pages == len(uses) == len({(id(page.slab), page.index) for page in uses})
        assert pool.shared_pages == sum(count > 1 for count in uses.values())
        assert pool.held == pool.bytes == sum(page.slab.kind.page_bytes for page in uses)
    for page in held:
        pool.give_back(page)
    assert (pool.pages, pool.bytes, pool.held, pool.shared_pages, pool._slabs) == (0, 0, 0, 0, {})


def runs_of(pages: list[Page]) -> list[list[Page]]:
    """Adjacent pages together."""
    found: list[list[Page]] = []
    for page in pages:
        if found and found[-1][-1].slab is page.slab and found[-1][-1].index + 1 == page.index:
            found[-1].append(page)
        else:
            found.append([page])
    return found


def test_the_page_after_the_last_one_comes_first() -> None:
    pool = PagePool()
    first = pool.take(KIND, 2)
    assert len(runs_of(first + pool.take(KIND, 3, first[-1]))) == 1


def test_two_sequences_that_grow_in_turn_stay_in_one_run_each() -> None:
    pool = PagePool()
    grown = [pool.take(KIND, 1), pool.take(KIND, 1)]
    for _ in range(3):
        for pages in grown:
            pages.extend(pool.take(KIND, 1, pages[-1]))
    assert [len(runs_of(pages)) for pages in grown] == [1, 1]


def test_more_pages_than_a_slab_lie_in_one_run() -> None:
    found = PagePool().take(KIND, 100)
    assert len(found) == 100
    assert len(runs_of(found)) == 1
    assert found[0].slab.keys.shape == (2, len(found[0].slab.taken) * PAGE_TOKENS, 4)


def test_pages_of_different_kinds_share_no_slab() -> None:
    pool = PagePool()
    assert pool.take(KIND, 1)[0].slab is not pool.take(OTHER, 1)[0].slab


def test_a_name_ends_with_its_page() -> None:
    pool = PagePool()
    (first,) = pool.take(KIND, 1)
    assert pool.named(b"a", first) == first
    pool.share(first)
    pool.give_back(first)
    (second,) = pool.take(KIND, 1)
    assert pool.named(b"a", second) == first
    pool.give_back(first)
    assert pool.named(b"a", second) == second
    assert (pool.hits, pool.misses) == (1, 2)


def test_a_sequence_beside_many_short_ones_lies_in_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 400 * KIND.page_bytes)
    pool = PagePool()
    for _ in range(280):
        pool.take(KIND, 1)
    assert len(runs_of(pool.take(KIND, 8))) <= 2
    assert len(pool._slabs[KIND]) <= 8


def test_memory_of_freed_pages_goes_back_while_their_slab_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 2**26)
    kind = PageKind(2, 64, 48, torch.float32, torch.device("cpu"))
    pool = PagePool()
    (kept,), freed = pool.take(kind, 1), pool.take(kind, 50)
    assert pool.held == 51 * kind.page_bytes
    for page in (kept, *freed):
        page.run(0, PAGE_TOKENS).keys.fill_(1.0)
    for page in freed:
        pool.give_back(page)
    assert pool.held == pool.bytes == kind.page_bytes
    assert all(page.slab is kept.slab for page in freed)
    assert not any(page.run(0, PAGE_TOKENS).keys.any() for page in freed)  # the system gave other memory in its place
    assert kept.run(0, PAGE_TOKENS).keys.all()


def test_a_slab_of_another_device_is_held_whole_and_is_a_small_part_of_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 2**26)
    kind = PageKind(2, 64, 48, torch.float32, torch.device("meta"))
    pool = PagePool(limit=64 * kind.page_bytes)
    (first,), _ = pool.take(kind, 1), pool.take(kind, 1)
    assert (pool.bytes, pool.held) == (2 * kind.page_bytes, 4 * kind.page_bytes)
    assert len(first.slab.taken) == 4
