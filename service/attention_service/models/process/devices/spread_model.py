"""A model that is spread over devices, as the loop of the first process asks it."""

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from subprocess import Popen
from typing import Any, Self

from attention_service.models.passes.device_heads import DeviceHeads
from attention_service.models.process.devices.device_group import DeviceGroup
from attention_service.models.process.devices.orders import Ended, Orders
from attention_service.models.process.served import Answer, Emit, Facts, Parts, PricedRun
from attention_service.models.process.served_model import ServedModel


class _Made:
    """A name for what an order has made in every process; it is forgotten there once nothing here names it."""

    def __init__(self, number: int, forgotten: list[int]) -> None:
        self.number = number
        weakref.finalize(self, forgotten.append, number)


class SpreadGeneration:
    """A generation of all processes."""

    def __init__(self, made: _Made, running: Any, leave: Callable[[], None]) -> None:
        self.made, self.running, self.leave = made, running, leave

    @property
    def unread(self) -> int:
        """The tokens of its prompts that are to be read."""
        return int(self.running.unread)

    @property
    def has_ended(self) -> bool:
        """True once it has all its tokens."""
        return bool(self.running.has_ended)


class SpreadModel:
    """A model whose steps are orders to the processes of all its devices."""

    def __init__(self, model: ServedModel, group: DeviceGroup, devices: int) -> None:
        self._model, self._group = model, group
        self._copies = 1 if model.loaded.device.is_cuda else devices
        """The processes that share one memory: each part of a question is made for a share of it."""
        self._orders = Orders(model)
        self._numbers = 0
        self._forgotten: list[int] = []

    @classmethod
    def load(cls, followers: Sequence[Popen[bytes]], facts: dict[str, Any], progress: Callable[[float], None]) -> Self:
        """Load a checkpoint in this process and its followers, one for each device. Raises InvalidCheckpoint."""
        devices = facts["devices"]
        group = DeviceGroup(followers, devices, facts)
        model = ServedModel.load(facts | {"device": devices[0]}, progress, DeviceHeads(0, len(devices)))
        group.await_loaded()
        return cls(model, group, len(devices))

    def info(self) -> dict[str, Any]:
        """Return the fields of ModelInfo that the model itself knows."""
        info: dict[str, Any] = self._order("info")
        return info

    def held_bytes(self) -> int | None:
        """Return the bytes of its GPU that the first process holds; those of the others are as many. None on a CPU."""
        return self._model.held_bytes()

    def adapter_bytes(self) -> dict[str, int]:
        """Return the memory of its adapters: it has none."""
        return self._model.adapter_bytes()

    def prepare(self, operation: str, body: memoryview, facts: Facts, emit: Emit) -> PricedRun:
        """Check a request in all processes, and estimate its memory."""
        self._numbers += 1
        made = _Made(self._numbers, self._forgotten)
        asked = {**facts, "operation": operation, "free_bytes": facts["free_bytes"] // self._copies}
        work = self._order(
            "prepare", [bytes(body)], lambda order: self._orders.perform(order, emit), number=made.number, asked=asked
        )
        return self._work(made, work)

    def turn(self, *, spares_core: bool) -> AbstractContextManager[None]:
        """Compute in a block."""
        return self._model.turn(spares_core=spares_core)

    def answer_joined(self, questions: Sequence[_Made]) -> list[Answer]:
        """Answer questions of one group by one pass."""
        answers: list[Answer] = self._order("joined", numbers=[made.number for made in questions])
        return answers

    def read(self, running: Sequence[SpreadGeneration], most: int) -> dict[int, Exception]:
        """Read prompts of generations, up to so many tokens. Returns the faults by the place of a generation."""
        faults: dict[int, Exception] = self._order("read", **_told(running), most=most)
        return faults

    def step(self, running: Sequence[SpreadGeneration]) -> dict[int, Exception]:
        """Give each text of these generations its next token. Returns the faults by the place of a generation."""
        faults: dict[int, Exception] = self._order("step", **_told(running))
        return faults

    def finish(self, running: SpreadGeneration) -> Answer | PricedRun:
        """Return the end of a generation, or the work that it was the first part of."""
        end: Answer | PricedRun = self._result(running.made, self._order("finish", number=running.made.number))
        return end

    def recover(self, fault: Exception) -> None:
        """Free what a failed request holds. Raises Stuck if the device computes nothing any more."""
        self._model.recover(fault)

    def _order(self, kind: str, body: Sequence[bytes] = (), step: Any = None, **facts: Any) -> Any:
        forgets = [*self._forgotten]
        del self._forgotten[: len(forgets)]
        return self._group.order(kind, facts | {"forgets": forgets}, body, step or self._orders.perform)

    def _work(self, made: _Made, work: PricedRun) -> PricedRun:
        """A work whose steps are taken by all processes; its memory is that of all that share one."""

        def run() -> Any:
            return self._result(made, self._order("run", number=made.number))

        return work._replace(run=run, question=made, needed_bytes=self._copies * work.needed_bytes)

    def _result(self, made: _Made, result: Any) -> Any:
        """The result of a step, as the loop takes it."""
        if isinstance(result, PricedRun):
            return self._work(made, result)
        if isinstance(result, Generator):
            return self._parts(made)
        if isinstance(result, Answer):
            return result
        return SpreadGeneration(made, result, lambda: self._order("leave", number=made.number))

    def _parts(self, made: _Made) -> Parts:
        ended = False
        try:
            while not isinstance(told := self._order("next", number=made.number), Ended):
                yield told
            ended = True
        finally:
            if not ended:
                self._order("close", number=made.number)
        return self._result(made, told.value)  # type: ignore[no-any-return]


def _told(running: Sequence[SpreadGeneration]) -> dict[str, Any]:
    """Generations as an order names them: their numbers, and which are late by the clock of this process."""
    return {"numbers": [one.made.number for one in running], "late": [one.running.is_late() for one in running]}
