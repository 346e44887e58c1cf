"""The entrance: requests with a body wait here, not yet begun, while the server has enough to do.

A request that waits here costs its head and what the system has received of its body. A refusal costs much of an
answer: callers who ask again at once would keep the event loop busy with refusals. So a request is refused only after
some patience.

Callers take turns, each with its oldest request first. The line is short, so that an answer is not late. Those for whom
it has no place are let in, the newest first, when it is empty: most of them are refused while the rush lasts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import uniform
from typing import Final

from attention_contract.errors import AttentionError
from attention_service.runtime.scheduling.budget import Budget
from attention_service.runtime.scheduling.fair_queue import FairQueue
from attention_service.runtime.scheduling.passes import late

PATIENCE_S: Final = 2.0
"""Seconds that a request waits at the entrance, at most."""
_LEAST_PATIENCE: Final = 0.5
"""The shortest wait, as a share of the longest."""
AT_ONCE: Final = 24
"""Requests that are let in within one turn of the event loop. More would keep health checks waiting."""
PLACES: Final = 64
"""Places in the line, which its callers share. Each has one at least."""
Begin = Callable[[AttentionError | None], None]
"""Begins a request that waited: to answer it, or to refuse it with this error."""


@dataclass(eq=False, slots=True)
class _Held:
    """A request at the entrance."""

    caller: str
    begin: Begin
    patience: asyncio.TimerHandle | None = None
    """The refusal to come."""


class Entrance:
    """Lets requests in. Used from the event loop only."""

    def __init__(self, budget: Budget) -> None:
        """While as many requests as may wait do so for ``budget``, the entrance is closed."""
        self._budget = budget
        self._line: FairQueue[_Held] = FairQueue()
        self._beyond: dict[_Held, None] = {}
        """The requests for which the line had no place, in the order of their arrival."""
        self._waiting = 0
        self._entered = 0
        """Requests that were let in during this turn."""
        self._turn: asyncio.Handle | None = None
        """The end of this turn, if requests were let in or may be after it."""

    def __len__(self) -> int:
        """Return the number of requests that wait at the entrance."""
        return self._waiting

    def enter(self) -> bool:
        """Let a request in at once. False if it has to ``wait`` instead."""
        if self._waiting or self._entered >= AT_ONCE or self._budget.is_full:
            return False
        self._entered += 1
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)
        return True

    def wait(self, caller: str, begin: Begin, allowed_s: float | None = None) -> None:
        """Begin a caller's request as soon as it may enter, or with its refusal.

        It is refused after ``PATIENCE_S`` at most, or after the seconds that its caller allows if those are fewer.
        """
        held = _Held(caller, begin)
        if self._line.count(caller) < max(PLACES // max(self._line.callers, 1), 1):
            self._line.add(held)
        else:
            self._beyond[held] = None
        self._waiting += 1
        self._budget.released = self._look
        # Requests that came together are refused one after the other, so that their callers ask again like that too.
        patience = PATIENCE_S * uniform(_LEAST_PATIENCE, 1)  # noqa: S311 - no secret
        refusal: Callable[[], AttentionError] = self._budget.crowded
        if allowed_s is not None and allowed_s < patience:
            patience, refusal = allowed_s, late
        held.patience = asyncio.get_running_loop().call_later(patience, self._refuse, held, refusal)
        self._look()

    def _look(self) -> None:
        """Let in, after this turn, those for whom there is room by then."""
        if self._waiting and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn = None
        self._entered = 0
        slots = min(self._budget.open_slots, AT_ONCE) if self._waiting else 0
        while self._waiting and self._entered < slots:
            self._entered += 1
            self._let_in()
        if self._entered:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def _let_in(self) -> None:
        """Begin the first of the line, or the newest of those beyond it."""
        if self._line.size:
            held = self._line.first()
            self._line.begin(held, 1)
        else:
            held, _ = self._beyond.popitem()
        self._leave(held, None)

    def _refuse(self, held: _Held, refusal: Callable[[], AttentionError]) -> None:
        if held in self._line:
            self._line.remove(held)
        else:
            del self._beyond[held]
        self._leave(held, refusal())

    def _leave(self, held: _Held, refusal: AttentionError | None) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._budget.released = None
        if held.patience is not None:
            held.patience.cancel()
        held.begin(refusal)
