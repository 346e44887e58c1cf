"""The weights of a model's heads, and statistics of them."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import LayerWeights, ModelWeightsReply, ModelWeightsRequest, Passage
from attention_contract.schemas.weights import (
    NEEDS_NEEDLE,
    NEEDS_PAIRS,
    HeadStatistics,
    StatisticOptions,
    TopKeys,
    WeightsDifferences,
    WeightsRequest,
)
from attention_service.core.inspection.statistics import TOKEN_STATISTICS
from attention_service.core.problem import Problem
from attention_service.models.answers.given_answers import check_answers
from attention_service.models.answers.model_recordings import Recorded, recording_of
from attention_service.models.answers.read_states import states_to_read, watched_scores
from attention_service.models.inputs.input_stacks import Stack
from attention_service.models.loaded.checked_request import CheckedRequest, layer_tasks, read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.loaded.model_runner import RunSpec
from attention_service.models.passes.attention_pass import AttentionPass, KeptAttentions, LayerTask, OwnTexts
from attention_service.models.passes.attention_places import BOTH, AttentionPlace
from attention_service.models.passes.module_taps import CHOSEN_SHARE
from attention_service.prompts.conversations import ANSWER, ChatForm, Conversation
from attention_service.prompts.named_spans import span_tokens
from attention_service.runtime.binding.bound_pairs import TextTokens
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.bound_statistics import (
    BoundStatistics,
    bind_statistics,
    check_able,
    check_unspoiled,
)
from attention_service.runtime.scheduling.operation import Fields
from attention_transformers.model_layers import LayerKey

_AT: Final = "statistic_options"


@dataclass(frozen=True)
class NamedKeys:
    """The tokens of the parts of a text that a request names: bool ``[B, L]``, of the text that prompts are in."""

    passages: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    needle: NDArray[np.bool_] | None = None
    next_tokens: NDArray[np.int64] | None = None
    """``[B, Q]``: the token of an answer after each query; −2 for a query that predicts none of it."""


def weights_pass(
    loaded: LoadedModel,
    request: ModelWeightsRequest,
    checked: CheckedRequest,
    unedited: Mapping[LayerKey, Problem] | None = None,
) -> AttentionPass:
    """Return the pass of a request for weights; ``unedited``: their attentions without the edits.

    Raises InvalidRequest.
    """
    inspected = _inspection(request)
    check_able(
        request.statistics, (NEEDS_NEEDLE | NEEDS_PAIRS).union(*(place.own_statistics for place, _ in checked.kinds))
    )
    check_unspoiled(request.statistics, chain.from_iterable(checked.edits.values()))
    named = _named_keys(loaded, request, checked)
    statistics: dict[Hashable, BoundStatistics] = {}

    def task(place: AttentionPlace, bound: BoundRequest) -> LayerTask:
        over = place.queries, place.keys, place.compression, place.mixes, place.own_statistics
        if over not in statistics:
            statistics[over] = _layer_statistics(request, checked, named, place, bound)
        share = CHOSEN_SHARE in (request.statistics or ())
        return LayerTask(weights=inspected, statistics=statistics[over], chosen_share=share)

    tasks = layer_tasks(loaded, checked, request, task)
    before = unedited or {}
    return AttentionPass(
        tasks | {layer: replace(tasks[layer], before=before[layer]) for layer in tasks.keys() & before}
    )


def weights_reply(
    loaded: LoadedModel, request: ModelWeightsRequest, checked: CheckedRequest | None = None,
    own: Sequence[OwnTexts] = (),
) -> ModelWeightsReply:  # fmt: skip
    """Return the reply alone: see ``recorded_weights``."""
    return recorded_weights(loaded, request, checked, own).reply


@torch.no_grad()
def recorded_weights(
    loaded: LoadedModel,
    request: ModelWeightsRequest,
    checked: CheckedRequest | None = None,
    own: Sequence[OwnTexts] = (),
) -> Recorded[ModelWeightsReply]:
    """Return what each head of each layer looks at, with the recording of the run.

    ``checked``: the request, if it was read before; ``own``: the texts of requests with edits, if several share a pass.
    Raises InvalidRequest that names the field at fault.
    """
    checked = checked or read_request(loaded, request)
    unedited = KeptAttentions([place.key for place in checked.places])
    if request.compare and any(checked.edits.values()):
        loaded.runner.run(checked.inputs.arguments, RunSpec(unedited))
    attention_pass = weights_pass(loaded, request, checked, unedited.problems)
    attention_pass.started, attention_pass.own = unedited.started, own
    read = states_to_read(loaded, checked, hidden=request.keep)
    run = loaded.runner.run(checked.inputs.arguments, RunSpec(attention_pass, read))
    results = attention_pass.take()
    layers = [
        layer_weights(place.key, results[place.key], implicit=place.mixes != "attention") for place in checked.places
    ]
    recording = recording_of(loaded, request, checked.inputs, results, run.at) if request.keep else None
    watched = {"watched": watched_scores(loaded, checked, run.at)} if checked.watch else {}
    fields = {"layers": layers} | watched | run_fields(loaded, checked, attention_pass)
    return Recorded(valid(ModelWeightsReply, fields), recording)


def layer_weights(key: LayerKey, results: Fields, *, implicit: bool = False) -> LayerWeights:
    """The results of an inspection as part of the reply."""
    fields = {name: value for name, value in results.items() if name != "whole"}
    if implicit:
        fields["implicit"] = True
    fields["statistics"] = valid(HeadStatistics, fields["statistics"])
    if "top" in fields:
        fields["top"] = valid(TopKeys, fields["top"])
    if "differences" in fields:
        changed = dict(fields["differences"])
        fields["differences"] = valid(
            WeightsDifferences, changed | {"statistics": valid(HeadStatistics, changed["statistics"])}
        )
    return valid(LayerWeights, {"layer": key, **fields})


def _inspection(request: ModelWeightsRequest) -> WeightsRequest:
    """The request as it is to each layer, without its edits."""
    names = ("top_k", "return_weights", "pool", "average_heads", "statistics", "compare", "normalize")
    return valid(WeightsRequest, {name: getattr(request, name) for name in names})


def _named_keys(loaded: LoadedModel, request: ModelWeightsRequest, checked: CheckedRequest) -> NamedKeys:
    """Find the tokens of passages and of the needle. Raises InvalidRequest that names the field at fault."""
    options, names = request.statistic_options, NEEDS_NEEDLE.intersection(request.statistics or ())
    if names and options.needle is None:
        raise InvalidRequest.at(
            f"{_AT}.needle", f"the statistic {min(names)} counts the tokens of a part of the text; send that part"
        )
    if not options.names_parts:
        return NamedKeys()
    if options.names_text and (
        request.all_images or request.all_audio or (request.text is None and request.messages is None)
    ):
        raise InvalidRequest.at(
            _AT, "passages, needle, characters and messages are parts of text or messages; send one of these alone"
        )
    texts = _texts(loaded, request, checked) if options.names_text else []
    passages = {
        name: _tokens_of(checked, texts, part, f"{_AT}.passages.{name}") for name, part in options.passages.items()
    }
    passages |= _spans(loaded, request, checked, texts)
    if not names or options.needle is None:
        return NamedKeys(passages)
    inputs = checked.inputs
    check_answers(loaded, inputs, "answer" if request.messages is None else "messages")
    ids = inputs.predicted.host_ids
    following = np.full_like(ids, -2)
    for row, places in enumerate(inputs.answers):
        following[row, np.array(places) - 1] = ids[row, places]
    return NamedKeys(passages, _tokens_of(checked, texts, options.needle, f"{_AT}.needle"), following)


def _spans(
    loaded: LoadedModel, request: ModelWeightsRequest, checked: CheckedRequest, texts: list[str]
) -> dict[str, NDArray[np.bool_]]:
    """The tokens ``[B, L]`` of each named span. Raises InvalidRequest."""
    stack, tokens_by_span = checked.inputs.text, dict[str, NDArray[np.bool_]]()
    known: list[str | Conversation | None] = [*texts] if texts else [None] * len(stack.ids)
    if request.messages is not None and texts:
        known = [loaded.reader.conversation(request.messages, ChatForm.of(request), parted=True)]
    for number, span in enumerate(request.statistic_options.spans):
        tokens = tokens_by_span[span.name] = np.zeros((len(stack.ids), stack.length), bool)
        for row, (real, spans, text) in enumerate(zip(stack.real_tokens, stack.spans, known, strict=True)):
            tokens[row, span_tokens(span, f"{_AT}.spans.{number}", real, spans, text)] = True
    return tokens_by_span


def _layer_statistics(
    request: ModelWeightsRequest, checked: CheckedRequest, named: NamedKeys, place: AttentionPlace, bound: BoundRequest
) -> BoundStatistics:
    """The statistics of one layer. Raises InvalidRequest."""
    options, queries, keys = request.statistic_options, checked.queries(place), checked.keys(place)
    of_tokens = options.token_classes or TOKEN_STATISTICS.intersection(request.statistics or ())
    needle = None if named.needle is None else _at_keys(checked, place, named.needle)
    if needle is not None and queries is not checked.inputs.predicted:
        needle = np.zeros_like(needle)  # nothing is generated from these queries
    given = StatisticOptions(
        window=options.window,
        sinks=options.sinks,
        classes={name: _at_keys(checked, place, tokens) for name, tokens in named.passages.items()},
        token_classes=options.token_classes,
        tokens=keys.host_ids if of_tokens else None,
        query_tokens=queries.host_ids if of_tokens else None,
        needle=needle,
        next_tokens=named.next_tokens if queries is checked.inputs.predicted else None,
        pairs=options.pairs,
        candidates=options.candidates,
    )
    names = request.statistics  # the share of a choice is computed of other weights
    bound_statistics = bind_statistics(
        names if names is None else [name for name in names if name != CHOSEN_SHARE],
        given, batch=bound.batch, queries=bound.queries, keys=bound.keys,
        able=place.own_statistics, normalize=request.normalize, implicit=place.mixes != "attention",
        same_tokens=queries is keys, texts=_text_tokens(request, place, queries, keys),
        where=f" of layer {place.key}",
    )  # fmt: skip
    return replace(bound_statistics, starts=keys.starts, key_positions=keys.positions)


def _text_tokens(request: ModelWeightsRequest, place: AttentionPlace, queries: Stack, keys: Stack) -> list[TextTokens]:
    """The tokens of each text among the queries and the keys of a layer. Raises InvalidRequest for windows."""
    if place.windows is not None and request.statistic_options.pairs is not None:
        raise InvalidRequest.at(
            f"{_AT}.pairs", f"layer {place.key} attends within windows, whose tokens are no text; name other layers"
        )
    return [TextTokens(*text_tokens) for text_tokens in zip(queries.real_tokens, keys.real_tokens, strict=True)]


def _texts(loaded: LoadedModel, request: ModelWeightsRequest, checked: CheckedRequest) -> list[str]:
    """The characters that the spans of each text count."""
    if request.messages is not None:
        return [loaded.reader.conversation(request.messages, ChatForm.of(request)).text]
    texts = request.text if isinstance(request.text, list) else [request.text or ""]
    rows = len(checked.inputs.text.ids)
    return texts if len(texts) == rows else texts * rows


def _tokens_of(checked: CheckedRequest, texts: list[str], part: Passage, param: str) -> NDArray[np.bool_]:
    """The tokens ``[B, L]`` of one part of each text. Raises InvalidRequest."""
    if isinstance(part, list) and len(part) != len(texts):
        raise InvalidRequest.at(param, f"expected one part for each of {len(texts)} texts; got {len(part)}")
    stack = checked.inputs.text
    marked = np.zeros((len(texts), stack.length), bool)
    for row, text in enumerate(texts):
        own, at = (part[row], f"{param}.{row}") if isinstance(part, list) else (part, param)
        of = f" {row}" if len(texts) > 1 and isinstance(part, str) else ""
        begin = text.find(own)
        if begin < 0:
            raise InvalidRequest.at(at, f"expected a part of the text{of}; it is not in it")
        parts = stack.parts[row] if stack.parts else [None] * stack.length
        for token, (span, source) in enumerate(zip(stack.spans[row], parts, strict=True)):
            inside = span is not None and begin < span[1] <= begin + len(own)
            marked[row, token] = inside and source not in {ANSWER, "text_pair"}
        if not marked[row].any():
            raise InvalidRequest.at(at, f"no token of the text{of} ends in it; name a longer part")
    return marked


def _at_keys(checked: CheckedRequest, place: AttentionPlace, tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The keys of a layer that are these tokens of the text."""
    inputs = checked.inputs
    marked = np.zeros(tuple(checked.keys(place).ids.shape), bool)
    if place.keys == BOTH and inputs.target is not None:
        marked[:, inputs.target.length :] = tokens
    elif place.windows is None and checked.stack(place.keys) is inputs.text:
        marked[:, : tokens.shape[1]] = tokens
    return marked
