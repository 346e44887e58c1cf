"""The entrance: requests enter in order, few in one turn, and are refused only after their patience."""

import asyncio

import pytest
from tests.fake_clock import FAKE_CLOCK

from attention_contract.errors import DeadlineExceeded, Overloaded
from attention_service.runtime.scheduling import entrance as module
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.entrance import AT_ONCE, PLACES, Entrance


@pytest.fixture
def anyio_backend():
    return FAKE_CLOCK


def make(waiting=2):
    budget = Budget(100, 1000, lambda: 0, waiting)
    return budget, Entrance(budget)


async def turns(count=4):
    for _ in range(count):
        await asyncio.sleep(0)


def fill(budget, waiting):
    """Admit one request that computes and as many that wait."""
    for _ in range(waiting + 1):
        assert budget.take(1)


async def test_who_comes_alone_enters_at_once_each_time():
    _, door = make()
    for _ in range(3 * AT_ONCE):
        assert door.enter()
        await turns(1)


async def test_few_enter_in_one_turn_and_the_others_follow_in_order():
    _, door = make(waiting=10 * AT_ONCE)
    assert all(door.enter() for _ in range(AT_ONCE))
    began = []
    for name in range(2 * AT_ONCE):
        assert not door.enter()
        door.wait("a", lambda refusal, name=name: began.append((name, refusal)))
    assert began == []
    await turns(1)
    assert len(began) == AT_ONCE
    assert not door.enter()  # others are in line
    await turns(1)
    assert began == [(name, None) for name in range(2 * AT_ONCE)]
    await turns()
    assert door.enter()


async def test_a_full_queue_lets_one_in_for_each_that_leaves():
    budget, door = make(waiting=2)
    fill(budget, 2)
    began = []
    for name in "ab":
        assert not door.enter()
        door.wait("a", lambda refusal, name=name: (began.append((name, refusal)), budget.take(1)))
    await turns()
    assert began == []
    budget.release(1)
    await turns()
    assert began == [("a", None)]
    assert budget.is_full
    budget.release(1)
    await turns()
    assert began == [("a", None), ("b", None)]
    assert len(door) == 0


async def test_a_waiter_that_gives_up_makes_way():
    budget, door = make(waiting=1)
    await budget.acquire(100)
    waiter = asyncio.create_task(budget.acquire(50))
    await turns()
    assert not door.enter()
    began = []
    door.wait("a", began.append)
    await turns()
    assert began == []
    waiter.cancel()
    await turns()
    assert began == [None]


async def test_all_are_refused_after_their_patience_and_counted(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    budget, door = make(waiting=2)
    fill(budget, 2)
    began = []
    for _ in range(2 * AT_ONCE):
        door.wait("a", began.append)
    await asyncio.sleep(0.005)
    assert began == []
    await asyncio.sleep(0.3)
    assert len(began) == 2 * AT_ONCE
    assert all(isinstance(refusal, Overloaded) and refusal.facts == {"limit": 2} for refusal in began)
    assert budget.refused[Overloaded.code] == 2 * AT_ONCE
    assert len(door) == 0
    for _ in range(3):
        budget.release(1)
    assert door.enter()
    door.wait("a", began.append)  # the timer begins again
    await turns()
    assert began[-1] is None


async def test_those_who_came_together_are_not_refused_together(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    budget, door = make(waiting=2)
    fill(budget, 2)
    times, clock = [], asyncio.get_running_loop().time
    came = clock()
    for _ in range(2 * AT_ONCE):
        door.wait("a", lambda _: times.append(clock() - came))
    await asyncio.sleep(0.3)
    assert min(times) >= 0.1
    assert max(times) - min(times) > 0.05


async def test_callers_take_turns():
    _, door = make(waiting=10 * AT_ONCE)
    assert all(door.enter() for _ in range(AT_ONCE))
    began = []
    for name in ["many"] * 2 * AT_ONCE + ["few"] * 3 + ["one"]:
        door.wait(name, lambda _, name=name: began.append(name))
    await turns(1)
    assert began[:8] == ["many", "few", "one", "many", "few", "many", "few", "many"]
    await turns()
    assert began[8:] == ["many"] * (2 * AT_ONCE - 4)


async def test_beyond_the_line_the_newest_is_let_in_when_the_line_is_empty_and_the_others_are_refused(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    count = PLACES + 2 * AT_ONCE
    budget, door = make(waiting=0)
    fill(budget, 0)
    answered, refused = [], []
    for name in range(count):
        door.wait("a", lambda refusal, name=name: (answered if refusal is None else refused).append(name))
    with monkeypatch.context() as open_door:
        open_door.setattr(Budget, "open_slots", PLACES + 10)
        await turns(10)
        assert answered[:PLACES] == [*range(PLACES)]
        assert answered[PLACES:] == [*range(count - 1, PLACES - 1, -1)]


async def test_a_caller_with_few_requests_has_a_place_beside_one_with_many():
    budget, door = make(waiting=AT_ONCE)
    fill(budget, AT_ONCE)
    began = []
    for name in ["many"] * 10 * PLACES + ["few"] * 3:
        door.wait(name, lambda _, name=name: began.append(name))
    for _ in range(6):
        budget.release(1)
    await turns(1)
    assert began == ["many", "few"] * 3


async def test_who_allows_less_time_is_refused_when_it_is_over():
    budget, door = make(waiting=0)
    fill(budget, 0)
    began = []
    door.wait("a", began.append, 0.01)
    door.wait("a", began.append, 1000)
    await asyncio.sleep(0.1)
    assert [type(refusal) for refusal in began] == [DeadlineExceeded]
    assert len(door) == 1


@pytest.mark.parametrize("waiting", [0, 1, 2, 3])
def test_places_are_those_left_in_the_queue(waiting):
    budget, _ = make(waiting=2)
    fill(budget, min(waiting, 2))
    assert (budget.open_slots, budget.is_full) == (max(2 - waiting, 0), waiting >= 2)
