"""The rule of admission in simulation: a million random requests, against the budget that the server uses.

The coroutines of ``Budget.acquire`` are stepped by hand, so that what an event loop does between two steps (a release
before a woken request goes on, a cancellation before either) happens in every order, and quickly.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field

from attention_contract.errors import AttentionError
from attention_service.runtime.scheduling.budget import Budget

TOTAL, DEVICE, MOST_WAITING = 2**30, 3 * 2**30, 64


@dataclass(eq=False)
class Request:
    """One request, from its arrival to its end."""

    number: int
    need: int
    module: bool
    steps: Coroutine
    turn: asyncio.Future | None = None


@dataclass
class World:
    """Requests by their state, and what they hold by a count of their own."""

    rng: random.Random
    waiting: list[Request] = field(default_factory=list)
    woken: list[Request] = field(default_factory=list)
    given_up: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    modules: list[int] = field(default_factory=list)
    resident: int = 0
    held: int = 0
    last: int = -1
    """The number of the last request that got memory after it had waited."""
    ends: Counter = field(default_factory=Counter)
    peak: int = 0

    def __post_init__(self):
        self.budget = Budget(TOTAL, DEVICE, lambda: self.resident, MOST_WAITING)

    # what happens

    def arrive(self, number):
        need = int(math.exp(self.rng.uniform(0, math.log(2 * DEVICE))))
        module = self.rng.random() < 0.02
        request = Request(number, need >> 4 if module else need, module, None)
        request.steps = self.budget.acquire(request.need)
        waits = self.budget.waiting
        try:
            request.turn = request.steps.send(None)
        except StopIteration:
            assert not self.waiting, "overtook those that wait"
            self._admitted(request)
        except AttentionError as refusal:
            self._refused(request, refusal.code, waits)
        else:
            room = TOTAL - self.resident - self.held
            assert self.waiting or self.given_up or request.need > room, "waits though it would fit"
            self.waiting.append(request)

    def complete(self):
        request = self._take(self.running)
        if request.module:  # it is resident before what its making needed is given back
            self.resident += request.need
            self.modules.append(request.need)
        self.held -= request.need
        self.ends["done"] += 1
        self.budget.release(request.need)
        self._look()

    def delete(self):
        self.resident -= self._take(self.modules)
        self.budget.wake()
        self._look()

    def resume(self):
        """A request whose turn came goes on."""
        request = self._take(self.woken)
        try:
            request.steps.send(None)
        except StopIteration:
            self.running.append(request)
        except AttentionError as refusal:
            self.ends[f"late {refusal.code}"] += 1

    def give_up_waiting(self):
        """As a task is cancelled: its future at once, its code a while later."""
        request = self._take(self.waiting)
        request.turn.cancel()
        self.given_up.append(request)

    def give_up_woken(self):
        self._cancelled(self._take(self.woken), had=True)

    def notice(self):
        """The code of a request that was given up while it waited hears of it."""
        self._cancelled(self._take(self.given_up), had=False)

    # how it is followed

    def _cancelled(self, request, *, had):
        refused = request.turn.exception() if had else None
        got = had and refused is None
        self.held -= request.need * got
        try:
            request.steps.throw(asyncio.CancelledError())
        except asyncio.CancelledError:
            self.ends["cancelled" if refused is None else f"late {refused.code}"] += 1
        else:
            raise AssertionError("a cancelled request went on")
        self._look()

    def _refused(self, request, code, waits):
        self.ends[code] += 1
        if request.need > DEVICE:
            assert code == "never_fits"
        elif request.need > TOTAL - self.resident:
            assert code == "over_budget"
        else:
            assert (code, waits >= MOST_WAITING) == ("overloaded", True)

    def _take(self, what):
        at = self.rng.randrange(len(what))
        if what is not self.waiting:  # the order of those that wait is the point
            what[at], what[-1] = what[-1], what[at]
            return what.pop()
        return what.pop(at)

    def _admitted(self, request):
        self.held += request.need
        self.running.append(request)

    def _look(self):
        """Whose turn has come: those that have waited longest, and nobody else."""
        while self.waiting and self.waiting[0].turn.done():
            request = self.waiting.pop(0)
            if request.turn.exception() is None:
                assert request.number > self.last, "got its turn before one that came first"
                self.last = request.number
                self.held += request.need
            self.woken.append(request)
        assert not any(request.turn.done() for request in self.waiting), "one further back got its turn"

    def check(self):
        """Memory is neither exceeded nor lost, and nobody waits for what is there."""
        budget = self.budget
        assert budget.in_flight == self.held
        assert self.held + self.resident <= TOTAL
        self.peak = max(self.peak, self.held + self.resident)
        if self.waiting and not self.given_up:
            assert self.waiting[0].need > budget.free
            assert self.held > 0, "waits for nobody"


def simulate(requests, seed):
    """Play this many requests to their end. Returns the world as it is then."""
    world, number = World(random.Random(seed)), 0
    others = (
        (world.complete, world.running, 8),
        (world.resume, world.woken, 16),
        (world.notice, world.given_up, 8),
        (world.give_up_waiting, world.waiting, 1),
        (world.give_up_woken, world.woken, 1),
        (world.delete, world.modules, 0.2),
    )
    events = [(event, of) for event, of, _ in others]
    weights = [weight for *_, weight in others]
    while number < requests:
        crowd = 1 + 15 * (number // 1000 % 2)  # a quiet time and a crowded one in turn
        for _ in range(world.rng.randrange(crowd + 1)):
            world.arrive(number)
            number += 1
        for event, of in world.rng.choices(events, weights, k=4):
            if of:
                event()
                world.check()
    for event, of in ((world.resume, world.woken), (world.notice, world.given_up)) * 2:
        while of:
            event()
    while world.running or world.woken or world.given_up:
        for event, of in events[:3]:
            if of:
                event()
                world.check()
    return world


def test_a_million_random_requests_never_exceed_the_budget():
    async def play():
        return simulate(1_000_000, seed=0)

    world = asyncio.run(play())
    assert (world.budget.in_flight, world.budget.waiting, world.held) == (0, 0, 0)
    assert (world.waiting, world.running, world.woken, world.given_up) == ([], [], [], [])
    assert world.ends.total() >= 1_000_000  # each ended once, in one way
    assert world.peak > 0.99 * TOTAL, "the budget was never full"
    refusals = world.budget.refused
    for code in ("never_fits", "over_budget", "overloaded"):
        assert refusals[code] == world.ends[code] + world.ends[f"late {code}"] > 1000
    assert world.ends["late over_budget"] > 0
    assert min(world.ends["done"], world.ends["cancelled"]) > 10_000
