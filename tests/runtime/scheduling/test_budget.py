"""The memory budget: never exceeded, fair in order, refused early, given back whatever happens."""

import asyncio
import random

import pytest

from attention_contract.errors import NeverFits, OverBudget, Overloaded
from attention_service.runtime.scheduling.budget import Budget


def make(total=100, device=1000, resident=0, waiting=8):
    return Budget(total, device, lambda: resident, waiting)


def test_what_never_fits_is_refused_with_the_numbers():
    budget = make(resident=40)
    with pytest.raises(OverBudget) as refusal:
        budget.check(61)
    assert refusal.value.facts == {"needed_bytes": 61, "limit_bytes": 60}
    with pytest.raises(NeverFits):
        budget.check(1001)
    budget.check(60)


def test_waiting_is_in_order_and_a_small_one_does_not_overtake():
    async def play():
        budget, order = make(), []

        async def hold(name, need):
            await budget.acquire(need)
            order.append(name)
            await asyncio.sleep(0)
            budget.release(need)

        await budget.acquire(80)
        tasks = [asyncio.create_task(hold(name, need)) for name, need in (("large", 90), ("small", 10))]
        await asyncio.sleep(0.01)
        assert order == []
        budget.release(80)
        await asyncio.gather(*tasks)
        assert order == ["large", "small"]
        assert budget.in_flight == 0

    asyncio.run(play())


def test_one_too_many_is_turned_away():
    async def play():
        budget = make(waiting=2)
        await budget.acquire(100)
        tasks = [asyncio.create_task(budget.acquire(50)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await budget.acquire(1)
        budget.release(100)
        await asyncio.gather(*tasks)
        assert budget.in_flight == 100

    asyncio.run(play())


def test_a_waiter_that_no_longer_can_fit_is_told():
    async def play():
        resident = 0
        budget = Budget(100, 1000, lambda: resident, 8)
        await budget.acquire(60)
        waiter = asyncio.create_task(budget.acquire(60))
        await asyncio.sleep(0)
        resident = 50
        budget.release(60)
        with pytest.raises(OverBudget):
            await waiter
        assert budget.in_flight == 0

    asyncio.run(play())


def test_who_gave_up_no_longer_counts_among_those_that_wait():
    async def play():
        budget = make(waiting=2)
        await budget.acquire(100)
        tasks = [asyncio.create_task(budget.acquire(50)) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert budget.waiting == 1
        tasks.append(asyncio.create_task(budget.acquire(40)))
        await asyncio.sleep(0)
        budget.release(100)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.in_flight == 90

    asyncio.run(play())


def test_memory_that_a_module_leaves_goes_to_those_that_wait():
    async def play():
        resident = 30
        budget = Budget(100, 1000, lambda: resident, 8)
        await budget.acquire(50)
        waiter = asyncio.create_task(budget.acquire(40))
        await asyncio.sleep(0)
        resident = 0
        budget.wake()
        await waiter
        assert budget.in_flight == 90

    asyncio.run(play())


def test_refusals_are_counted_by_their_code():
    async def play():
        budget = make(waiting=1)
        await budget.acquire(100)
        waiting = asyncio.create_task(budget.acquire(1))
        await asyncio.sleep(0)
        for need in (101, 1001, 1, 2):
            with pytest.raises((OverBudget, NeverFits, Overloaded)):
                await budget.acquire(need)
        assert budget.refused == {"over_budget": 1, "never_fits": 1, "overloaded": 2}
        budget.release(100)
        await waiting

    asyncio.run(play())


def test_the_budget_holds_under_random_work_and_cancellation():
    async def play():
        rng = random.Random(0)
        budget = make(waiting=10_000)
        peak = 0

        async def work():
            nonlocal peak
            need = rng.randint(1, 100)
            await budget.acquire(need)
            try:
                peak = max(peak, budget.in_flight)
                assert budget.in_flight <= budget.total
                await asyncio.sleep(rng.random() / 1000)
            finally:
                budget.release(need)

        tasks = [asyncio.create_task(work()) for _ in range(400)]
        await asyncio.sleep(0)
        for task in rng.sample(tasks, 150):
            task.cancel()
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert 0 < peak <= 100
        assert (budget.in_flight, budget.waiting, budget.free) == (0, 0, 100)

    asyncio.run(play())


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bodies_are_held_together_and_take_nothing_from_computations():
    budget = make(resident=20, waiting=8)
    with budget.body() as first:
        first.hold(30)
        first.hold(20)
        assert (budget.bodies, budget.free, budget.in_flight) == (50, 80, 0)
        with budget.body() as second:
            second.hold(20)
            with pytest.raises(Overloaded) as refusal:
                second.hold(20)
            assert refusal.value.facts == {"limit_bytes": 80}
            assert budget.bodies == 70
        assert budget.bodies == 50
        with pytest.raises(OverBudget) as refusal:
            first.hold(31)
        assert refusal.value.facts == {"needed_bytes": 81, "limit_bytes": 80}
        with pytest.raises(NeverFits):
            first.hold(1000)
    assert budget.bodies == 0
