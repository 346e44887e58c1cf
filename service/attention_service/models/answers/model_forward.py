"""A model's predictions for an input, with taps of its layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Tap
from attention_contract.schemas.model_requests import LayerTaps, ModelForwardReply, ModelForwardRequest, ModelTap
from attention_service.core.tensors import to_numpy
from attention_service.models.answers.given_answers import answer_places, answer_replies
from attention_service.models.answers.model_recordings import recording_of
from attention_service.models.inputs.prediction_head import Places, Rows
from attention_service.models.inputs.token_predictions import pooled, predictions
from attention_service.models.loaded.checked_request import (
    CheckedRequest,
    layer_tasks,
    may_have_more_rows,
    read_request,
)
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import run_fields
from attention_service.models.passes.attention_pass import NOTHING, AttentionPass, LayerTask, OwnTexts
from attention_service.models.passes.attention_places import MEDIA, AttentionPlace
from attention_service.models.passes.layer_states import LayerStates

_AROUND: Final = frozenset({"hidden", "logits", "output", "pooled"})
"""Returned tensors that are not made by the attention function."""


def forward_pass(loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest) -> AttentionPass:
    """Return the pass of a request for predictions and taps. Raises InvalidRequest."""
    taps: Any = _inner_taps(request)
    return AttentionPass(layer_tasks(loaded, checked, request, lambda place, _: _taps_task(place, request, taps)))


def _check_head(loaded: LoadedModel, request: ModelForwardRequest) -> None:
    """Raise InvalidRequest for logits, or predictions of some tokens, of a model without a prediction head."""
    if loaded.head.predicts is None:
        if "logits" in request.return_:
            raise InvalidRequest.at("return", f"{loaded.without_head}; leave logits out")
        if request.positions is not None:
            raise InvalidRequest.at("positions", f"{loaded.without_head}; leave positions out")
        if request.top_k not in {0, ModelForwardRequest.model_fields["top_k"].default}:
            raise InvalidRequest.at("top_k", f"{loaded.without_head}; leave top_k out")
        if request.compare is not None:
            raise InvalidRequest.at("compare", f"{loaded.without_head}; leave compare out")


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
    _check_head(loaded, request)
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
    loaded.recording = recording_of(loaded, request, checked.inputs, found, states) if keep else None
    return valid(ModelForwardReply, fields | run_fields(loaded, checked, asking))


@torch.inference_mode()
def every_logit(loaded: LoadedModel, checked: CheckedRequest) -> Tensor:
    """Return the logits ``[B, L, V]`` at every token of texts, with the edits of a request."""
    request = ModelForwardRequest(tokens=[0])
    asking = AttentionPass(layer_tasks(loaded, replace(checked, places=[]), request, lambda place, _: NOTHING))
    stack = checked.inputs.predicted
    with LayerStates(loaded.all_places, asking).reading((), output=False, hidden=False):
        every = [[*range(stack.length)]] * len(stack.ids)
        return loaded.output_rows(checked.inputs.arguments, asking, every, stack)[0].logits


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


def _inner_taps(request: ModelForwardRequest) -> list[ModelTap]:
    """The taps that the attention function makes."""
    return [tap for tap in dict.fromkeys(request.return_) if tap not in _AROUND]


def _taps_task(place: AttentionPlace, request: ModelForwardRequest, taps: Sequence[Tap]) -> LayerTask:
    for tap in taps:
        place.check_tap(tap, f"return.{request.return_.index(tap)}")
    return LayerTask(taps=taps, average_heads=request.average_heads)
