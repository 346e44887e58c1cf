"""The weights of an adapter beside those of its base, and their difference head by head.

Both are rows of one pass where rows may differ in their adapter, and where questions may share a pass at all.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from attention_contract.base import ABSENT, valid
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply, ModelWeightsRequest
from attention_contract.schemas.weights import HeadStatistics, WeightsDifferences
from attention_service.models.answers.joined_questions import Question, group_of, joined_replies
from attention_service.models.answers.model_recordings import Recorded
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.loaded_model import LoadedModel


def compared_weights(
    loaded: LoadedModel, request: ModelWeightsRequest, checked: CheckedRequest
) -> Recorded[ModelWeightsReply]:
    """Return the weights by the adapter, and in each layer those by its base and the differences."""
    plain = request.model_copy(update={"compare": None})
    questions: list[Question] = [(plain, replace(checked, adapter=None)), (plain, checked)]
    groups = [group_of(loaded, *question) for question in questions]
    replies: Any
    recording = None
    if groups[0] is not None and groups[0] == groups[1]:
        replies = joined_replies(loaded, questions)
    else:
        with loaded.adapters.using(None):
            first = weights_reply(loaded, plain, questions[0][1])
        second = recorded_weights(loaded, plain, checked)
        replies, recording = (first, second.reply), second.recording
    base, changed = replies
    layers = [_compared(*pair) for pair in zip(base.layers, changed.layers, strict=True)]
    reply: ModelWeightsReply = changed.model_copy(
        update={"layers": layers, "ran": changed.ran.model_copy(update={"joined": 1})}
    )
    return Recorded(reply, recording)


def _compared(base: LayerWeights, changed: LayerWeights) -> LayerWeights:
    """One layer with the results of the base and the differences from them."""
    names = [name for name in HeadStatistics.model_fields if getattr(changed.statistics, name) is not ABSENT]
    statistics = {
        name: _difference(getattr(changed.statistics, name), getattr(base.statistics, name)) for name in names
    }
    fields: dict[str, Any] = {"statistics": valid(HeadStatistics, statistics)}
    if changed.weights is not ABSENT:
        fields["weights"] = _difference(changed.weights, base.weights)
    return changed.model_copy(update={"base": base, "differences": valid(WeightsDifferences, fields)})


def _difference(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: _difference(value, other[name]) for name, value in one.items()}
    return np.asarray(one) - np.asarray(other)
