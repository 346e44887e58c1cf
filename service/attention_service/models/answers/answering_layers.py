"""The layers that a request is answered for, if it names all, and those that implicit weights cannot answer."""

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_service.core.inspection.statistics import SIGNED_STATISTICS
from attention_service.models.loaded.loaded_model import IMPLICIT, CheckedRequest, LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.implicit_layers import is_by_channel

_OF_ALL = frozenset({"logits", "pooled", "tokens", "embeddings"})
"""Names of what no layer has."""
LayerRequest = ModelForwardRequest | ModelWeightsRequest | ModelGradientsRequest


def read_request(loaded: LoadedModel, request: LayerRequest) -> CheckedRequest:
    """Read the input of a request and find its layers. Raises InvalidRequest that names the field at fault."""

    def answers(place: AttentionPlace) -> bool:
        return _answers(place, request)

    checked = loaded.checked(request, answers)
    if getattr(request, "keep", False):
        for index, place in enumerate(checked.places):
            if place.mixes != "attention":
                raise InvalidRequest.at(
                    f"layers.{index}", f"no recording holds layer {place.key}: {IMPLICIT}; leave keep or the layer out"
                )
    return checked


def _answers(place: AttentionPlace, request: LayerRequest) -> bool:
    """True if a layer with implicit weights can answer a request; one with weights by channel has too many for all."""
    named = {*getattr(request, "return_", ()), *getattr(request, "wrt", ())}
    if is_by_channel(place.module) and (isinstance(request, ModelWeightsRequest) or "weights" in named):
        return False
    if isinstance(request, ModelWeightsRequest):
        signed = SIGNED_STATISTICS.issuperset(request.statistics or ())
        return not request.keep and (request.normalize is not None or signed)
    return not getattr(request, "keep", False) and named - _OF_ALL <= (place.taps or frozenset())
