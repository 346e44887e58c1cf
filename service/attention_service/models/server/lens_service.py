"""Fitted lenses: their fits, which are series of questions to a model, and the store.

Each question is for some rows of the Jacobians of one text, so that other requests to the model have their turns
between. The sum is held here, in memory that the budget of the host has admitted.
"""

from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InternalError, InvalidRequest
from attention_contract.schemas.analyses.lenses import (
    FitLens,
    JacobianReply,
    JacobianRequest,
    LensFacts,
    LensInfo,
    LensList,
)
from attention_contract.tensor_files import from_pieces
from attention_service.models.fit_memory import lens_bytes
from attention_service.models.server.running_fits import Fit, RunningFits, fit_id
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.reservation import Reservation
from attention_service.runtime.services.recording_service import owner_of_recordings


class LensService(RunningFits[LensInfo]):
    """Fits, lists and removes lenses. Used from the event loop only."""

    async def create(self, model: str, request: FitLens) -> LensInfo:
        """Fit a lens, or store a given one, and wait until it is there, but not longer than the request says."""
        self.runner.check_ready()
        info, owner = await self.models.get(model), owner_of_recordings()
        stated = LensFacts(
            model=model, created=datetime.now(UTC), texts=len(request.texts or ()),
            **({} if request.texts is None else {"skip_first": request.skip_first, "max_tokens": request.max_tokens}),
        )  # fmt: skip
        lens = _id(info.checkpoint, model, owner, request)
        if (stored := await self.stored(lens)) is not None:
            return stored
        if request.jacobians is not None:
            matrices = _checked(request.jacobians)
            facts = stated.model_copy(update={"width": len(next(iter(matrices.values()))), "layers": sorted(matrices)})
            return await self.add(lens, facts, _arrays(matrices), owner)
        begun = LensInfo(**stated.model_dump(), id=lens, state="fitting", progress=0.0)
        return await self.fitted(lens, begun, partial(self._fit, request=request), request.wait_s)

    async def list(self, model: str) -> LensList:
        """The caller's lenses of one model, those that are being fitted first."""
        lenses, size = await self.listing(model)
        return LensList(lenses=lenses, bytes=size, limit_bytes=self.store.limit)

    async def _fit(self, fit: Fit[LensInfo], request: FitLens) -> LensInfo:
        """Average the Jacobians of every text, and store them."""
        texts, model = request.texts or [], fit.info.model
        held = Reservation(self.runner.host, caller.get().name)
        total: NDArray[np.float32] | None = None
        try:
            for number, text in enumerate(texts):
                start, width = 0, 1
                while start < width:
                    question = JacobianRequest(
                        text=text, start=start, skip_first=request.skip_first, max_tokens=request.max_tokens
                    )
                    reply = await self.ask_text(model, "jacobian", f"texts.{number}", question)
                    part = from_pieces(reply.pieces, "reply", JacobianReply)
                    layers, rows, width = part.rows.shape[0], part.rows.shape[1], part.width
                    if total is None:
                        need = lens_bytes(layers, width)
                        self.runner.host.check(need, "the lens takes {need} bytes", "Take a smaller model")
                        await held.take(need)
                        total = np.zeros((layers, width, width), np.float32)
                    total[:, start : start + rows] += part.rows
                    start += rows
                    fit.tell((number + start / width) / len(texts))
            if total is None:
                raise InternalError("a fit over no texts")
            total /= len(texts)
            facts = fit.info.model_copy(update={"width": total.shape[-1], "layers": [*range(len(total))]})
            return await self.add(fit.info.id, facts, _arrays(dict(enumerate(total))), fit.owner)
        finally:
            held.give_back()


def _arrays(matrices: dict[int, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """The tensors of a lens as its file names them."""
    return {f"jacobians.{number}": np.ascontiguousarray(x, np.float32) for number, x in matrices.items()}


def _id(checkpoint: str, model: str, owner: str | None, request: FitLens) -> str:
    given = sorted((request.jacobians or {}).items())
    arrays = [([number, x.shape], np.asarray(x, np.float32)) for number, x in given]
    return fit_id((checkpoint, model, owner), request, {"jacobians": arrays})


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
