"""A function that states a call is a method of the blocking and of the awaited client."""

import asyncio
import inspect
from typing import Unpack

import pytest

from attention_client.calls import Call, CallOptions
from attention_client.calls.method import Calls, Flow, method
from attention_contract import operations
from attention_contract.schemas.server import Health

LIVE, READY = Call(operations.health_live), Call(operations.health_ready)


class Fields(CallOptions, total=False):
    mask: list[int] | None


class Stated(Calls):
    def __init__(self, faults=()):
        self.faults, self.sent = list(faults), []

    def answer(self, call):
        self.sent.append(call.operation.name)
        if self.faults:
            raise self.faults.pop(0)
        return Health(status=call.operation.name.removeprefix("health_"), modules=0)

    @method
    def live(self, name: str, *, key: int = 1, **options: Unpack[Fields]) -> Call[Health]:
        """Ask once."""
        return LIVE

    @method
    def both(self, **options: Unpack[CallOptions]) -> Flow[list[str]]:
        """Ask twice, and once more to undo it."""
        try:
            return [(yield LIVE).status, (yield READY).status]
        except BaseException:
            yield LIVE
            raise


class Sync(Stated):
    def send(self, call):
        return self.answer(call)


class Async(Stated):
    _awaits = True

    async def send(self, call):
        return self.answer(call)


def result(kind, faults, ask):
    """Return what a method gives, and the operations that were sent for it."""
    made = {"sync": Sync, "async": Async}[kind](faults)
    answer = ask(made)
    return asyncio.run(answer) if kind == "async" else answer, made.sent


def test_a_call_is_sent_once_and_a_flow_returns_its_own_result(kind):
    reply, sent = result(kind, [], lambda made: made.live("a", mask=None))
    assert (reply.status, sent) == ("live", ["health_live"])
    reply, sent = result(kind, [], lambda made: made.both())
    assert (reply, sent) == (["live", "ready"], ["health_live", "health_ready"])


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_a_fault_is_raised_inside_the_flow_which_may_undo_what_it_did(kind, fault):
    made = {"sync": Sync, "async": Async}[kind]([fault()])
    with pytest.raises(fault):
        asyncio.run(made.both()) if kind == "async" else made.both()
    assert made.sent == ["health_live", "health_live"]


@pytest.mark.parametrize("owner", [Sync, Async])
def test_the_keywords_of_a_group_are_shown_one_by_one(owner):
    shown = inspect.signature(owner.live)
    assert list(shown.parameters) == ["self", "name", "key", "mask", "options"]
    assert (shown.parameters["mask"].default, shown.parameters["key"].default) == (None, 1)
    assert shown.return_annotation is Health
    assert inspect.signature(owner.both).return_annotation == list[str]
    assert inspect.getdoc(owner.live) == "Ask once."
