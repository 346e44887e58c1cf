"""The store of kept passes: within its share, given up for whoever needs the memory, dropped by age."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.fake_clock import FAKE_CLOCK

from attention_contract.errors import PassNotFound
from attention_service.runtime.callers import Caller, caller
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.services import kept_passes
from attention_service.runtime.services.kept_passes import KeptPasses


@pytest.fixture
def anyio_backend():
    return FAKE_CLOCK


def a_pass(size, module=None):
    module = None if module is None else SimpleNamespace(name=module)
    return SimpleNamespace(plan=SimpleNamespace(peak_bytes=size), bound=SimpleNamespace(module=module))


def is_kept(passes, name):
    try:
        passes.get(name)
    except PassNotFound:
        return False
    return True


@pytest.fixture
def budget():
    return Budget(400, 1000, lambda: 0, 8)


async def test_together_they_have_their_share_and_the_oldest_leaves_first(budget):
    passes = KeptPasses(budget)
    assert passes.keep(a_pass(101)) is None
    names = [passes.keep(a_pass(40)) for _ in range(3)]
    assert [is_kept(passes, name) for name in names] == [False, True, True]
    assert passes.bytes == 80
    passes.clear()
    assert passes.bytes == 0


async def test_whoever_needs_the_memory_gets_it_at_once(budget):
    passes = KeptPasses(budget)
    names = [passes.keep(a_pass(40)) for _ in range(2)]
    assert budget.available == 400
    assert budget.take(330)
    assert [is_kept(passes, name) for name in names] == [False, True]
    budget.take_more(60)
    assert not is_kept(passes, names[1])
    assert passes.keep(a_pass(20)) is None
    budget.release_more(60)
    budget.release(330)
    assert passes.keep(a_pass(20)) is not None


async def test_a_pass_that_is_too_old_is_dropped(budget):
    passes = KeptPasses(budget)
    name = passes.keep(a_pass(40))
    await asyncio.sleep(kept_passes.LONGEST_S + 1)
    assert not is_kept(passes, name)
    assert passes.bytes == 0


async def test_the_passes_of_a_module_leave_with_it(budget):
    passes = KeptPasses(budget)
    names = [passes.keep(a_pass(10, module)) for module in ("one", "two", None)]
    passes.drop_of("one")
    assert [is_kept(passes, name) for name in names] == [False, True, True]


async def test_a_pass_belongs_to_its_caller(budget):
    passes = KeptPasses(budget)
    caller.set(Caller("one"))
    name = passes.keep(a_pass(10))
    caller.set(Caller("two"))
    assert not is_kept(passes, name)
    caller.set(Caller("one"))
    assert is_kept(passes, name)
