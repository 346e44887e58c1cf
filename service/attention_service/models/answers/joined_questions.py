"""Questions of several requests that are answered by one pass: texts alike in length, and options that are equal.

The pass is that of one request with several texts, filled up to the longest; each reply has its own text's part.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from attention_contract.base import ABSENT, WireModel, valid
from attention_contract.schemas.model_requests import (
    LayerWeights,
    ModelForwardReply,
    ModelForwardRequest,
    ModelWeightsReply,
    ModelWeightsRequest,
)
from attention_contract.schemas.weights import HeadStatistics, TopKeys
from attention_service.models.answers.model_inspection import forward_reply, weights_reply
from attention_service.models.inputs.model_inputs import Inputs, Tokens
from attention_service.models.loaded.loaded_model import Asked, LoadedModel

Question = tuple[Any, Asked]
"""A request, and what was read of it."""
ReplyT = TypeVar("ReplyT", ModelForwardReply, ModelWeightsReply)
LONGEST: Final = 2048
"""Tokens of a text up to which its question is answered together with others."""
_REPLY_NUMBERS: Final = 2**18
"""Numbers of weights in a reply up to which the same holds: 1 MiB."""


def group_of(loaded: LoadedModel, request: WireModel, asked: Asked) -> Hashable:
    """Equal for questions that may share a pass if their texts are alike in length; None for one that runs alone."""
    if not isinstance(request, ModelForwardRequest | ModelWeightsRequest) or request.alone or request.edits:
        return None
    inputs = asked.inputs
    plain = not (inputs.several or inputs.images or inputs.target or request.images or request.keep or request.compare)
    if not plain or request.select is not None or inputs.text.length > LONGEST:
        return None
    if set(inputs.arguments) - {"input_ids"} or any(place.keys_of != "tokens" for place in asked.places):
        return None
    kind, layers = type(request), tuple(str(place.key) for place in asked.places)
    if isinstance(request, ModelForwardRequest):
        several_taps = request.return_ or request.average_heads or request.positions not in (None, [-1])
        return None if several_taps or loaded.head.predicts != "next" else (kind, request.top_k)
    numbers = sum(place.widths.heads for place in asked.places) * inputs.text.length**2 * request.return_weights
    if request.pool is not None or numbers > _REPLY_NUMBERS:
        return None
    statistics = None if request.statistics is None else tuple(request.statistics)
    options = (request.top_k, request.return_weights, request.average_heads, statistics)
    return (kind, layers, options, request.statistic_options.model_dump_json())


def joined_replies(loaded: LoadedModel, questions: Sequence[Question]) -> list[WireModel]:
    """Answer questions of one group by one pass. Raises what it does."""
    request = questions[0][0]
    texts = [Tokens(asked.inputs.text.host_ids[0].tolist(), asked.inputs.text.spans[0]) for _, asked in questions]
    stack = loaded.reader.batch(texts)
    inputs = Inputs(several=True, text=stack, target=None, arguments=loaded.reader.arguments(stack))
    whole = replace(questions[0][1], inputs=inputs)
    if isinstance(request, ModelForwardRequest):
        return _parted(loaded, questions, forward_reply(loaded, request, whole), _forward_part)
    return _parted(loaded, questions, weights_reply(loaded, request, whole), _weights_part)


def _parted(
    loaded: LoadedModel, questions: Sequence[Question], reply: ReplyT,
    part: Callable[[ReplyT, int, slice], dict[str, Any]],
) -> list[WireModel]:  # fmt: skip
    """The reply to each question, from that to all."""
    longest = max(asked.inputs.text.length for _, asked in questions)
    found: list[WireModel] = []
    for row, (_, asked) in enumerate(questions):
        length = asked.inputs.text.length
        tokens = slice(longest - length, longest) if loaded.reader.pads_left else slice(0, length)
        labels = loaded.reader.labels(asked.inputs.text)[0]
        ran = reply.ran.model_copy(update={"joined": len(questions)})
        found.append(reply.model_copy(update=part(reply, row, tokens) | {"labels": labels, "ran": ran}))
    return found


def _forward_part(reply: ModelForwardReply, row: int, tokens: slice) -> dict[str, Any]:
    own = [each for each in reply.predictions if each.text == row]
    shown = [each.model_copy(update={"text": 0, "position": each.position - tokens.start}) for each in own]
    return {"predictions": shown}


def _weights_part(reply: ModelWeightsReply, row: int, tokens: slice) -> dict[str, Any]:
    return {"layers": [_layer_part(layer, row, tokens) for layer in reply.layers]}


def _layer_part(layer: LayerWeights, row: int, tokens: slice) -> LayerWeights:
    statistics = {
        name: value for name in HeadStatistics.model_fields if (value := getattr(layer.statistics, name)) is not ABSENT
    }
    fields: dict[str, Any] = {
        "layer": layer.layer,
        "statistics": valid(HeadStatistics, {name: _row(value, row) for name, value in statistics.items()}),
        "queries": np.asarray(np.asarray(layer.queries)[row]),  # an array, as in the reply to one text
    }
    if layer.weights is not ABSENT:
        fields["weights"] = np.asarray(layer.weights)[row][..., tokens, tokens]
    if layer.top is not ABSENT:
        most = tokens.stop - tokens.start
        keys, weights = (np.asarray(x)[row][..., tokens, :most] for x in (layer.top.keys, layer.top.weights))
        fields["top"] = valid(TopKeys, {"keys": np.where(keys < 0, -1, keys - tokens.start), "weights": weights})
    return valid(LayerWeights, fields)


def _row(value: Any, row: int) -> Any:
    return (
        {name: _row(each, row) for name, each in value.items()} if isinstance(value, dict) else np.asarray(value)[row]
    )
