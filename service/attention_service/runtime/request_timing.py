"""The timing of a request: the phases of its time and the code of its problem, noted while it is answered.

``Later`` digests such observations in bulk, a moment later.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, NamedTuple, TypeVar, get_args

from attention_contract.schemas.attention import Ran

Phase = Literal["read", "decode", "queue", "compute", "encode", "write"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
Mark = tuple[Phase, float, float]
"""One phase, its begin and its end in seconds of ``time.monotonic``. A plain tuple is made fastest."""


class ModelRun(NamedTuple):
    """A run of a whole model."""

    model: str
    device: str
    dtype: str
    compute_ms: float


@dataclass(slots=True)
class RequestTiming:
    """The phases of one request, in the order of their ends. A request for several runs has some phases repeatedly."""

    marks: list[Mark] = field(default_factory=list)
    runs: list[Ran | ModelRun] = field(default_factory=list)
    """The run of each phase ``compute``, in their order."""
    bytes: int = 0
    """Bytes of the body as they came."""
    code: str | None = None
    """The code of the problem that was answered; None without one."""
    trace: str | None = None
    """The id of the trace that the request belongs to; None if it is not traced."""

    def note(self, phase: Phase, began: float) -> None:
        """Add a phase that ends now."""
        self.marks.append((phase, began, time.monotonic()))


timing: ContextVar[RequestTiming | None] = ContextVar("timing", default=None)
"""The timing of the request that is being answered. A door sets it; None where nobody asks."""


def note(phase: Phase, began: float) -> None:
    """Add a phase that ends now to the timing of the request that is being answered."""
    if (current := timing.get()) is not None:
        current.marks.append((phase, began, time.monotonic()))


def note_bytes(count: int) -> None:
    """Add bytes of a body to the timing of the request that is being answered."""
    if (current := timing.get()) is not None:
        current.bytes += count


def note_run(came: float, ran: Ran | ModelRun) -> None:
    """Add a run that ended now, and the time that it waited since it ``came``, for memory and for the device."""
    if (current := timing.get()) is not None:
        ended = time.monotonic()
        began = max(ended - ran.compute_ms * 1e-3, came)
        current.marks += ("queue", came, began), ("compute", began, ended)
        current.runs.append(ran)


NotedT = TypeVar("NotedT")

AFTER_S = 0.1
"""The longest time that an observation waits."""
MOST = 32
"""Observations that are digested at a time: more would delay a request."""


class Later(Generic[NotedT]):
    """Passes observations on in bulk, in their order. Used from the event loop only."""

    def __init__(self, see_to: Callable[[list[NotedT]], None]) -> None:
        self._see_to = see_to
        self._noted: list[NotedT] = []
        self._timer: asyncio.TimerHandle | None = None

    def note(self, noted: NotedT) -> None:
        """Add an observation."""
        self._noted.append(noted)
        if len(self._noted) >= MOST:
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AFTER_S, self.settle)

    def settle(self) -> None:
        """Pass all observations on now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        noted, self._noted = self._noted, []
        if noted:
            self._see_to(noted)
