"""The steps of a model as orders of plain data, which each process of a spread model carries out alike.

What a step makes, such as the work of a request, its parts, or a generation, stays in the process and has a number, by
which later orders name it. Nothing that an order does may depend on a clock, on chance, or on whether its caller still
waits: that is decided by the first process, and said in the order.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from attention_service.core.cancellation import Cancellation, cancellable, deadline
from attention_service.models.inputs.long_texts import reading_here
from attention_service.models.process.served import Answer, Emit, Served
from attention_service.models.worker_messages import WorkerMessage


class Ended(NamedTuple):
    """The result of the last part of a question."""

    value: Any


class Orders:
    """A model, and what its steps have made."""

    def __init__(self, model: Served) -> None:
        self._model = model
        self._made: dict[int, Any] = {}

    def perform(self, order: WorkerMessage, emit: Emit = lambda _: None) -> Any:
        """Carry out an order, which nothing interrupts. Returns what it made; raises what the model does.

        ``emit``: sends the events of a request that is prepared.
        """
        for number in order.facts["forgets"]:
            self._made.pop(number, None)
        with cancellable(Cancellation(deadline())), reading_here():
            if order.kind == "prepare":
                return self._prepare(order, emit)
            return _STEPS[order.kind](self, **{name: value for name, value in order.facts.items() if name in _FIELDS})

    def _prepare(self, order: WorkerMessage, emit: Emit) -> Any:
        asked = order.facts["asked"]
        return self._kept(order.facts["number"], self._model.prepare(asked["operation"], order.body, asked, emit))

    def _info(self) -> Any:
        return self._model.info()  # takes short runs

    def _run(self, number: int) -> Any:
        return self._kept(number, self._made[number].run())

    def _next(self, number: int) -> Any:
        try:
            return next(self._made[number])
        except StopIteration as end:
            return Ended(self._kept(number, end.value))

    def _close(self, number: int) -> None:
        self._made.pop(number).close()

    def _joined(self, numbers: Sequence[int]) -> Any:
        return self._model.answer_joined([self._made[number].question for number in numbers])

    def _read(self, numbers: Sequence[int], late: Sequence[bool], most: int) -> Any:
        return self._model.read(self._told(numbers, late), most)

    def _step(self, numbers: Sequence[int], late: Sequence[bool]) -> Any:
        return self._model.step(self._told(numbers, late))

    def _finish(self, number: int) -> Any:
        return self._kept(number, self._model.finish(self._made[number]))

    def _leave(self, number: int) -> None:
        if (running := self._made.pop(number, None)) is not None:  # else it has ended, and its answer was not written
            running.leave()

    def _told(self, numbers: Sequence[int], late: Sequence[bool]) -> list[Any]:
        """Generations that know which of them have their last step."""
        running = [self._made[number] for number in numbers]
        for one, is_late in zip(running, late, strict=True):
            one.told_late = is_late
        return running

    def _kept(self, number: int, result: Any) -> Any:
        if isinstance(result, Answer):
            self._made.pop(number, None)
        else:
            self._made[number] = result
        return result


_FIELDS: Final = frozenset({"number", "numbers", "late", "most"})
_STEPS: Final[Mapping[str, Callable[..., Any]]] = {
    "info": Orders._info,
    "run": Orders._run,
    "next": Orders._next,
    "close": Orders._close,
    "joined": Orders._joined,
    "read": Orders._read,
    "step": Orders._step,
    "finish": Orders._finish,
    "leave": Orders._leave,
}
