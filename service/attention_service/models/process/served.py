"""A loaded model as the loop of its process uses it: requests that are checked and priced, runs, and answers."""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from typing import Any, NamedTuple, Protocol

from attention_contract.base import WireModel
from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.schemas.recordings import RecordingFile
from attention_service.cost import Estimate
from attention_service.models.worker_messages import Piece


class RunTime(NamedTuple):
    """The time of a request beside its prediction, in milliseconds."""

    purpose: Computation
    predicted: Estimate
    measured_ms: float

    def facts(self) -> dict[str, Any]:
        """Return it as the server reads it."""
        return {"purpose": self.purpose, "predicted_ms": astuple(self.predicted), "measured_ms": self.measured_ms}


class Answer(NamedTuple):
    """The answer to a request."""

    reply: WireModel | None = None
    """None of a generation, whose events are its answer."""
    recording: RecordingFile | None = None
    """To be stored, if the request keeps its run."""
    last: Sequence[dict[str, Any]] | None = None
    """The last objects of a generation; the very last gets the id of the recording."""
    tokens: int = 0
    """The number of generated tokens."""
    written: tuple[str, Sequence[Piece]] | None = None
    """The media type and the pieces of the reply, if it was written beside the loop."""
    time: RunTime | None = None
    """None if its passes were shared and another answer tells of them, or nothing was predicted."""


class Running(Protocol):
    """A generation, which gets its answer turn by turn, beside others."""

    @property
    def unread(self) -> int:
        """The tokens of its prompts that are to be read."""

    @property
    def has_ended(self) -> bool:
        """True once it has all its tokens."""

    def leave(self) -> None:
        """End before its end."""


Parts = Generator[float, None, "Answer | PricedRun"]
"""A question that takes more than a pass or two. Between its parts, others have their turns.

Each part but the last yields the time for which the process will be silent in the next one, as ``PricedRun.seconds``.
What holds for a part alone, such as hooks in the model, ends with it.
"""


class PricedRun(NamedTuple):
    """A request that was checked, and has allocated nothing."""

    needed_bytes: int
    """Estimate of the memory that it takes besides the model."""
    run: Callable[[], "Answer | PricedRun | Running | Parts"]
    """Returns work if the request can be checked only now, as one with images that had to be decoded."""
    seconds: float = 0.0
    """Estimate of the time for which the process will be silent in the first part; 0 if that is short.

    Of a generation, in a pass over its whole text.
    """
    generates: bool = False
    """True if it only begins a generation, and takes no pass."""
    group: Hashable = None
    """Equal for questions that may be answered by one pass; None for one that has its own."""
    length: int = 0
    """The tokens of its text."""
    question: Any = None
    """The question, as ``Served.answer_joined`` takes it."""

    def may_share(self, other: "PricedRun") -> bool:
        """True if it could take its pass together with other work."""
        return (self.generates and other.generates) or (self.group is not None and self.group == other.group)


Emit = Callable[[bytes], None]
"""Sends an event."""
Facts = Mapping[str, Any]
"""The facts of the message ``ask``."""


class Served(Protocol):
    """A loaded model, as its process uses it."""

    def info(self) -> dict[str, Any]:
        """Return fields of ModelInfo."""

    def held_bytes(self) -> int | None:
        """Return the memory of a GPU that the process holds; None on a CPU, where the server sees it."""

    def adapter_bytes(self) -> dict[str, int]:
        """Return the memory that each of its adapters takes, by name."""

    def prepare(self, operation: str, body: memoryview, facts: Facts, emit: Emit) -> PricedRun:
        """Check a request. ``free_bytes``: bytes that could be admitted. Raises AttentionError.

        ``adapter``: the name and the folder of the adapter that is to answer, if not the base alone.
        """

    def turn(self, *, spares_core: bool) -> AbstractContextManager[None]:
        """Compute in a block. Threads sleep beside other programs.

        ``spares_core``: without the core of a thread that reads a text. A request that is to get the same bits each
        time needs all of them, since sums of parts round otherwise.
        """

    def answer_joined(self, questions: Sequence[Any]) -> list[Answer]:
        """Answer questions of one group by one pass."""

    def read(self, running: Sequence[Any], most: int) -> dict[int, Exception]:
        """Read prompts of generations, up to so many tokens. Returns the faults by the place of a generation."""

    def step(self, running: Sequence[Any]) -> dict[int, Exception]:
        """Give each text of these generations its next token. Returns the faults by the place of a generation."""

    def finish(self, running: Any) -> Answer | PricedRun:
        """Return the end of a generation, or the work that it was the first part of."""

    def recover(self, fault: Exception) -> None:
        """Free what a failed request holds. Raises Stuck, which ends the process, if its device is lost."""


Load = Callable[[dict[str, Any], Callable[[float], None]], Served]
"""Loads a model by the facts of ``load``, and tells which share of it is loaded."""
