"""The states of a text, one behind each layer, to which steering vectors are fitted."""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from attention_contract.base import valid
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.vectors import StatesReply, StatesRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.given_answers import check_answers
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.inputs.field_names import fields_named
from attention_service.models.inputs.input_stacks import Inputs
from attention_service.models.loaded.checked_request import CheckedRequest, read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import AttentionPlace

_ANY: Final[dict[str, Any]] = {"tokens": [0]}
"""The input by which the layers and their widths are learned."""


@dataclass(frozen=True)
class StatesPlan:
    """A request for states, checked."""

    asked: ModelForwardRequest
    """The question whose reply has the states."""
    checked: CheckedRequest
    tokens: list[int]
    """The positions over which the mean is taken."""


def plan_states(loaded: LoadedModel, request: StatesRequest) -> StatesPlan:
    """Check a request. Raises InvalidRequest that names the field at fault."""
    given = _ANY if request.text is None else {"text": request.text, "answer": request.answer}
    with fields_named(**{"return.0": "layers"}):
        asked = ModelForwardRequest(**given, layers=request.layers, return_=["hidden"], top_k=0)
        checked = read_request(loaded, asked)
    places = [place for place in checked.places if _is_steered(loaded, place)]
    if not places or (request.layers != "all" and len(places) < len(checked.places)):
        lacking = next((place.key for place in checked.places if place not in places), "none")
        raise InvalidRequest.at(
            "layers", f"layer {lacking} has no state of each token of the text that can be edited; name others"
        )
    checked = CheckedRequest(checked.inputs, places, checked.edits, checked.adapter)
    length = checked.inputs.text.length
    if request.position == "answer" and request.text is not None:
        check_answers(loaded, checked.inputs, "answer")
        tokens = [*checked.inputs.answers[0]]
        checked = replace(checked, inputs=_without_answer(checked.inputs))
    else:
        tokens = [length - 1] if request.position == "last" else [*range(length)]
    return StatesPlan(asked, checked, tokens)


def _without_answer(inputs: Inputs) -> Inputs:
    """The same input as one text, so that no pass makes the logits of an answer."""
    return replace(inputs, text=replace(inputs.text, parts=None, answers=None))


def _is_steered(loaded: LoadedModel, place: AttentionPlace) -> bool:
    return place.queries == "text" and loaded.runner.refuses((place.key, "hidden"), "edit") is None


@torch.no_grad()
def states_reply(loaded: LoadedModel, plan: StatesPlan) -> StatesReply:
    """Run the model, and take the mean ``[d]`` of the states of some of its tokens behind each layer."""
    layers = forward_reply(loaded, plan.asked, plan.checked).layers
    states = {str(layer.layer): np.asarray(layer.hidden, np.float64)[plan.tokens].mean(0) for layer in layers}
    return valid(StatesReply, {"states": states})
