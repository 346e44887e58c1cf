"""The pool of pages against a plain count of who uses which page."""

from collections import Counter

import numpy as np
import pytest
import torch

from attention_service.core.kv_cache import pages as pages_module
from attention_service.core.kv_cache.pages import PagePool, Pages
from attention_service.core.kv_cache.slab import PAGE_TOKENS, PageKind

KIND = PageKind(2, 4, 3, torch.float32, torch.device("cpu"))
OTHER = PageKind(1, 4, 4, torch.float64, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of a few pages, so that a walk fills and frees many."""
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 12 * KIND.page_bytes)


def _each(found: list[Pages]) -> list[tuple[int, int]]:
    return [(id(part.slab), page) for part in found for page in range(part.first, part.stop)]


@pytest.mark.sampled(seed=1)
@pytest.mark.parametrize("seed", range(2))
def test_no_page_is_given_twice_and_all_come_back(seed: int) -> None:
    rng, pool = np.random.default_rng(seed), PagePool()
    held: list[Pages] = []
    uses: Counter[tuple[int, int]] = Counter()
    for _ in range(200):
        move = rng.choice(["take", "take after", "share", "give back"])
        if move.startswith("take"):
            kind, count = (KIND, OTHER)[rng.integers(2)], int(rng.integers(1, 30))
            after = None
            if move == "take after" and held:
                after = held[rng.integers(len(held))]
                kind = after.slab.kind
            found = pool.take(kind, count, after)
            each = _each(found)
            assert len(each) == len(set(each)) == count
            assert not any(uses[page] for page in each)
            assert all(part.slab.kind == kind for part in found)
            held += found
            uses.update(each)
        elif held:
            part = held[rng.integers(len(held))]
            if part.count > 1:  # any part of a run may be shared or given back
                first = int(rng.integers(part.first, part.stop))
                part = Pages(part.slab, first, int(rng.integers(1, part.stop - first + 1)))
            if move == "share":
                pool.share(part)
                held.append(part)
                uses.update(_each([part]))
            else:
                whole = held.pop(next(i for i, each in enumerate(held) if _covers(each, part)))
                rest = [
                    Pages(whole.slab, whole.first, part.first - whole.first),
                    Pages(whole.slab, part.stop, whole.stop - part.stop),
                ]
                held += [each for each in rest if each.count]
                pool.give_back(part)
                uses.subtract(_each([part]))
        kinds = {(id(part.slab), page): part.slab.kind for part in held for page in range(part.first, part.stop)}
        used = +uses
        assert pool.pages == len(used)
        assert pool.shared_pages == sum(count > 1 for count in used.values())
        assert pool.bytes == sum(kinds[page].page_bytes for page in used)
        assert pool.held == sum(
            slab.grain_bytes * int(slab.users[first : first + slab.grain].any())
            for slab in {part.slab for part in held}
            for first in range(0, len(slab.users), slab.grain)
        )
        assert all(part.slab.users[page] == uses[id(part.slab), page] for part in held for page in range(*_ends(part)))
    for part in held:
        pool.give_back(part)
    assert (pool.pages, pool.bytes, pool.held, pool.shared_pages, pool._slabs) == (0, 0, 0, 0, {})


def _covers(whole: Pages, part: Pages) -> bool:
    return whole.slab is part.slab and whole.first <= part.first and part.stop <= whole.stop


def _ends(part: Pages) -> tuple[int, int]:
    return part.first, part.stop


def test_the_page_after_the_last_one_comes_first() -> None:
    pool = PagePool()
    (first,) = pool.take(KIND, 2)
    (second,) = pool.take(KIND, 3, first)
    assert (second.slab, second.first) == (first.slab, first.stop)


def test_two_sequences_that_grow_in_turn_stay_in_one_run_each() -> None:
    pool = PagePool()
    ends = [pool.take(KIND, 1)[0], pool.take(KIND, 1)[0]]
    for _ in range(3):
        for index, end in enumerate(ends):
            (following,) = pool.take(KIND, 1, end)
            assert (following.slab, following.first) == (end.slab, end.stop)
            ends[index] = following


def test_more_pages_than_a_slab_lie_in_one_run() -> None:
    pool = PagePool()
    (found,) = pool.take(KIND, 100)
    assert found.count == 100
    assert found.slab.keys.shape == (2, len(found.slab.users) * PAGE_TOKENS, 4)


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
    assert len(pool.take(KIND, 8)) <= 2
    assert len(pool._slabs[KIND]) <= 8


def test_memory_of_freed_pages_goes_back_while_their_slab_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 2**26)
    kind = PageKind(2, 64, 48, torch.float32, torch.device("cpu"))  # a grain is a page
    pool = PagePool()
    (kept,), (freed,) = pool.take(kind, 1), pool.take(kind, 300)
    assert pool.held == 301 * kind.page_bytes
    slots = slice(freed.first * PAGE_TOKENS, freed.stop * PAGE_TOKENS)
    for pages in (kept, freed):
        pages.slab.keys[:, pages.first * PAGE_TOKENS : pages.stop * PAGE_TOKENS] = 1.0
    pool.give_back(freed)
    assert pool.held == pool.bytes == kind.page_bytes
    assert kept.slab is freed.slab
    assert not freed.slab.keys[:, slots].any()  # the system gave other memory in its place
    assert kept.slab.keys[:, kept.first * PAGE_TOKENS : kept.stop * PAGE_TOKENS].all()


def test_a_slab_of_another_device_is_held_whole_and_is_a_small_part_of_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages_module, "SLAB_BYTES", 2**26)
    kind = PageKind(2, 64, 48, torch.float32, torch.device("meta"))
    pool = PagePool(limit=64 * kind.page_bytes)
    (first,), _ = pool.take(kind, 1), pool.take(kind, 1)
    assert (pool.bytes, pool.held) == (2 * kind.page_bytes, 4 * kind.page_bytes)
    assert len(first.slab.users) == 4
