"""Questions of several requests that are answered by one pass: texts alike in length, and options that are equal.

The pass is that of one request with several texts, filled up to the longest. Each reply has the part of its own texts.
An attention that a request edits is computed for its texts apart, as if it ran alone.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Final

import numpy as np
import torch

from attention_contract.base import ABSENT, WireModel, valid
from attention_contract.schemas.analyses.probes import ProbeScores
from attention_contract.schemas.model_requests import (
    LayerWeights,
    ModelForwardReply,
    ModelForwardRequest,
    ModelWeightsReply,
    ModelWeightsRequest,
)
from attention_contract.schemas.weights import BY_KEY, HeadStatistics, TopKeys
from attention_service.models.answers.model_forward import forward_pass, forward_reply
from attention_service.models.answers.model_weights import layer_weights, weights_pass, weights_reply
from attention_service.models.inputs.input_stacks import Inputs, Stack, Tokens
from attention_service.models.loaded.checked_request import CheckedRequest, may_have_more_rows
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import weights_with
from attention_service.models.passes.attention_pass import AttentionPass, OwnTexts
from attention_service.models.passes.module_taps import CHOSEN_SHARE, MODULE_TAPS
from attention_service.prompts.named_pairs import PairField, lists_by_text

Question = tuple[Any, CheckedRequest]
"""A request, and what was read of it."""
_OF_TEXTS: Final[tuple[PairField, ...]] = ("pairs", "candidates")
"""Options of statistics that each text has of its own."""
_REPLY_NUMBERS: Final = 2**18
"""Numbers of weights in a reply up to which the same holds: 1 MiB."""


def group_of(loaded: LoadedModel, request: WireModel, checked: CheckedRequest) -> Hashable:
    """Equal for questions that may share a pass if their texts are alike in length; None for one that runs alone."""
    if not isinstance(request, ModelForwardRequest | ModelWeightsRequest):
        return None
    if not may_have_more_rows(loaded, request, checked):
        return None
    inputs = checked.inputs
    edited = {edit.tap for edits in checked.edits.values() for edit in edits}
    beside = edited & MODULE_TAPS or (
        isinstance(request, ModelWeightsRequest)
        and (CHOSEN_SHARE in (request.statistics or ()) or request.statistic_options.names_parts)
    )
    if beside:
        return None
    apart = None if checked.adapter is None or checked.adapter.mixes else checked.adapter
    if isinstance(request, ModelForwardRequest):
        several_taps = request.return_ or request.average_heads or request.positions not in (None, [-1])
        several_taps = several_taps or any(inputs.answers)
        plain = loaded.head.predicts == "next" and request.select is None and not several_taps
        return (ModelForwardRequest, apart, request.top_k, request.compare) if plain else None
    heads = None if request.select is None else tuple(request.select.heads or ())
    pairs = len(inputs.text.ids) * inputs.text.length**2 * request.return_weights
    numbers = pairs * sum([count * len(heads or range(place.widths.heads)) for place, count in checked.kinds])
    by_token = request.select is not None and (request.select.queries or request.select.keys) is not None
    if by_token or request.compare or request.pool is not None or numbers > _REPLY_NUMBERS:
        return None
    statistics = None if request.statistics is None else tuple(request.statistics)
    options = (request.top_k, request.return_weights, request.average_heads, statistics, request.normalize, heads)
    layers = tuple([place.key for place in checked.places])
    of_texts = tuple(name for name in _OF_TEXTS if getattr(request.statistic_options, name) is not None)
    settings = request.statistic_options.model_dump_json(exclude=set[str](_OF_TEXTS))
    return (ModelWeightsRequest, apart, layers, options, of_texts, settings)


@torch.no_grad()
def joined_replies(loaded: LoadedModel, questions: Sequence[Question]) -> list[WireModel]:
    """Answer questions of one group by one pass. Raises what it does."""
    request = _of_all(questions)
    stack = loaded.reader.batch([text for _, checked in questions for text in _texts(checked.inputs.text)])
    inputs = Inputs(several=True, text=stack, target=None, arguments=loaded.reader.arguments(stack))
    watch = {probe.id: probe for _, checked in questions for probe in checked.watch}
    whole = replace(questions[0][1], inputs=inputs, edits={}, watch=[*watch.values()])
    places = _places(loaded, questions)
    edited = [texts for (_, checked), texts in zip(questions, places, strict=True) if checked.edits]
    with loaded.adapters.of_rows([checked.adapter for _, checked in questions for _ in checked.inputs.text.ids]):
        if isinstance(request, ModelForwardRequest):
            return _parted(loaded, questions, places, forward_reply(loaded, request, whole, edited), _forward_part)
        return _parted(loaded, questions, places, weights_reply(loaded, request, whole, edited), _weights_part)


def _of_all(questions: Sequence[Question]) -> Any:
    """The first request, with the pairs and the candidates of the texts of all."""
    first = questions[0][0]
    lists: dict[str, list[Any]] = {}
    for request, checked in questions if isinstance(first, ModelWeightsRequest) else ():
        for name in _OF_TEXTS:
            given = getattr(request.statistic_options, name)
            if given is not None:
                lists.setdefault(name, []).extend(lists_by_text(name, given, len(checked.inputs.text.ids)))
    if not lists:
        return first
    return first.model_copy(update={"statistic_options": first.statistic_options.model_copy(update=lists)})


def _texts(stack: Stack) -> list[Tokens]:
    """The texts of one request without their padding."""
    real = stack.ids.new_ones(stack.ids.shape, dtype=torch.bool) if stack.mask is None else stack.mask
    tokens_of_texts = []
    for ids, own, spans in zip(stack.ids.tolist(), real.tolist(), stack.spans, strict=True):
        tokens_of_texts.append(Tokens([*compress(ids, own)], [*compress(spans, own)]))
    return tokens_of_texts


def _places(loaded: LoadedModel, questions: Sequence[Question]) -> list[OwnTexts]:
    """The texts of each request among all, with its questions to the layers if it has edits."""
    longest = max(checked.inputs.text.length for _, checked in questions)
    own_texts: list[OwnTexts] = []
    first = 0
    for request, checked in questions:
        length, behind = checked.inputs.text.length, first + len(checked.inputs.text.ids)
        tokens = slice(longest - length, longest) if loaded.reader.pads_left else slice(0, length)
        ask: Any = forward_pass if isinstance(request, ModelForwardRequest) else weights_pass
        own = ask(loaded, request, checked) if checked.edits else AttentionPass({})
        own_texts.append(OwnTexts(slice(first, behind), tokens, own))
        first = behind
    return own_texts


def _parted(
    loaded: LoadedModel, questions: Sequence[Question], places: Sequence[OwnTexts], reply: Any,
    part: Callable[[Any, OwnTexts, bool], dict[str, Any]],
) -> list[WireModel]:  # fmt: skip
    """The reply to each question, from that to all."""
    replies: list[WireModel] = []
    for question, own in zip(questions, places, strict=True):
        checked = question[1]
        several, labels = checked.inputs.several, loaded.reader.labels(checked.inputs.text)
        kernels = list(dict.fromkeys([*reply.ran.kernels, *own.attention_pass.kernels]))
        weights = weights_with(loaded, checked.adapter)
        ran = reply.ran.model_copy(update={"joined": len(questions), "kernels": kernels, "weights": weights})
        fields = part(reply, own, several) | {"labels": labels if several else labels[0], "ran": ran}
        fields["watched"] = _watched_part(reply, checked, own) if checked.watch else ABSENT
        replies.append(reply.model_copy(update=fields))
    return replies


def _forward_part(reply: ModelForwardReply, texts: OwnTexts, _: bool) -> dict[str, Any]:
    first, rows = texts.rows.start, range(texts.rows.start, texts.rows.stop)
    shown = [
        prediction.model_copy(
            update={"text": prediction.text - first, "position": prediction.position - texts.tokens.start}
        )
        for prediction in reply.predictions
        if prediction.text in rows
    ]
    return {"predictions": shown}


def _watched_part(
    reply: ModelForwardReply | ModelWeightsReply, checked: CheckedRequest, texts: OwnTexts
) -> list[ProbeScores]:
    """The scores of a request's texts by its probes, of those by the probes of all."""
    scores = {watched_probe.probe: np.asarray(watched_probe.scores) for watched_probe in reply.watched}
    row = texts.rows if checked.inputs.several else texts.rows.start
    return [
        valid(ProbeScores, {"probe": probe.id, "scores": scores[probe.id][row][..., texts.tokens]})
        for probe in checked.watch
    ]


def _weights_part(reply: ModelWeightsReply, texts: OwnTexts, several: bool) -> dict[str, Any]:
    row = texts.rows if several else texts.rows.start
    edited = texts.attention_pass.take()
    layers = [
        layer_weights(layer.layer, edited[layer.layer]) if layer.layer in edited
        else _layer_part(layer, row, texts.tokens) for layer in reply.layers
    ]  # fmt: skip
    return {"layers": layers}


def _layer_part(layer: LayerWeights, row: int | slice, tokens: slice) -> LayerWeights:
    statistics = {
        name: value for name in HeadStatistics.model_fields if (value := getattr(layer.statistics, name)) is not ABSENT
    }
    fields: dict[str, Any] = {
        "layer": layer.layer,
        "statistics": valid(
            HeadStatistics,
            {
                name: _row(value, row)[..., tokens] if name in BY_KEY else _row(value, row)
                for name, value in statistics.items()
            },
        ),
        "queries": np.asarray(np.asarray(layer.queries)[row]),  # an array, as in the reply to one text
    }
    if layer.weights is not ABSENT:
        fields["weights"] = np.asarray(layer.weights)[row][..., tokens, tokens]
    if layer.chosen is not ABSENT:
        fields["chosen"] = np.asarray(layer.chosen)[row][..., tokens, tokens]
    if layer.top is not ABSENT:
        most = tokens.stop - tokens.start
        keys, weights = (np.asarray(x)[row][..., tokens, :most] for x in (layer.top.keys, layer.top.weights))
        fields["top"] = valid(TopKeys, {"keys": np.where(keys < 0, -1, keys - tokens.start), "weights": weights})
    return valid(LayerWeights, fields)


def _row(value: Any, row: int | slice) -> Any:
    return (
        {name: _row(member, row) for name, member in value.items()}
        if isinstance(value, dict)
        else np.asarray(value)[row]
    )
