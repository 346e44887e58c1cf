"""Steering vectors that a request adds, as the tensors of its edits: read from their files once for each request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from attention_contract.base import WireModel
from attention_contract.errors import InternalError, InvalidRequest
from attention_contract.schemas.attention import AddedVector, Edit
from attention_contract.schemas.openai import AttentionOfTokens, Steering
from attention_service.modules.fitted_store import DIRECTIONS, arrays_by_layer

RequestT = TypeVar("RequestT", bound=WireModel)
Directions = Mapping[str, NDArray[np.float32]]
"""``[d]`` by layer."""


class LayeredVector(AddedVector):
    """A vector in a sweep: a direction for each layer that it changes."""

    directions: Any
    """``Directions``, times their scale."""

    def at(self, layer: object) -> NDArray[Any]:
        """The direction of a layer. Raises InvalidRequest."""
        return _direction(self.directions, str(layer), "sweep.add.vector")


class AddedVectors:
    """The vectors of one request. ``files``: their paths by id."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._directions = {vector: _read(Path(path)) for vector, path in files.items()}

    def within(self, request: RequestT) -> RequestT:
        """Return the request with numbers in place of vectors. Raises InvalidRequest for layers without directions."""
        changed: dict[str, Any] = {}
        beside = getattr(request, "attention", None)
        if isinstance(beside, AttentionOfTokens):
            edits = self._edits(beside.edits, "attention.edits")
            for layer, steered in self._steered(beside.steer).items():
                edits[layer] = [*edits.get(layer, ()), Edit(tap="hidden", add=steered)]
            changed["attention"] = beside.model_copy(update={"edits": edits, "steer": []})
        elif getattr(request, "edits", None):
            changed["edits"] = self._edits(request.edits, "edits")  # type: ignore[attr-defined]  # of the requests that have any
        sweep = getattr(request, "sweep", None)
        if isinstance(sweep, Edit) and isinstance(added := sweep.add, AddedVector):
            scaled = {layer: _scaled(x, added.scale) for layer, x in self._directions[added.vector].items()}
            layered = LayeredVector(**added.model_dump(), directions=scaled)
            changed["sweep"] = sweep.model_copy(update={"add": layered})
        return request.model_copy(update=changed)

    def _edits(self, edits: Mapping[str, Sequence[Edit]], param: str) -> dict[str, Sequence[Edit]]:
        return {
            layer: [self._plain(edit, layer, f"{param}.{layer}.{at}") for at, edit in enumerate(stated)]
            for layer, stated in edits.items()
        }

    def _plain(self, edit: Edit, layer: str, param: str) -> Edit:
        if not isinstance(added := edit.add, AddedVector):
            return edit
        direction = _direction(self._directions[added.vector], layer, f"{param}.add.vector")
        return edit.model_copy(update={"add": _scaled(direction, added.scale)})

    def _steered(self, steer: Sequence[Steering]) -> dict[str, NDArray[Any]]:
        """The sum of all that is added behind each layer."""
        sums: dict[str, NDArray[Any]] = {}
        for at, steering in enumerate(steer):
            own = self._directions[steering.named]
            field = "layers" if steering.layer is None else "layer"
            for layer in own if steering.behind is None else map(str, steering.behind):
                x = _scaled(_direction(own, layer, f"attention.steer.{at}.{field}"), steering.scale)
                sums[layer] = sums[layer] + x if layer in sums else x
        return sums


def _scaled(direction: NDArray[Any], scale: float) -> NDArray[Any]:
    """A direction times a number, with more digits than any model computes in."""
    return np.asarray(direction, np.float64) * scale


def _direction(directions: Mapping[str, NDArray[Any]], layer: str, param: str) -> NDArray[Any]:
    if (direction := directions.get(layer)) is None:
        raise InvalidRequest.at(param, f"the vector has no direction of layer {layer}; it has {', '.join(directions)}")
    return direction


def _read(path: Path) -> Directions:
    try:
        return arrays_by_layer(path, DIRECTIONS)
    except FileNotFoundError:
        raise InvalidRequest("a vector was deleted meanwhile") from None
    except (SafetensorError, OSError) as fault:
        raise InternalError(f"the stored vector cannot be read: {fault}; delete it") from fault
