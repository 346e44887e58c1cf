"""The memory budget: never exceeded, fair in order, refused early, given back whatever happens."""

import asyncio
import math
import random
from collections import Counter

import pytest
from tests.bodies import body_of

from attention_contract.errors import NeverFits, NoRoom, OverBudget, Overloaded
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


async def test_waiting_is_in_order_and_a_small_one_does_not_overtake():
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


async def test_one_too_many_is_turned_away():
    budget = make(waiting=2)
    await budget.acquire(100)
    tasks = [asyncio.create_task(budget.acquire(50)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await budget.acquire(1)
    budget.release(100)
    await asyncio.gather(*tasks)
    assert budget.in_flight == 100


async def test_a_waiter_that_no_longer_can_fit_is_refused():
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


async def test_who_gave_up_no_longer_counts_among_those_that_wait():
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


async def test_memory_that_a_module_leaves_goes_to_those_that_wait():
    resident = 30
    budget = Budget(100, 1000, lambda: resident, 8)
    await budget.acquire(50)
    waiter = asyncio.create_task(budget.acquire(40))
    await asyncio.sleep(0)
    resident = 0
    budget.wake()
    await waiter
    assert budget.in_flight == 90


async def test_refusals_are_counted_by_their_code():
    budget = make(waiting=1)
    await budget.acquire(100)
    waiting = asyncio.create_task(budget.acquire(1))
    await asyncio.sleep(0)
    for need in (101, 1001, 1, 2):
        with pytest.raises((OverBudget, NeverFits, Overloaded)):
            await budget.acquire(need)
    assert budget.refused == {"over_budget": 1, "never_fits": 1, "overloaded": 2, "no_room": 0}
    budget.release(100)
    await waiting


class World:
    """Random requests, modules that come to stay and go again, and callers who leave at any moment."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.resident, self.modules = 0, []
        self.budget = Budget(100, 1000, lambda: self.resident, 40)
        self.turns, self.ends, self.peak = [], Counter(), 0

    async def request(self, number):
        need = int(math.exp(self.rng.uniform(0, math.log(150))))
        waited = not self.budget.take(need)
        try:
            if waited:
                await self.budget.acquire(need)
        except (OverBudget, Overloaded) as refusal:
            self.ends[refusal.code] += 1
            return
        if waited:
            self.turns.append(number)
        try:
            held = self.budget.in_flight + self.resident
            assert held <= self.budget.total
            self.peak = max(self.peak, held)
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
            if self.rng.random() < 0.05 and need < 20:  # a module, resident before its making gives its memory back
                self.modules.append(need)
                self.resident += need
            self.ends["done"] += 1
        finally:
            self.budget.release(need)

    def nobody_waits_for_what_is_there(self):
        first = next((turn.need for turn in self.budget._waiting if not turn.done.done()), math.inf)
        assert first > self.budget.available

    async def play(self, requests):
        tasks = []
        for number in range(requests):
            tasks.append(asyncio.create_task(self.request(number)))
            if self.rng.random() < 0.3:
                await asyncio.sleep(0)
                self.nobody_waits_for_what_is_there()
            if self.rng.random() < 0.1:
                self.rng.choice(tasks[-50:]).cancel()
            if self.modules and self.rng.random() < 0.05:
                self.resident -= self.modules.pop()
                self.budget.wake()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert found is None or isinstance(found, asyncio.CancelledError), found


@pytest.mark.sampled(seed=1)
@pytest.mark.parametrize("seed", range(3))
def test_random_work_never_exceeds_the_budget_and_has_its_turn_in_order(seed):
    world = World(seed)
    asyncio.run(asyncio.wait_for(world.play(8_000), 60))
    assert (world.budget.in_flight, world.budget.waiting) == (0, 0)
    assert world.turns == sorted(world.turns)
    assert world.peak == world.budget.total
    for code in ("over_budget", "overloaded"):
        assert world.budget.refused[code] == world.ends[code] > 40
    assert world.ends["done"] > 800 < len(world.turns)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bodies_are_held_together_and_may_have_half_of_the_budget():
    budget = make(resident=20, waiting=8)
    with body_of(budget) as first:
        first.hold(30)
        first.hold(20)
        assert (budget.bodies, budget.available, budget.in_flight) == (50, 80, 0)
        with body_of(budget) as second:
            with pytest.raises(Overloaded) as refusal:
                second.hold(1)
            assert refusal.value.facts == {"limit_bytes": 40}
            first.give_back()
            first.hold(20)
            second.hold(20)
            assert budget.bodies == 40
        first.hold(30)
        assert budget.bodies == 50
        with pytest.raises(OverBudget) as refusal:
            first.hold(31)
        assert refusal.value.facts == {"needed_bytes": 81, "limit_bytes": 80}
        with pytest.raises(NeverFits):
            first.hold(1000)
    assert budget.bodies == 0


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_replies_take_half_of_the_budget_together_or_one_takes_more():
    budget = make(resident=20)
    with body_of(budget) as first, body_of(budget) as second:
        first.hold(30)
        first.become_reply(60)
        assert (budget.bodies, budget.replies, budget.available) == (0, 60, 20)
        with pytest.raises(NoRoom) as refusal:
            second.become_reply(1)
        assert refusal.value.facts == {"limit_bytes": 40, "needed_bytes": 61}
        first.give_back()
        first.become_reply(20)
        second.become_reply(20)
        assert budget.refused["no_room"] == 1
    assert (budget.replies, budget.available) == (0, 80)


async def test_what_waits_for_memory_begins_when_a_reply_is_sent():
    budget = make(resident=20)
    with body_of(budget) as memory:
        memory.become_reply(60)
        waiting = asyncio.create_task(budget.acquire(30))
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)
    assert budget.in_flight == 30


async def test_bodies_leave_memory_for_one_computation_and_the_others_wait_for_what_they_take():
    budget = make(resident=20, waiting=8)
    with body_of(budget) as memory:
        memory.hold(40)
        await budget.acquire(60)  # nothing else runs
        waiting = asyncio.create_task(budget.acquire(10))
        await asyncio.sleep(0)
        assert not waiting.done()  # 20 are free, but bodies take them
    await asyncio.wait_for(waiting, 60)
    assert budget.in_flight == 70
