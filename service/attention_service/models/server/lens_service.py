"""Fitted lenses: their fits, which are series of questions to a model, and the store.

Each question is for some rows of the Jacobians of one text, so that other requests to the model have their turns
between. The sum is held here, in memory that the budget of the host has admitted.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from attention_contract.errors import Conflict, InternalError, InvalidRequest, LensNotFound, Overloaded
from attention_contract.schemas.analyses.lenses import (
    FitLens,
    JacobianReply,
    JacobianRequest,
    LensFacts,
    LensInfo,
    LensList,
)
from attention_contract.tensor_files import from_pieces
from attention_service.models.server.model_service import ModelService
from attention_service.modules.lens_store import LensStore
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.request_runner import RequestRunner
from attention_service.runtime.scheduling.reservation import Reservation
from attention_service.runtime.services.recording_service import owner_of_recordings

_FITS: Final = 4
"""Lenses that are fitted at a time."""
_PAUSE_S: Final = 0.5
"""Seconds before a question that a model had no room for is asked again."""


@dataclass(eq=False)
class _Fit:
    """A lens on its way."""

    info: LensInfo
    owner: str | None
    task: "asyncio.Task[LensInfo] | None" = None
    stopped: bool = False


class LensService:
    """Fits, lists and removes lenses. Used from the event loop only."""

    def __init__(self, store: LensStore, models: ModelService, runner: RequestRunner) -> None:
        self._store = store
        self._models = models
        self._runner = runner
        self._fits: dict[str, _Fit] = {}

    @property
    def fits(self) -> int:
        """The number of lenses that are being fitted."""
        return len(self._fits)

    async def create(self, model: str, request: FitLens) -> LensInfo:
        """Fit a lens, or store a given one, and wait until it is there, but not longer than the request says."""
        self._runner.check_ready()
        info, owner = await self._models.get(model), owner_of_recordings()
        stated = LensFacts(
            model=model, created=datetime.now(UTC), texts=len(request.texts or ()),
            **({} if request.texts is None else {"skip_first": request.skip_first, "max_tokens": request.max_tokens}),
        )  # fmt: skip
        lens = _id(info.checkpoint, model, owner, request)
        try:
            return await self._runner.in_thread(partial(self._store.get, lens, owner))
        except LensNotFound:
            pass
        if request.jacobians is not None:
            matrices = _checked(request.jacobians)
            facts = stated.model_copy(update={"width": len(next(iter(matrices.values()))), "layers": sorted(matrices)})
            return await self._add(lens, facts, matrices, owner)
        fit = self._fits.get(lens)
        if fit is None:
            if len(self._fits) >= _FITS:
                raise Overloaded(f"{_FITS} lenses are being fitted already; try again later", limit=_FITS)
            fit = self._fits[lens] = _Fit(
                LensInfo(**stated.model_dump(), id=lens, state="fitting", progress=0.0), owner
            )
            fit.task = asyncio.create_task(self._fit(fit, request))
            fit.task.add_done_callback(partial(self._ended, lens))
        if fit.task is None:
            raise InternalError("a fit has no task")
        await asyncio.wait({fit.task}, timeout=request.wait_s)
        if not fit.task.done():
            return fit.info
        if fit.stopped or fit.task.cancelled():
            raise Conflict("the fit was stopped", param="texts")
        return fit.task.result()

    async def list(self, model: str) -> LensList:
        """The caller's lenses of one model, those that are being fitted first."""
        await self._models.get(model)
        owner = owner_of_recordings()
        found = await self._runner.in_thread(partial(self._store.listing, owner))
        running = [fit.info for fit in self._fits.values() if owner in {None, fit.owner}]
        return found.model_copy(update={"lenses": [each for each in (*running, *found.lenses) if each.model == model]})

    async def path(self, lens: str) -> Path:
        """The file of a lens of the caller. Raises LensNotFound."""
        return await self._runner.in_thread(partial(self._store.path, lens, owner_of_recordings()))

    async def delete(self, lens: str) -> None:
        """Remove a lens, or stop its fit. Raises LensNotFound."""
        self._runner.check_ready()
        owner, fit = owner_of_recordings(), self._fits.get(lens)
        if fit is not None and fit.task is not None and owner in {None, fit.owner}:
            fit.stopped = True
            fit.task.cancel()
            await asyncio.wait({fit.task})
            return
        await self._runner.in_thread(partial(self._store.delete, lens, owner))

    async def stop(self) -> None:
        """Stop every fit."""
        tasks = [fit.task for fit in self._fits.values() if fit.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, lens: str, task: "asyncio.Task[LensInfo]") -> None:
        self._fits.pop(lens, None)
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits

    async def _fit(self, fit: _Fit, request: FitLens) -> LensInfo:
        """Average the Jacobians of every text, and store them."""
        texts, model = request.texts or [], fit.info.model
        held = Reservation(self._runner.host, caller.get().name)
        total: NDArray[np.float32] | None = None
        try:
            for number, text in enumerate(texts):
                start, width = 0, 1
                while start < width:
                    part = await self._rows(model, number, text, start, request)
                    layers, rows, width = part.rows.shape[0], part.rows.shape[1], part.width
                    if total is None:
                        need = 3 * 4 * layers * width * width
                        self._runner.host.check(need, "the lens takes {need} bytes", "Take a smaller model")
                        await held.take(need)
                        total = np.zeros((layers, width, width), np.float32)
                    total[:, start : start + rows] += part.rows
                    start += rows
                    share = (number + start / width) / len(texts)
                    fit.info = fit.info.model_copy(update={"progress": share})
            if total is None:
                raise InternalError("a fit over no texts")
            total /= len(texts)
            facts = fit.info.model_copy(update={"width": total.shape[-1], "layers": [*range(len(total))]})
            return await self._add(fit.info.id, facts, dict(enumerate(total)), fit.owner)
        finally:
            held.give_back()

    async def _rows(self, model: str, number: int, text: str, start: int, request: FitLens) -> JacobianReply:
        """Ask the model for rows of one text, again if it has no room now."""
        question = JacobianRequest(text=text, start=start, skip_first=request.skip_first, max_tokens=request.max_tokens)
        while True:
            try:
                reply = await self._models.ask(model, "jacobian", question)
            except Overloaded:
                await asyncio.sleep(_PAUSE_S)
            except InvalidRequest as fault:
                named = fault.param if fault.param != "text" else f"texts.{number}"
                detail = fault.detail.replace("text: ", f"texts.{number}: ", 1)
                raise InvalidRequest(detail, param=named, **fault.facts) from None
            else:
                return from_pieces(reply.pieces, "reply", JacobianReply)

    async def _add(self, lens: str, facts: LensFacts, matrices: dict[int, NDArray[Any]], owner: str | None) -> LensInfo:
        check: Callable[[int, str], None] = partial(caller.get().check, "recordings_bytes")
        return await self._runner.in_thread(partial(self._store.add, lens, facts, matrices, owner, check))


def _id(checkpoint: str, model: str, owner: str | None, request: FitLens) -> str:
    """A hash of the model, the owner, and all that makes the lens."""
    made = request.model_dump(mode="json", exclude={"wait_s", "jacobians"})
    content = hashlib.sha256(orjson.dumps([checkpoint, model, owner, made], option=orjson.OPT_SORT_KEYS))
    for number, x in sorted((request.jacobians or {}).items()):
        content.update(orjson.dumps([number, x.shape]))
        content.update(np.ascontiguousarray(x, np.float32).reshape(-1).view(np.uint8).data)
    return content.hexdigest()[:32]


def _checked(jacobians: dict[str, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """Given matrices by the number of their layer. Raises InvalidRequest unless all are square and as wide."""
    if not jacobians:
        raise InvalidRequest.at("jacobians", "expected a matrix for each layer but the last; got none")
    width = next(iter(jacobians.values())).shape[-1:]
    for number, x in jacobians.items():
        if x.ndim != 2 or x.shape != (*width, *width):
            raise InvalidRequest.at(
                f"jacobians.{number}", f"expected {[*width, *width]}, as the first one is wide; got {[*x.shape]}"
            )
        if not np.isfinite(x).all():
            raise InvalidRequest.at(f"jacobians.{number}", "expected finite numbers")
    return {int(number): x for number, x in jacobians.items()}
