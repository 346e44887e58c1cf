"""Steering vectors: their fits, which are questions to a model, text by text, and the store.

Of a difference of means, the sums of the states of each side are held; of a principal component, the difference of
each pair, in memory that the budget of the host has admitted.
"""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.vectors import (
    AnsweredText,
    ControlVectorFile,
    FitVector,
    StatesReply,
    StatesRequest,
    VectorFacts,
    VectorInfo,
    VectorLayer,
    VectorList,
)
from attention_contract.schemas.models import ModelInfo, layer_of
from attention_contract.tensor_files import from_pieces
from attention_service.core.inspection.steering_directions import mean_difference, principal_direction
from attention_service.models.fit_memory import vector_bytes
from attention_service.models.server.running_fits import Fit, RunningFits, fit_id
from attention_service.modules.checkpoints.forms.gguf.control_vectors import (
    FIRST_LAYER,
    read_control_vector,
    write_control_vector,
)
from attention_service.modules.fitted_store import DIRECTIONS
from attention_service.runtime.callers import caller
from attention_service.runtime.scheduling.reservation import Reservation
from attention_service.runtime.services.recording_service import owner_of_recordings

_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)

Directions = dict[str, NDArray[np.float64]]


class VectorService(RunningFits[VectorInfo]):
    """Fits, lists, exports and removes steering vectors. Used from the event loop only."""

    async def create(self, model: str, request: FitVector) -> VectorInfo:
        """Fit a vector, or store a given one, and wait until it is there, but not longer than the request says."""
        self.runner.check_ready()
        info, owner = await self.models.get(model), owner_of_recordings()
        vector = await self.runner.in_thread(partial(_id, info.checkpoint, model, owner, request))
        if (stored := await self.stored(vector)) is not None:
            return stored
        facts = _facts(info, model, request)
        if request.gguf is not None:
            read = partial(_read_file, request.gguf)
            return await self._given(vector, facts, await self.runner.in_thread(read), "gguf", owner)
        if request.directions is not None:
            directions = {name: np.asarray(x, np.float64) for name, x in request.directions.items()}
            return await self._given(vector, facts, directions, "directions", owner)
        begun = VectorInfo(**facts.model_dump(), id=vector, state="fitting", progress=0.0)
        return await self.fitted(vector, begun, partial(self._fit, request=request), request.wait_s)

    async def list(self, model: str) -> VectorList:
        """The caller's vectors of one model, those that are being fitted first."""
        vectors, size = await self.listing(model)
        return VectorList(vectors=vectors, bytes=size, limit_bytes=self.store.limit)

    async def get(self, vector: str) -> VectorInfo:
        """A vector of the caller with its directions. Raises VectorNotFound."""
        return await self.with_arrays(vector, "directions", DIRECTIONS)

    async def gguf(self, vector: str) -> bytes:
        """A vector of the caller as a GGUF file, without layer 0. Raises VectorNotFound and InvalidRequest."""
        info = await self.get(vector)
        layers = {int(name): x for name, x in info.directions.items() if name.isdecimal() and int(name) >= FIRST_LAYER}
        if not layers:
            raise InvalidRequest.at(
                "Accept",
                f"GGUF files have directions of layers from {FIRST_LAYER} on, and this vector has none of them",
            )
        return await self.runner.in_thread(partial(write_control_vector, layers, info.model_type))

    # ── fits ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _given(
        self, vector: str, facts: VectorFacts, directions: Directions, param: str, owner: str | None
    ) -> VectorInfo:
        """Store directions that were made elsewhere, if the model has their layers and widths."""
        states = await self._states(facts.model, StatesRequest())
        for name, x in directions.items():
            field = f"{param}.{name}" if param == "directions" else param
            if (known := states.get(name)) is None:
                raise InvalidRequest.at(
                    field, f"it has a direction of layer {name}; this model is steered behind {', '.join(states)}"
                )
            if x.shape != known.shape:
                raise InvalidRequest.at(
                    field,
                    f"expected {[*known.shape]}, as wide as the states of this model; got {[*x.shape]} of layer {name}",
                    expected=[*known.shape], actual=[*x.shape],
                )  # fmt: skip
            if not np.isfinite(x).all() or np.abs(x).max() > _MAX_FLOAT32:
                raise InvalidRequest.at(field, f"expected finite numbers of float32; layer {name} has others")
        return await self._add(vector, facts, directions, owner)

    async def _add(self, vector: str, facts: VectorFacts, directions: Directions, owner: str | None) -> VectorInfo:
        layers = [VectorLayer(layer=layer_of(name), norm=float(np.linalg.norm(x))) for name, x in directions.items()]
        facts = facts.model_copy(update={"layers": layers, "width": len(next(iter(directions.values())))})
        arrays = {f"{DIRECTIONS}{name}": x.astype(np.float32) for name, x in directions.items()}
        return await self.add(vector, facts, arrays, owner)

    async def _fit(self, fit: Fit[VectorInfo], request: FitVector) -> VectorInfo:
        """Read the states of every text, and store the direction between those of the two sides."""
        sides = {"positive": request.positive or [], "negative": request.negative or []}
        order = sorted((number, side) for side, texts in sides.items() for number in range(len(texts)))
        held, sums = Reservation(self.runner.host, caller.get().name), dict[str, dict[str, Any]]()
        differences: dict[str, NDArray[np.float32]] = {}
        pairs = len(sides["positive"]) if request.method == "pca" else 0
        try:
            for count, (number, side) in enumerate(order):
                states = await self._states_of(fit.info.model, request, f"{side}.{number}", sides[side][number])
                if not count:
                    width = len(next(iter(states.values())))
                    need = vector_bytes(pairs, len(states), width)
                    self.runner.host.check(need, "the states take {need} bytes", "Send fewer texts or layers")
                    await held.take(need)
                    differences = {name: np.zeros((pairs, width), np.float32) for name in states} if pairs else {}
                for name, x in states.items():
                    if pairs:
                        differences[name][number] += x if side == "positive" else -x
                    else:
                        own = sums.setdefault(side, {})
                        own[name] = own.get(name, 0.0) + x
                fit.tell((count + 1) / len(order))
            compute = partial(_components, differences) if pairs else partial(_differences, sums, sides)
            return await self._add(fit.info.id, fit.info, await self.runner.in_thread(compute), fit.owner)
        finally:
            held.give_back()

    async def _states_of(self, model: str, request: FitVector, named: str, text: str | AnsweredText) -> Directions:
        """The states of one text. A refusal names it."""
        given, field = {"text": text}, named
        if isinstance(text, AnsweredText):
            given, field = {"text": text.text, "answer": text.answer}, f"{named}.text"
        question = StatesRequest(**given, position=request.position, layers=request.layers)
        try:
            reply = await self.ask_text(model, "states", field, question)
        except InvalidRequest as fault:
            if fault.param != "answer":
                raise
            raise InvalidRequest(fault.detail, param=f"{named}.answer", **fault.facts) from None
        states = from_pieces(reply.pieces, "reply", StatesReply).states
        if any(not np.isfinite(x).all() for x in states.values()):
            raise InvalidRequest.at(named, "the numbers of the model are not finite; leave the text out")
        return states

    async def _states(self, model: str, question: StatesRequest) -> Directions:
        reply = await self.models.ask(model, "states", question)
        return from_pieces(reply.pieces, "reply", StatesReply).states


def _facts(info: ModelInfo, model: str, request: FitVector) -> VectorFacts:
    """The facts of a vector before it is there."""
    source: Any = "gguf" if request.gguf is not None else "texts" if request.directions is None else "directions"
    fitted = {"method": request.method, "position": request.position} if source == "texts" else {}
    return VectorFacts(
        model=model, checkpoint=info.checkpoint, checkpoint_created=info.created, model_type=info.model_type,
        created=datetime.now(UTC), source=source, positive=len(request.positive or ()),
        negative=len(request.negative or ()), **fitted,
    )  # fmt: skip


def _differences(sums: Mapping[str, Mapping[str, Any]], sides: Mapping[str, Any]) -> Directions:
    """The differences of means by layer. Raises InvalidRequest for sides that do not differ."""
    counts = {side: len(texts) for side, texts in sides.items()}
    directions = {
        name: mean_difference(x, counts["positive"], sums["negative"][name], counts["negative"])
        for name, x in sums["positive"].items()
    }
    if not any(x.any() for x in directions.values()):
        raise InvalidRequest.at("negative", "the states of both sides are the same; send texts that differ")
    return directions


def _components(differences: Mapping[str, NDArray[np.float32]]) -> Directions:
    """The principal components by layer. Raises InvalidRequest for pairs that all differ alike."""
    directions: Directions = {}
    for name, x in differences.items():
        if (direction := principal_direction(x)) is None:
            raise InvalidRequest.at(
                "negative", f"all pairs differ alike behind layer {name}; send pairs that differ, or other layers"
            )
        directions[name] = direction
    return directions


def _read_file(file: ControlVectorFile) -> Directions:
    """The directions of a GGUF file by layer. Raises InvalidRequest."""
    try:
        data = base64.b64decode(file.base64, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest.at("gguf.base64", "it is no base64") from None
    return {str(layer): x.astype(np.float64) for layer, x in read_control_vector(data, "gguf").directions.items()}


def _id(checkpoint: str, model: str, owner: str | None, request: FitVector) -> str:
    given = sorted((request.directions or {}).items())
    arrays = [([name, x.shape], np.asarray(x, np.float64)) for name, x in given]
    return fit_id((checkpoint, model, owner), request, {"directions": arrays})
