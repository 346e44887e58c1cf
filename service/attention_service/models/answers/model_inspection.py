"""Two questions to a loaded model: its predictions with taps of its layers, and what its heads look at."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.model_requests import (
    LayerTaps,
    LayerWeights,
    ModelForwardReply,
    ModelForwardRequest,
    ModelTap,
    ModelWeightsReply,
    ModelWeightsRequest,
)
from attention_contract.schemas.prompts import ModelInput
from attention_contract.schemas.recordings import RecordingFile
from attention_contract.schemas.weights import (
    NEEDS_NEEDLE,
    HeadStatistics,
    TopKeys,
    WeightsDifferences,
    WeightsRequest,
)
from attention_service.core.problem import Problem
from attention_service.core.tensors import to_numpy
from attention_service.models.answers.given_answers import answer_places, answer_replies
from attention_service.models.answers.layer_statistics import layer_statistics, named_keys
from attention_service.models.answers.model_recordings import recording_of
from attention_service.models.inputs.prediction_head import Places, Rows
from attention_service.models.inputs.token_predictions import pooled, predictions
from attention_service.models.loaded.checked_request import CheckedRequest, read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.passes.attention_pass import NOTHING, AttentionPass, KeptAttentions, LayerTask, OwnTexts
from attention_service.models.passes.attention_places import MEDIA, AttentionPlace
from attention_service.models.passes.chosen_keys import CHOSEN_SHARE
from attention_service.models.passes.layer_states import LayerStates
from attention_service.runtime.binding.bound_request import BoundRequest
from attention_service.runtime.binding.bound_statistics import (
    BoundStatistics,
    check_able,
    check_sink_mass,
)
from attention_service.runtime.binding.selection import bind_selection
from attention_service.runtime.scheduling.operation import Fields
from attention_transformers.model_layers import (
    LayerKey,
)

Ask = Callable[[AttentionPlace, BoundRequest], LayerTask]
"""Makes the task at the layers of one kind, of which it gets one."""
LONGEST: Final = 2048
"""Tokens of a text up to which its question is answered together with others."""
_ARGUMENTS: Final = frozenset({"input_ids", "attention_mask", "position_ids"})
"""The arguments of models whose texts can be filled up with those of others."""
_AROUND: Final = frozenset({"hidden", "logits", "output", "pooled"})
"""Returned tensors that are not made by the attention function."""


def forward_pass(loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest) -> AttentionPass:
    """Return the pass of a request for predictions and taps. Raises InvalidRequest."""
    taps: Any = _inner_taps(request)
    return AttentionPass(_tasks(loaded, checked, request, lambda place, _: _taps_task(place, request, taps)))


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
    check_able(request.statistics, NEEDS_NEEDLE.union(*(place.own_statistics for place, _ in checked.kinds)))
    check_sink_mass(request.statistics, chain.from_iterable(checked.edits.values()))
    named = named_keys(loaded, request, checked)
    statistics: dict[Hashable, BoundStatistics] = {}

    def task(place: AttentionPlace, bound: BoundRequest) -> LayerTask:
        sinks = "sink_mass" in place.own_statistics
        over = place.queries, place.keys, place.compression, place.mixes, sinks
        if over not in statistics:
            statistics[over] = layer_statistics(request, checked, named, place, bound)
        share = CHOSEN_SHARE in (request.statistics or ())
        return LayerTask(weights=inspected, statistics=statistics[over], chosen_share=share)

    tasks = _tasks(loaded, checked, request, task)
    before = unedited or {}
    return AttentionPass(
        tasks | {layer: replace(tasks[layer], before=before[layer]) for layer in tasks.keys() & before}
    )


def may_have_more_rows(
    loaded: LoadedModel, request: ModelForwardRequest | ModelWeightsRequest, checked: CheckedRequest
) -> bool:
    """True if the pass of a request may have further rows, which change none of its own."""
    inputs = checked.inputs
    places = [*[place for place, _ in checked.kinds], *[loaded.place_of(key) for key in checked.edits]]
    seen = inputs.media or inputs.target or request.images or set(inputs.arguments) - _ARGUMENTS
    # No trial has shown that texts of an observed attention do not change each other; a choice is one question.
    if request.alone or request.keep or seen or loaded.head.unit == "choice" or not loaded.stacks_texts:
        return False
    others = {(place.keys_of, place.mixes) for place in places} - {("tokens", "attention")}
    return inputs.text.length <= LONGEST and not others


@torch.no_grad()
def forward_reply(
    loaded: LoadedModel,
    request: ModelForwardRequest,
    checked: CheckedRequest | None = None,
    own: Sequence[OwnTexts] = (),
) -> ModelForwardReply:
    """Return predictions, and taps of layers; ``checked``: the request, if it was read before.

    ``own``: the texts of requests with edits, if several share the pass.
    Raises InvalidRequest that names the field at fault.
    """
    checked, wanted, keep = checked or read_request(loaded, request), set(request.return_), request.keep
    head, predicted = loaded.head, loaded.head.places(request.positions, checked.inputs)
    answered: Places = []
    if (
        predicted is not None
        and head.predicts == "next"
        and checked.inputs.target is None
        and all(checked.inputs.answers)
    ):
        answered = answer_places(checked.inputs)
        predicted = [[*row, *more] for row, more in zip(predicted, answered, strict=True)]
    if head.predicts is None and "logits" in wanted:
        raise InvalidRequest.at("return", f"{loaded.without_head}; leave logits out")
    taps: Any = _inner_taps(request)
    asking = forward_pass(loaded, request, checked)
    asking.own = own
    twice = not own and _is_twice(loaded, request, checked)
    before = None if twice else _other_rows(loaded, request, checked, predicted)
    if "hidden" in wanted:
        for place in checked.places:
            place.check_tap("hidden", f"return.{request.return_.index('hidden')}")
    states = LayerStates(loaded.all_places, asking)
    with states.reading(checked.places, output="output" in wanted, hidden=keep or "hidden" in wanted):
        run = _rows_twice if twice else _rows
        rows, output = run(loaded, checked, asking, predicted)
    rows, before = rows.halves if twice and rows is not None else (rows, before)
    found, several = asking.take(), checked.inputs.several
    fields: dict[str, Any] = {"predicts": head.predicts, "predictions": [], "layers": []}
    if rows is not None and answered:
        count = len(answered[0])
        fields["answer"] = answer_replies(
            loaded,
            checked.inputs,
            rows.logits[:, -count:],
            None if before is None else before.logits[:, -count:],
            request.compare or "",
        )
        rows, before = rows.without_last(count), None if before is None else before.without_last(count)
    if rows is not None and request.top_k:
        fields["predictions"] = predictions(
            head, loaded.reader, rows, checked.inputs.predicted, request.top_k, before, request.compare or ""
        )
    if rows is not None and "logits" in wanted:
        fields["logits"] = to_numpy(rows.logits if several else rows.logits[0])
    if "hidden" in wanted:
        stacks = sorted(states.inputs, key=MEDIA.__contains__)  # those of texts go before those of images
        first = states.inputs[stacks[0]]
        fields["embeddings"] = first if several else first[0]
    if "pooled" in wanted:
        vectors = pooled(output)
        fields["pooled"] = to_numpy(vectors if several else vectors[0])
    around = {"output": states.output, "hidden": states.hidden}
    for place in checked.places if wanted - {"logits", "pooled"} else ():
        layer = {name: found[place.key][name] for name in taps}
        for name, arrays in around.items():
            if name in wanted:
                batched = checked.several(place) if name == "output" else checked.several_states(place)
                layer[name] = arrays[place.key] if batched else arrays[place.key][0]
        fields["layers"].append(valid(LayerTaps, {"layer": place.key, **layer}))
    loaded.recording = _recorded(loaded, request, checked, found, states) if keep else None
    return valid(ModelForwardReply, fields | run_fields(loaded, checked, asking))


@torch.inference_mode()
def every_logit(loaded: LoadedModel, checked: CheckedRequest) -> Tensor:
    """Return the logits ``[B, L, V]`` at every token of texts, with the edits of a request."""
    request = ModelForwardRequest(tokens=[0])
    asking = AttentionPass(_tasks(loaded, replace(checked, places=[]), request, lambda place, _: NOTHING))
    stack = checked.inputs.predicted
    with LayerStates(loaded.all_places, asking).reading((), output=False, hidden=False):
        every = [[*range(stack.length)]] * len(stack.ids)
        return loaded.output_rows(checked.inputs.arguments, asking, every, stack)[0].logits


@torch.no_grad()
def weights_reply(
    loaded: LoadedModel,
    request: ModelWeightsRequest,
    checked: CheckedRequest | None = None,
    own: Sequence[OwnTexts] = (),
) -> ModelWeightsReply:
    """Return what each head of each layer looks at; ``checked``: the request, if it was read before.

    ``own``: the texts of requests with edits, if several share the pass.
    Raises InvalidRequest that names the field at fault.
    """
    checked = checked or read_request(loaded, request)
    unedited = KeptAttentions([place.key for place in checked.places])
    if request.compare and any(checked.edits.values()):
        loaded.run(checked.inputs.arguments, unedited, logits=torch.tensor([0]))
    asking = weights_pass(loaded, request, checked, unedited.problems)
    asking.started, asking.own = unedited.started, own
    states = LayerStates(loaded.all_places, asking)
    with states.reading(checked.places, output=False, hidden=request.keep):
        loaded.run(checked.inputs.arguments, asking, logits=torch.tensor([0]))
    found = asking.take()
    layers = [
        layer_weights(place.key, found[place.key], implicit=place.mixes != "attention") for place in checked.places
    ]
    loaded.recording = _recorded(loaded, request, checked, found, states) if request.keep else None
    return valid(ModelWeightsReply, {"layers": layers} | run_fields(loaded, checked, asking))


def _tasks(
    loaded: LoadedModel, checked: CheckedRequest, request: ModelForwardRequest | ModelWeightsRequest, ask: Ask
) -> dict[LayerKey, LayerTask]:
    """The tasks at the layers that are asked, and the edits of all. Raises InvalidRequest."""
    if request.keep and (checked.inputs.several or request.select is not None or request.average_heads):
        raise InvalidRequest.at(
            "keep",
            "a recording holds every head and query of one text; leave select and average_heads out, and send one text",
        )
    of_kind: dict[Hashable, LayerTask] = {}
    for place, _ in checked.kinds:
        if request.keep and place.windows is not None:
            raise InvalidRequest.at(
                "keep",
                f"layer {place.key} attends within windows, whose weights have no tokens in common with those of other "
                "layers, so that no recording holds them; leave keep out",
            )
        if request.keep:
            place.check_tap("hidden", "keep")
        bound = checked.bound(place)
        task = ask(place, bound)
        of_kind[place.kind] = replace(
            task,
            selection=task.selection if request.select is None else bind_selection(request.select, bound),
            whole=("weights",) if request.keep and place.keys_of == "tokens" else (),
            batched=checked.several(place),
            query_mask=checked.queries(place).mask,
        )
    found: dict[LayerKey, LayerTask] = {place.key: of_kind[place.kind] for place in checked.places}
    for key, edits in checked.edits.items():
        place = loaded.place_of(key)
        real = checked.keys(place).mask
        found[place.key] = replace(found.get(place.key, NOTHING), edits=edits, key_mask=real)
    return found


def _rows(
    loaded: LoadedModel, checked: CheckedRequest, asking: AttentionPass, places: Places | None
) -> tuple[Rows | None, Any]:
    """Run the model. Return its logits at these places of each text, None without a head, and its output."""
    if loaded.head.predicts is None:
        return None, loaded.run(checked.inputs.arguments, asking)
    return loaded.output_rows(checked.inputs.arguments, asking, places, checked.inputs.predicted)


def _unedited_rows(
    loaded: LoadedModel, _: ModelForwardRequest, checked: CheckedRequest, places: Places | None
) -> Rows | None:
    """The logits of the model without the edits."""
    return _rows(loaded, checked, AttentionPass({}), places)[0]


def _is_twice(loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest) -> bool:
    """True if one pass gives the predictions by the adapter and by its base."""
    if request.compare != "base" or loaded.head.predicts is None or not loaded.adapters.may_mix:
        return False
    plain = not checked.edits and set(request.return_) <= {"logits"}
    return plain and may_have_more_rows(loaded, request, checked)


def _rows_twice(
    loaded: LoadedModel, checked: CheckedRequest, asking: AttentionPass, places: Places | None
) -> tuple[Rows | None, Any]:
    """Run the model over each text twice, by the adapter and then by its base."""
    inputs = checked.inputs
    arguments = {name: torch.cat([x, x]) for name, x in inputs.arguments.items()}
    with loaded.adapters.beside_base(len(inputs.text.ids)):
        return loaded.output_rows(arguments, asking, places and [*places, *places], inputs.text.repeated(2))


def _other_rows(
    loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest, places: Places | None
) -> Rows | None:
    """The logits of the run that a request compares with; None without one, or without a head."""
    if not request.compare or loaded.head.predicts is None:
        return None
    return (_base_rows if request.compare == "base" else _unedited_rows)(loaded, request, checked, places)


def _base_rows(
    loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest, places: Places | None
) -> Rows | None:
    """The logits of the base, with the edits of the request."""
    asking = forward_pass(loaded, request.model_copy(update={"return_": [], "keep": False}), checked)
    states = LayerStates(loaded.all_places, asking)
    with loaded.adapters.using(None), states.reading((), output=False, hidden=False):
        return _rows(loaded, checked, asking, places)[0]


def _recorded(
    loaded: LoadedModel,
    request: ModelInput,
    checked: CheckedRequest,
    found: Mapping[LayerKey, Fields],
    states: LayerStates,
) -> RecordingFile:
    return recording_of(loaded, request, checked.inputs, found, states)


def _inner_taps(request: ModelForwardRequest) -> list[ModelTap]:
    """The taps that the attention function makes."""
    return [tap for tap in dict.fromkeys(request.return_) if tap not in _AROUND]


def _taps_task(place: AttentionPlace, request: ModelForwardRequest, taps: Sequence[Tap]) -> LayerTask:
    for tap in taps:
        place.check_tap(tap, f"return.{request.return_.index(tap)}")
    return LayerTask(taps=taps, average_heads=request.average_heads)


def _inspection(request: ModelWeightsRequest) -> WeightsRequest:
    """The request as it is to each layer, without its edits."""
    names = ("top_k", "return_weights", "pool", "average_heads", "statistics", "compare")
    return valid(WeightsRequest, {name: getattr(request, name) for name in names})


def layer_weights(key: LayerKey, found: Fields, *, implicit: bool = False) -> LayerWeights:
    """The results of an inspection as part of the reply."""
    fields = {name: value for name, value in found.items() if name != "whole"}
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
