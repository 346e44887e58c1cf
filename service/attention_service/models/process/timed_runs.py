"""Runs of a whole model beside their predictions, which they correct."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from attention_contract.base import WireModel
from attention_contract.schemas.costs.accuracy import Computation
from attention_contract.schemas.prompts import ModelRan
from attention_service.cost import NOTHING
from attention_service.models.costs.answer_parts import Passes
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.costs.model_pace import times_of
from attention_service.models.costs.question_stages import Stage
from attention_service.models.process.served import Answer, Parts, RunTime

T = TypeVar("T")


class TimedRuns:
    """The runs of one request, all of one stage. Each is predicted before it begins; the answer tells the sums."""

    def __init__(self, costs: ModelCosts, stage: Stage, purpose: Computation | None, kind: str = "") -> None:
        """``purpose``: None if nothing is learned. ``kind``: of runs that share a factor; by default the purpose."""
        self._costs, self._stage, self._purpose, self._kind = costs, stage, purpose, kind or purpose or ""
        self._predicted, self._measured_ms = NOTHING, 0.0

    @cached_property
    def _pass_ms(self) -> float:
        return self._costs.work(self._stage).ms / self._stage.counted

    def seconds(self, passes: int) -> float:
        """A bound of the time of so many passes, as the stage counts them; 0 if they are short."""
        return self._costs.seconds(self._stage, passes / self._stage.counted, self._kind)

    def run(self, work: Callable[[], T], passes: int = 1) -> T:
        """Run so many passes, and learn from the time."""
        if self._purpose is None:
            return work()
        pace, predicted_ms = self._costs.pace, passes * self._pass_ms
        self._predicted += pace.estimate(self._kind, predicted_ms)
        began = time.perf_counter()
        answer = work()
        took_ms = 1e3 * (time.perf_counter() - began)
        self._measured_ms += took_ms
        pace.note(self._kind, predicted_ms, took_ms)
        return answer

    def parts(self, answer: Passes[WireModel], passes: int) -> Parts:
        """Run an answer in parts, the first of which takes so many passes, and learn from each."""
        ended: list[WireModel] = []

        def advance() -> int:
            try:
                return next(answer)
            except StopIteration as end:
                ended.append(end.value)
                return 0

        while True:
            passes = self.run(advance, passes)
            if ended:
                return self.told([Answer(ended[0])])[0]
            yield self.seconds(passes)

    def told(self, answers: Sequence[Answer]) -> list[Answer]:
        """Return answers with the times of the runs; of a shared pass the first tells of it, and each reply."""
        if self._purpose is None:
            return [*answers]
        time_ = RunTime(self._purpose, self._predicted, self._measured_ms)
        return [
            answer._replace(reply=_with_times(answer.reply, time_), time=time_ if not at else None)
            for at, answer in enumerate(answers)
        ]


def _with_times(reply: Any, time_: RunTime) -> Any:
    ran = getattr(reply, "ran", None)
    if not isinstance(ran, ModelRan):
        return reply
    return reply.model_copy(update={"ran": ran.model_copy(update=times_of(time_.predicted))})
