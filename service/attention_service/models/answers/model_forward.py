"""A model's predictions for an input, with taps of its layers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import LayerTaps, ModelForwardReply, ModelForwardRequest, ModelTap
from attention_service.core.tensors import to_numpy
from attention_service.models.answers.given_answers import answer_places, answer_replies, has_answers
from attention_service.models.answers.model_recordings import Recorded, recording_of
from attention_service.models.answers.read_states import entered_by_stack, states_to_read, watched_scores
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
from attention_service.models.loaded.model_runner import ON_HOST, Predictions, Reading, RunResult, RunSpec
from attention_service.models.passes.attention_pass import NOTHING, AttentionPass, LayerTask, OwnTexts
from attention_service.models.passes.attention_places import MEDIA
from attention_service.models.passes.points import EMBEDDINGS, Point

_AROUND: Final = frozenset({"hidden", "mlp", "router", "logits", "output", "pooled", "embeddings"})
"""Returned tensors that are not made by the attention function."""


def forward_pass(loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest) -> AttentionPass:
    """Return the pass of a request for predictions and taps. Raises InvalidRequest."""
    taps: Any = _inner_taps(request)
    for place, _ in checked.kinds:
        for tap in taps:
            loaded.runner.check_tap(place, tap, "read", f"return.{request.return_.index(tap)}")
    task = LayerTask(taps=taps, average_heads=request.average_heads)
    return AttentionPass(layer_tasks(loaded, checked, request, lambda *_: task))


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


def forward_reply(
    loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest | None = None,
    own: Sequence[OwnTexts] = (),
) -> ModelForwardReply:  # fmt: skip
    """Return the reply alone: see ``recorded_forward``."""
    return recorded_forward(loaded, request, checked, own).reply


@torch.no_grad()
def recorded_forward(
    loaded: LoadedModel,
    request: ModelForwardRequest,
    checked: CheckedRequest | None = None,
    own: Sequence[OwnTexts] = (),
) -> Recorded[ModelForwardReply]:
    """Return predictions, and taps of layers, with the recording of the run.

    ``checked``: the request, if it was read before; ``own``: the texts of requests with edits, if several share a pass.
    Raises InvalidRequest that names the field at fault.
    """
    checked, wanted, keep = checked or read_request(loaded, request), set(request.return_), request.keep
    head, predicted = loaded.head, loaded.head.places(request.positions, checked.inputs)
    answered: Places = []
    if predicted is not None and has_answers(loaded, checked.inputs):
        answered = answer_places(checked.inputs)
        predicted = [[*row, *more] for row, more in zip(predicted, answered, strict=True)]
    _check_head(loaded, request)
    taps: Any = _inner_taps(request)
    attention_pass = forward_pass(loaded, request, checked)
    attention_pass.own = own
    twice = not own and _is_twice(loaded, request, checked)
    before = None if twice else _other_rows(loaded, request, checked, predicted)
    around: list[ModelTap] = [name for name in ("hidden", "mlp", "router") if name in wanted]
    for name, place in product(around, checked.places):
        loaded.runner.check_tap(place, name, "read", f"return.{request.return_.index(name)}")
    read = states_to_read(loaded, checked, wanted & {"output", "mlp", "router"}, hidden=keep or "hidden" in wanted)
    read |= dict.fromkeys([EMBEDDINGS] if "embeddings" in wanted else (), ON_HOST)
    run = (_run_twice if twice else _run)(loaded, checked, attention_pass, predicted, read)
    rows = run.rows
    rows, before = rows.halves if twice and rows is not None else (rows, before)
    results, several = attention_pass.take(), checked.inputs.several
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
    for entering, state in _entering(loaded, run.at, wanted).items():
        fields[entering] = to_numpy(state if several else state[0])
    if "pooled" in wanted:
        vectors = pooled(run.output)
        fields["pooled"] = to_numpy(vectors if several else vectors[0])
    for place in checked.places if wanted - {"logits", "pooled", "embeddings"} else ():
        layer = {name: results[place.key][name] for name in taps}
        for name in ("output", "mlp", "router", "hidden"):
            if name in wanted:
                batched = checked.several(place) if name == "output" else checked.several_states(place)
                array = to_numpy(run.at[place.key, name])
                layer[name] = array if batched else array[0]
        fields["layers"].append(valid(LayerTaps, {"layer": place.key, **layer}))
    if checked.watch:
        fields["watched"] = watched_scores(loaded, checked, run.at)
    recording = recording_of(loaded, request, checked.inputs, results, run.at) if keep else None
    return Recorded(valid(ModelForwardReply, fields | run_fields(loaded, checked, attention_pass)), recording)


def _entering(loaded: LoadedModel, at: Mapping[Point, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The states that enter the model, and its first layer, by the names of the reply."""
    states: dict[str, Tensor] = {}
    if "hidden" in wanted:
        entered = entered_by_stack(at)
        states["entered"] = entered[min(entered, key=MEDIA.__contains__)]  # of texts rather than of images
    if "embeddings" in wanted:
        state = at[EMBEDDINGS]
        states["embeddings"] = state.flatten(1, 2) if state.ndim == 4 and loaded.reader.enters == "pixels" else state
    return states


@torch.inference_mode()
def every_logit(loaded: LoadedModel, checked: CheckedRequest) -> Tensor:
    """Return the logits ``[B, L, V]`` at every token of texts, with the edits of a request."""
    request = ModelForwardRequest(tokens=[0])
    attention_pass = AttentionPass(layer_tasks(loaded, replace(checked, places=[]), request, lambda place, _: NOTHING))
    stack = checked.inputs.predicted
    every = [[*range(stack.length)]] * len(stack.ids)
    spec = RunSpec(attention_pass, logits=Predictions(every, stack))
    return loaded.runner.run(checked.inputs.arguments, spec).logits.logits


def _run(
    loaded: LoadedModel, checked: CheckedRequest, attention_pass: AttentionPass, places: Places | None,
    read: Mapping[Point, Reading],
) -> RunResult:  # fmt: skip
    """Run the model, with its logits at these places of each text unless it has no head."""
    logits = None if loaded.head.predicts is None else Predictions(places, checked.inputs.predicted)
    return loaded.runner.run(checked.inputs.arguments, RunSpec(attention_pass, read, logits=logits))


def _unedited_rows(
    loaded: LoadedModel, _: ModelForwardRequest, checked: CheckedRequest, places: Places | None
) -> Rows | None:
    """The logits of the model without the edits."""
    return _run(loaded, checked, AttentionPass({}), places, {}).rows


def _is_twice(loaded: LoadedModel, request: ModelForwardRequest, checked: CheckedRequest) -> bool:
    """True if one pass gives the predictions by the adapter and by its base."""
    if request.compare != "base" or loaded.head.predicts is None or not loaded.adapters.may_mix:
        return False
    plain = not (checked.edits or checked.watch) and set(request.return_) <= {"logits"}
    return plain and may_have_more_rows(loaded, request, checked)


def _run_twice(
    loaded: LoadedModel, checked: CheckedRequest, attention_pass: AttentionPass, places: Places | None,
    read: Mapping[Point, Reading],
) -> RunResult:  # fmt: skip
    """Run the model over each text twice, by the adapter and then by its base."""
    inputs = checked.inputs
    arguments = {name: torch.cat([x, x]) for name, x in inputs.arguments.items()}
    logits = Predictions(places and [*places, *places], inputs.text.repeated(2))
    with loaded.adapters.beside_base(len(inputs.text.ids)):
        return loaded.runner.run(arguments, RunSpec(attention_pass, read, logits=logits))


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
    attention_pass = forward_pass(loaded, request.model_copy(update={"return_": [], "keep": False}), checked)
    with loaded.adapters.using(None):
        return _run(loaded, checked, attention_pass, places, {}).rows


def _inner_taps(request: ModelForwardRequest) -> list[ModelTap]:
    """The taps that the attention function makes."""
    return [tap for tap in dict.fromkeys(request.return_) if tap not in _AROUND]
