"""The memory and operations of implicit weights: of a layer that mixes tokens by a running state, L × L by head.

Notation as in ``model_costs``.
"""

from collections.abc import Collection, Iterable
from typing import Final

from attention_contract.schemas.analyses.model_effects import ModelEffectsRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.prompts import ModelInput
from attention_service.core.methods.recurrence import CHUNK
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.mixers.implicit_layers import is_by_channel

_MATRICES: Final = 6
"""Matrices of implicit weights that a layer holds at once: parts and whole, what was edited, and what is inspected."""
_OF_GRAPH: Final = 10
"""The same of a layer whose graph is kept."""
_HEAD_TENSORS: Final = 4
"""Tensors of queries, keys, values and gates, by head and in float32 or wider."""
_WINDOW: Final = 4
"""Tokens that the convolution before such a layer keeps for each value."""


def implicit_bytes(loaded: LoadedModel, checked: CheckedRequest, request: ModelInput) -> int:
    """Estimate the memory in which a request's implicit weights are made, besides the reply."""
    edited = [
        loaded.place_of(key) for key, edits in checked.edits.items() if any(edit.tap == "weights" for edit in edits)
    ]
    graph, twice = isinstance(request, ModelGradientsRequest), getattr(request, "check", False)
    makes = isinstance(request, ModelWeightsRequest) or "weights" in _named(request)
    places = {place.key: place for place in [*(checked.places if makes else ()), *edited] if place.mixes != "attention"}
    batch, length = checked.inputs.text.ids.shape
    sizes = matrix_bytes(places.values(), batch, length, loaded.model.dtype.itemsize, _OF_GRAPH if graph else _MATRICES)
    return (sum(sizes) if graph else max(sizes, default=0)) * (2 if twice else 1)


def shown_places(loaded: LoadedModel) -> list[AttentionPlace]:
    """The layers whose implicit weights are those of all layers: no layer with weights by channel."""
    return [place for place in loaded.implicit.values() if not is_by_channel(place.module)]


def most_matrix_bytes(loaded: LoadedModel, places: Iterable[AttentionPlace], batch: int, length: int) -> int:
    """The memory in which the weights of one of these layers after the other are made; 0 without any."""
    return max(matrix_bytes(places, batch, length, loaded.model.dtype.itemsize), default=0)


def matrix_bytes(
    places: Iterable[AttentionPlace], batch: int, length: int, itemsize: int, matrices: int = _MATRICES
) -> list[int]:
    """The memory in which the weights of each of these layers are made."""
    numbers = [
        place.widths.heads * length * (matrices * length + _HEAD_TENSORS * (place.widths.value_dim + place.state_width))
        for place in places
    ]
    return [max(itemsize, 4) * batch * number for number in numbers]


def implicit_flops(places: Collection[AttentionPlace], batch: int, length: int) -> int:
    """The FLOPs of making their weights: of each pair of tokens, a product with a state and within a chunk."""
    return 2 * batch * length * length * sum(place.widths.heads * (place.state_width + CHUNK) for place in places)


def state_bytes(loaded: LoadedModel) -> int:
    """The memory of the running states that are kept of one text, whatever its length."""
    values = [(place, place.widths.heads * place.widths.value_dim) for place in loaded.implicit.values()]
    numbers = sum(count * (place.state_width + _WINDOW) for place, count in values)
    return max(loaded.model.dtype.itemsize, 4) * numbers


def _named(request: ModelInput) -> Collection[str]:
    if isinstance(request, ModelForwardRequest):
        return request.return_
    if isinstance(request, ModelEffectsRequest):
        return () if request.sweep is None else (request.sweep.tap,)
    return request.wrt if isinstance(request, ModelGradientsRequest) else ()
