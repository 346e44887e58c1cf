"""Runs of a whole model beside their predictions, which they correct."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.schemas.prompts import ModelRan
from attention_service.cost import NOTHING
from attention_service.models.costs.answer_parts import Passes, T
from attention_service.models.costs.model_pace import ModelPace, times_of
from attention_service.models.process.served import Answer, PricedRun, RunTime


class TimedRuns:
    """The runs of one request. Each is predicted before it begins; the answer tells the sums."""

    def __init__(self, pace: ModelPace, purpose: Computation, kind: str = "") -> None:
        """``kind``: of runs that share a factor; by default those of the purpose."""
        self._pace, self._purpose, self._kind = pace, purpose, kind or purpose
        self._predicted, self._measured_ms = NOTHING, 0.0

    def run(self, work: Callable[[], Answer | PricedRun], predicted_ms: float) -> Answer | PricedRun:
        """Run, and learn from the time. ``predicted_ms``: without what was learned."""
        self._predicted += self._pace.estimate(self._kind, predicted_ms)
        began = time.perf_counter()
        found = work()
        took_ms = 1e3 * (time.perf_counter() - began)
        self._measured_ms += took_ms
        self._pace.note(self._kind, predicted_ms, took_ms)
        return self.told([found])[0] if isinstance(found, Answer) else found

    def parts(self, answer: Passes[T], passes: int, pass_ms: float) -> Passes[T]:
        """Run an answer in parts, the first of which takes so many passes, and learn from each.

        ``pass_ms``: milliseconds of a pass, without what was learned.
        """
        while True:
            predicted_ms, began = passes * pass_ms, time.perf_counter()
            self._predicted += self._pace.estimate(self._kind, predicted_ms)
            ended: list[T] = []
            try:
                passes = next(answer)
            except StopIteration as end:
                ended.append(end.value)
            took_ms = 1e3 * (time.perf_counter() - began)
            self._measured_ms += took_ms
            self._pace.note(self._kind, predicted_ms, took_ms)
            if ended:
                return ended[0]
            yield passes

    def run_joined(self, work: Callable[[], Sequence[Answer]], predicted_ms: float) -> list[Answer]:
        """Run a pass that answers several requests: the first answer tells of it, and each reply of the whole pass."""
        answers: list[Answer] = []

        def whole() -> PricedRun:
            answers.extend(work())
            return PricedRun(0, Answer)

        self.run(whole, predicted_ms)
        return self.told(answers)

    def told(self, answers: Sequence[Answer]) -> list[Answer]:
        """Return answers with the times of the runs."""
        time_ = RunTime(self._purpose, self._predicted, self._measured_ms)
        return [
            each._replace(reply=_with_times(each.reply, time_), time=time_ if not at else None)
            for at, each in enumerate(answers)
        ]


def _with_times(reply: Any, time_: RunTime) -> Any:
    ran = getattr(reply, "ran", None)
    if not isinstance(ran, ModelRan):
        return reply
    return reply.model_copy(update={"ran": ran.model_copy(update=times_of(time_.predicted))})
