"""Fits to models on their way, one kind of them, with the store that gets them.

A fit goes on if nobody waits for it, and equal requests share one.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic

import numpy as np
import orjson
from numpy.typing import NDArray

from attention_contract.base import WireModel
from attention_contract.errors import Conflict, InternalError, InvalidRequest, Overloaded
from attention_service.models.server.model_question import WrittenReply
from attention_service.models.server.model_service import ModelService
from attention_service.modules.fitted_store import FittedStore, InfoT, arrays_by_layer
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.services.recording_service import owner_of_recordings

_AT_A_TIME: Final = 4
"""Fits of one kind at a time."""
_PAUSE_S: Final = 0.5
"""Seconds before a question that a model had no room for is asked again."""


def fit_id(
    made_for: tuple[str, str, str | None], request: WireModel, arrays: Mapping[str, Iterable[tuple[Any, NDArray[Any]]]]
) -> str:
    """Return the id of a fit: a hash of its checkpoint, model and owner, and of all that makes it.

    ``arrays``: the fields of the request with numbers, each array with what is hashed before its bytes.
    """
    made = request.model_dump(mode="json", exclude={"wait_s", *arrays})
    content = hashlib.sha256(orjson.dumps([*made_for, made], option=orjson.OPT_SORT_KEYS))
    for numbers in arrays.values():
        for head, x in numbers:
            content.update(orjson.dumps(head))
            content.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return content.hexdigest()[:32]


@dataclass(eq=False)
class Fit(Generic[InfoT]):
    """One fit on its way."""

    info: InfoT
    owner: str | None
    task: "asyncio.Task[InfoT] | None" = None
    stopped: bool = False

    def tell(self, share: float) -> None:
        """Note the share of it that is done."""
        info: Any = self.info  # of three types, which mypy joins
        self.info = info.model_copy(update={"progress": share})


class RunningFits(Generic[InfoT]):
    """Fits of one kind, and those that are stored. Used from the event loop only."""

    def __init__(self, store: FittedStore[InfoT], models: ModelService, runner: RequestRunner) -> None:
        self.store, self.models, self.runner = store, models, runner
        self._fits: dict[str, Fit[InfoT]] = {}

    def __len__(self) -> int:
        return len(self._fits)

    async def stored(self, fitted: str) -> InfoT | None:
        """Describe the stored one of an id of the caller; None if there is none."""
        try:
            return await self.runner.in_thread(partial(self.store.get, fitted, owner_of_recordings()))
        except self.store.kind.missing:
            return None

    async def fitted(
        self, fitted: str, info: InfoT, work: Callable[[Fit[InfoT]], Awaitable[InfoT]], wait_s: float | None
    ) -> InfoT:
        """Begin a fit, or join an equal one, and wait for it, but not longer than so many seconds."""
        fit = self._fits.get(fitted)
        if fit is None:
            if len(self._fits) >= _AT_A_TIME:
                raise Overloaded(
                    f"{_AT_A_TIME} {self.store.kind.plural} are being fitted already; try again later", limit=_AT_A_TIME
                )
            fit = self._fits[fitted] = Fit(info, owner_of_recordings())
            fit.task = asyncio.ensure_future(work(fit))
            fit.task.add_done_callback(partial(self._ended, fitted))
        if fit.task is None:
            raise InternalError("a fit has no task")
        await asyncio.wait({fit.task}, timeout=wait_s)
        if not fit.task.done():
            return fit.info
        if fit.stopped or fit.task.cancelled():
            raise Conflict("the fit was stopped", param="texts")
        return fit.task.result()

    async def listing(self, model: str) -> tuple[list[InfoT], int]:
        """The caller's of one model, those that are being fitted first, and the bytes of all that are stored."""
        await self.models.get(model)
        owner = owner_of_recordings()
        stored = await self.runner.in_thread(partial(self.store.listing, owner))
        running = [fit.info for fit in self._fits.values() if owner in {None, fit.owner}]
        return [info for info in (*running, *stored) if info.model == model], sum(info.bytes for info in stored)

    async def path(self, fitted: str) -> Path:
        """The file of an id of the caller. Raises the error of its kind."""
        return await self.runner.in_thread(partial(self.store.path, fitted, owner_of_recordings()))

    async def get(self, fitted: str) -> InfoT:
        """Describe one of the caller, which may be on its way. Raises the error of its kind."""
        owner, fit = owner_of_recordings(), self._fits.get(fitted)
        if fit is not None and owner in {None, fit.owner}:
            return fit.info
        return await self.runner.in_thread(partial(self.store.get, fitted, owner))

    async def with_arrays(self, fitted: str, field: str, prefix: str) -> InfoT:
        """Describe a stored one of the caller with its arrays, whose names begin so, as a field."""
        owner = owner_of_recordings()
        path = await self.runner.in_thread(partial(self.store.path, fitted, owner))
        info: Any = await self.runner.in_thread(partial(self.store.get, fitted, owner))
        arrays = await self.runner.in_thread(partial(arrays_by_layer, path, prefix))
        described: InfoT = info.model_copy(update={field: arrays})
        return described

    async def delete(self, fitted: str) -> None:
        """Remove one, or stop its fit. Raises the error of its kind."""
        self.runner.check_ready()
        owner, fit = owner_of_recordings(), self._fits.get(fitted)
        if fit is not None and fit.task is not None and owner in {None, fit.owner}:
            fit.stopped = True
            fit.task.cancel()
            await asyncio.wait({fit.task})
            return
        await self.runner.in_thread(partial(self.store.delete, fitted, owner))

    async def stop(self) -> None:
        """Stop every fit."""
        tasks = [fit.task for fit in self._fits.values() if fit.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def add(self, fitted: str, facts: WireModel, arrays: Mapping[str, NDArray[Any]], owner: str | None) -> InfoT:
        """Store one durably, within the quota of the caller."""
        check: Callable[[int, str], None] = partial(caller.get().check, "recordings_bytes")
        return await self.runner.in_thread(partial(self.store.add, fitted, facts, arrays, owner, check))

    async def ask_text(self, model: str, operation: str, field: str, question: WireModel) -> WrittenReply:
        """Ask a model about one of the texts of a fit, again if it has no room now. A refusal names its field."""
        while True:
            try:
                return await self.models.ask(model, operation, question)
            except Overloaded:
                await asyncio.sleep(_PAUSE_S)
            except InvalidRequest as fault:
                named = fault.param if fault.param != "text" else field
                detail = fault.detail.replace("text: ", f"{field}: ", 1)
                raise InvalidRequest(detail, param=named, **fault.facts) from None

    def _ended(self, fitted: str, task: "asyncio.Task[InfoT]") -> None:
        self._fits.pop(fitted, None)
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits
