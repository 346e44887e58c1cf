"""Opened inputs: handles, owners, and the memory that they may hold."""

import pytest

from attention_contract.errors import InvalidRequest
from attention_service.api.doors.agents import opened_inputs
from attention_service.api.doors.agents.opened_inputs import SHARE, OpenedInputs
from attention_service.runtime.scheduling.budget import Budget


def budget_of(most):
    """A budget of which opened inputs may have so many bytes."""
    total = int(most / SHARE)
    return Budget(total, total, lambda: 0, 8)


def opened(inputs, owner, text):
    return inputs.keep(owner, "tiny", {"text": text}, ["a"], [1])


def test_a_handle_is_of_its_input_and_its_owner():
    inputs = OpenedInputs(budget_of(10_000))
    handle = opened(inputs, "ann", "x")
    assert opened(inputs, "ann", "x") == handle != opened(inputs, "ann", "y")
    assert inputs.find("ann", handle).fields == {"text": "x"}
    with pytest.raises(InvalidRequest, match="other: there is no open input"):
        inputs.find("bob", handle, "other")


def test_the_least_recently_used_of_the_owner_are_dropped():
    inputs = OpenedInputs(budget_of(40_000))  # of which one caller may have a quarter
    others = opened(inputs, "bob", "z" * 4000)
    first, second = opened(inputs, "ann", "x" * 4000), opened(inputs, "ann", "y" * 4000)
    inputs.find("ann", first)
    opened(inputs, "ann", "w" * 4000)
    assert inputs.find("ann", first)
    with pytest.raises(InvalidRequest):
        inputs.find("ann", second)
    assert inputs.find("bob", others)


def test_all_together_hold_no_more_than_the_limit_and_the_newest_stays(monkeypatch):
    monkeypatch.setattr(opened_inputs, "MAX_BYTES", 10_000)
    inputs = OpenedInputs(budget_of(10**6))
    handles = {name: opened(inputs, name, "x" * 4000) for name in ("ann", "bob", "eve")}
    with pytest.raises(InvalidRequest):
        inputs.find("ann", handles["ann"])
    assert inputs.find("bob", handles["bob"])
    large = opened(inputs, "ann", "x" * 40_000)
    assert inputs.find("ann", large)


def test_they_count_in_the_memory_budget_until_they_are_dropped():
    budget = budget_of(10_000)
    inputs = OpenedInputs(budget)
    first = opened(inputs, "ann", "x" * 4000)
    held = inputs.find("ann", first).size
    assert budget.inputs == held > 4000
    assert budget.available == budget.capacity == budget.total - held
    opened(inputs, "ann", "x" * 4000)  # the same again
    assert budget.inputs == held
    assert not budget.take(budget.total - held + 1)
    assert budget.take(budget.total - held)
    budget.release(budget.total - held)
    second = opened(inputs, "bob", "y" * 8000)
    assert budget.inputs == inputs.find("bob", second).size
