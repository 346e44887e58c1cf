"""The features of tokens that a linear probe reads: states of layers, or statistics of heads with each query alone."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import FeaturesReply, FeaturesRequest, ProbeFeature, StateFeature
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.schemas.weights import BY_KEY, StatisticName
from attention_service.core.inspection.statistics import CLASS_SHARES, PAIRS, RETRIEVAL, StatisticInputs
from attention_service.core.inspection.summed_statistics import WeightSizes
from attention_service.core.inspection.weights import QueryTotals
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.loaded.checked_request import CheckedRequest, read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import STATE_TAPS
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_taps import CHOSEN_SHARE
from attention_service.runtime.binding.bound_statistics import check_able, check_single_query
from attention_service.runtime.binding.selection import check_indices

STATISTICS: Final = "statistics"
"""The name of features that are no layer's."""
_PROBED: Final[dict[str, Any]] = {"tokens": [0]}
"""The input by which the widths of features are learned."""
_OF_STATES: Final = {"layers.0": "of.layer", "layers": "of.layer", "return.0": "of.point"}
_OF_STATISTICS: Final = {"layers": "of.statistics"}


@dataclass(frozen=True)
class FeaturesPlan:
    """A request for features, checked."""

    request: FeaturesRequest
    asked: ModelForwardRequest | ModelWeightsRequest
    """The question whose reply has the states or the weights."""
    checked: CheckedRequest
    tokens: list[int]
    """The positions that are read."""

    @property
    def beside_bytes(self) -> int:
        """The memory beside that of the question: copies of the weights of one layer, and the features."""
        length = self.checked.inputs.text.length
        if isinstance(self.asked, ModelForwardRequest):
            return 0
        return max(3 * 8 * place.widths.heads * length * length for place in self.checked.places)


def plan_features(loaded: LoadedModel, request: FeaturesRequest) -> FeaturesPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    given: dict[str, Any] = _PROBED if request.text is None else {"text": request.text}
    of = request.of
    with fields_named(**(_OF_STATES if isinstance(of, StateFeature) else _OF_STATISTICS)):
        if isinstance(of, StateFeature):
            layers: Any = "all" if of.layer == "all" else [of.layer]
            asked: Any = ModelForwardRequest(**given, layers=layers, return_=[of.point], top_k=0)
        else:
            asked = ModelWeightsRequest(**given, statistics=[])
        checked = read_request(loaded, asked)
    places = [place for place in checked.places if _reads_text(place, of)]
    if not places:
        layer = checked.places[0].key if len(checked.places) == 1 else "none of the layers"
        param = "of.layer" if isinstance(of, StateFeature) else "of.statistics"
        raise InvalidRequest.at(param, f"{layer} has this of each token of a text, which labels are of; name another")
    checked = CheckedRequest(checked.inputs, places, checked.edits, checked.adapter)
    if not isinstance(of, StateFeature):
        _check_statistics(of.statistics, of.heads, places)
    else:
        for place in places:
            loaded.runner.check_tap(place, of.point, "read", "of.point")
    length = checked.inputs.text.length
    return FeaturesPlan(request, asked, checked, _tokens(request, length))


def feature_widths(loaded: LoadedModel, plan: FeaturesPlan) -> list[int]:
    """The width d of the features of each layer; of statistics, of all layers."""
    of, places = plan.request.of, plan.checked.places
    if isinstance(of, StateFeature):
        return [_width(loaded, place, of.point) for place in places]
    return [sum(len(of.statistics) * (place.widths.heads if of.heads is None else len(of.heads)) for place in places)]


def _width(loaded: LoadedModel, place: AttentionPlace, point: str) -> int:
    widths = place.widths
    by_head = {
        "q": widths.heads * widths.head_dim, "k": widths.kv_heads * widths.head_dim,
        "v": widths.kv_heads * widths.value_dim, "context": widths.heads * widths.value_dim,
    }  # fmt: skip
    if point in by_head:
        return by_head[point]
    return place.output_width if point == "output" else loaded.runner.width((place.key, point)) or 0


def _reads_text(place: AttentionPlace, of: ProbeFeature) -> bool:
    own_keys = place.keys_of == "tokens" or (isinstance(of, StateFeature) and of.point not in {"k", "v"})
    return place.queries == "text" and place.windows is None and own_keys


def _check_statistics(names: list[StatisticName], heads: list[int] | None, places: list[AttentionPlace]) -> None:
    check_single_query(names, "of.statistics")
    for at, name in enumerate(names):
        if name in BY_KEY:
            raise InvalidRequest.at(f"of.statistics.{at}", f"{name} has a number for each key of a text; name others")
        if name in {CLASS_SHARES, RETRIEVAL, PAIRS, CHOSEN_SHARE}:
            raise InvalidRequest.at(f"of.statistics.{at}", f"{name} needs more than the weights; name others")
    for place in places:
        check_able(names, place.own_statistics, "of.statistics")
        check_indices("of.heads", heads, place.widths.heads, "heads")


def _tokens(request: FeaturesRequest, length: int) -> list[int]:
    if not isinstance(request.positions, list):
        return [length - 1] if request.positions == "last" else [*range(length)]
    for at, position in enumerate(request.positions):
        if not -length <= position < length:
            raise InvalidRequest.at(
                f"positions.{at}", f"position {position} is out of range; the text has {length} tokens"
            )
    return [position % length for position in request.positions]


@torch.no_grad()
def features_reply(loaded: LoadedModel, plan: FeaturesPlan) -> FeaturesReply:
    """Run the model, and take the features ``[samples, d]`` of some of its tokens."""
    of = plan.request.of
    if isinstance(plan.asked, ModelForwardRequest) and isinstance(of, StateFeature):
        layers = forward_reply(loaded, plan.asked, plan.checked).layers
        features = {str(layer.layer): _of_tokens(getattr(layer, of.point), of.point) for layer in layers}
    elif isinstance(plan.asked, ModelWeightsRequest) and not isinstance(of, StateFeature):
        reply = weights_reply(loaded, plan.asked, plan.checked)
        ids, rows = plan.checked.inputs.text.ids[0], list[Tensor]()
        for layer, place in zip(reply.layers, plan.checked.places, strict=True):
            weights = torch.from_numpy(np.asarray(layer.weights, np.float64))
            heads = weights if of.heads is None else weights[of.heads]
            rows.append(query_statistics(heads, ids.cpu(), of.statistics, place))
        features = {STATISTICS: torch.cat(rows, -1).numpy()}
    else:
        raise TypeError("the features are of another question")
    samples = {name: x[plan.tokens] for name, x in features.items()}
    if plan.request.positions == "mean":
        samples = {name: x.astype(np.float64).mean(0, keepdims=True) for name, x in samples.items()}
    return valid(FeaturesReply, {"features": {name: x.astype(np.float32) for name, x in samples.items()}})


def _of_tokens(array: NDArray[Any], point: str) -> NDArray[Any]:
    """A state ``[L, …]``, or a tap ``[H, L, D]``, as ``[L, d]``."""
    x = np.asarray(array, np.float32)
    by_token = x if point in STATE_TAPS else x.swapaxes(0, 1)
    return by_token.reshape(len(by_token), -1)


def query_statistics(weights: Tensor, ids: Tensor, names: list[StatisticName], place: AttentionPlace) -> Tensor:
    """The statistics ``[L, names · H]`` of weights ``[H, L, K]``, each query alone, as generated tokens have them."""
    heads, length, keys = weights.shape
    rows = weights.transpose(0, 1)[:, :, None].double()  # [L, H, 1, K]
    positions = torch.arange(length)[:, None]
    seen = torch.where(torch.arange(keys) <= positions, ids[None], -1)  # [L, K]
    inputs = StatisticInputs(tokens=seen, query_tokens=ids[:, None], able=place.own_statistics)
    totals = QueryTotals(WeightSizes(length, heads, 1, keys, weights.device), names, inputs)
    totals.add(rows, torch.ones(length, 1, dtype=torch.bool), positions)
    means = totals.means()
    return torch.cat([means[name] for name in names], -1)
