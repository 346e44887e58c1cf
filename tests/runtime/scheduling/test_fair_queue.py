"""Fair queues: callers who wait at the same time get the same amount of a resource."""

from collections import Counter
from dataclasses import dataclass

import pytest

from attention_service.runtime.scheduling.fair_queue import FairQueue


@dataclass(eq=False)
class IfRequested:
    caller: str
    amount: float = 1.0


def begun(queue):
    item = queue.first()
    queue.begin(item, item.amount)
    return item


def filled(*items):
    queue = FairQueue()
    for item in items:
        queue.add(item)
    return queue


@pytest.mark.parametrize("amounts", [{"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.01}, {"a": 3.0, "b": 0.5, "c": 0.1}])
def test_requests_of_any_size_get_the_same_amount(amounts):
    queue, got = filled(*(IfRequested(*each) for each in amounts.items() for _ in range(2))), Counter()
    while sum(got.values()) < 200:
        item = begun(queue)
        got[item.caller] += item.amount
        queue.add(IfRequested(item.caller, item.amount))
    fair = sum(got.values()) / len(amounts)
    assert all(abs(amount - fair) <= max(amounts.values()) + 1e-9 for amount in got.values())


def test_requests_of_one_caller_keep_their_order(rng):
    items = [IfRequested("a", float(amount)) for amount in rng.random(50)]
    queue = filled(*items)
    assert list(queue) == items
    assert [begun(queue) for _ in items] == items
    assert not queue


def test_who_comes_later_is_next_but_gets_nothing_for_the_past():
    queue = filled(*(IfRequested("early") for _ in range(20)))
    for _ in range(10):
        begun(queue)
    for _ in range(5):
        queue.add(IfRequested("late"))
    assert Counter(begun(queue).caller for _ in range(8)) == {"early": 4, "late": 4}


def test_what_ends_before_it_began_counts_nothing():
    items = [IfRequested("a", 100.0) for _ in range(10)]
    queue = filled(*items)
    for item in items:
        assert item in queue
        queue.remove(item)
        assert item not in queue
    for caller in "abab":
        queue.add(IfRequested(caller))
    assert [begun(queue).caller for _ in range(4)] == ["a", "b", "a", "b"]


def test_callers_who_left_are_forgotten_and_those_in_debt_are_not():
    queue = filled(IfRequested("in debt", 1e6))
    begun(queue)
    for number in range(5000):
        queue.add(IfRequested(str(number)))
        queue.add(IfRequested(str(number)))
        begun(queue), begun(queue)
    assert len(queue._tags) < 1100
    queue.add(IfRequested("in debt"))
    queue.add(IfRequested("new"))
    assert begun(queue).caller == "new"
