"""Questions about many texts, some at a time: the reply is that of one pass over all texts."""

from typing import get_args

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import ENCODERS, FAMILIES, PAIRS, device, loaded
from tools.models_walk.model_types import built

from attention_contract.base import WireModel
from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsRequest
from attention_contract.schemas.weights import StatisticName
from attention_contract.tensor_files import from_pieces, to_safetensors
from attention_contract.validation import validate
from attention_service.models.answers.divided_questions import divided, may_divide
from attention_service.models.answers.model_forward import recorded_forward
from attention_service.models.answers.model_weights import recorded_weights
from attention_service.models.costs.answer_parts import at_once
from attention_service.models.loaded.checked_request import read_request
from attention_service.models.loaded.loaded_model import LoadedModel

TEXTS = [[3, 4, 5, 6], [8, 3, 7, 9, 10, 3, 4], [6, 5, 7, 8, 4], [4, 9], [7, 7, 3, 5]]
WORDS = ["the cat sat on the mat", "the dog sat", "the mat and the cat", "the dog and the dog", "the cat"]
KNOCK_OUT = {"edits": {"1": [{"tap": "weights", "heads": [0], "set": 0}]}}
APART = {"retrieval", "chosen_share", "sink_mass", "classes", "pairs"}
PLAIN = [each for each in get_args(StatisticName) if each not in APART]
"""The statistics of every attention, without those that need a part of the text or what some models have alone."""
FORWARDS = [
    {"top_k": 3, "positions": [-1, -2]},
    {"top_k": 3, "positions": [[-1, 0], [2, -3], [1, 1], [0, 1], [-4, 3]]},
    {"return": ["weights", "output", "hidden", "logits"], "select": {"heads": [1]}, **KNOCK_OUT, "compare": "unedited"},
]
WEIGHTS = [
    {"top_k": 2, "statistics": PLAIN, "select": {"queries": [0, 1]}},
    {"return_weights": False, "pool": 2, **KNOCK_OUT, "compare": "unedited"},
]


def compare(model, request, recorded):
    """Compare the reply to a request in parts of two texts with that to all at once."""
    checked = read_request(model, request)
    assert may_divide(model, request, checked)
    whole = recorded(model, request, checked).reply
    parts = divided(model, request, checked, 2, recorded)
    count = len(checked.inputs.text.ids)
    assert next(parts) == min(2, count - 2)
    found = at_once(parts)
    found = from_pieces(to_safetensors(found, "reply"), "reply", type(whole))  # as it is sent
    same(found, from_pieces(to_safetensors(whole, "reply"), "reply", type(whole)))


def same(found, expected, path=""):
    assert type(found) is type(expected), path
    if isinstance(expected, WireModel):
        for name in type(expected).model_fields:
            if name == "top" and hasattr(expected, "statistics") and expected.top is not None:
                np.testing.assert_allclose(found.top.weights, expected.top.weights, atol=1e-5)  # keys may be tied
            elif name not in {"compute_ms", "predicted_ms"}:
                same(getattr(found, name), getattr(expected, name), f"{path}.{name}")
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for name in expected:
            same(found[name], expected[name], f"{path}.{name}")
    elif isinstance(expected, list) and not path.endswith(("tokens", "ids")):
        assert len(found) == len(expected), path
        for at, each in enumerate(expected):
            same(found[at], each, f"{path}.{at}")
    elif isinstance(expected, np.ndarray | float):
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=path)
    else:
        assert found == expected, path


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", FORWARDS)
def test_predictions_and_taps_are_those_of_one_pass(family, fields):
    if family in ENCODERS:  # they are without a head
        fields = {name: value for name, value in fields.items() if name not in {"compare", "positions", "top_k"}}
    if family in ENCODERS and "return" in fields:
        fields = fields | {"return": ["weights", "output", "hidden"]}
    if family in PAIRS:
        fields = {"top_k": 3, "return": ["logits", *fields.get("return", ())[:3]]}
    compare(loaded(family), validate(ModelForwardRequest, {"tokens": TEXTS, **fields}), recorded_forward)


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in PAIRS])
@pytest.mark.parametrize("fields", WEIGHTS)
def test_weights_and_statistics_are_those_of_one_pass(family, fields):
    compare(loaded(family), validate(ModelWeightsRequest, {"tokens": TEXTS, **fields}), recorded_weights)


@pytest.fixture(scope="module")
def spoken():
    return LoadedModel("llama", built("llama").requires_grad_(False), tokenizer(), device())


def test_answers_and_named_parts_of_texts_are_those_of_one_pass(spoken):
    answers = [f" {words.split()[1]} sat" for words in WORDS]
    fields = {"text": WORDS, "answer": answers}
    compare(spoken, validate(ModelForwardRequest, fields), recorded_forward)
    options = {"passages": {"noun": ["cat", "dog", "mat", "dog", "cat"], "article": "the"}, "needle": "the"}
    fields |= {"statistics": ["classes", "retrieval"], "statistic_options": options}
    compare(spoken, validate(ModelWeightsRequest, fields), recorded_weights)


def test_a_fault_of_the_last_text_is_found_before_the_first_and_names_its_place(spoken):
    options = {"passages": {"noun": ["cat", "dog", "mat", "dog", "dog"]}}
    fields = {"text": WORDS, "statistics": ["classes"], "statistic_options": options}
    request = validate(ModelWeightsRequest, fields)
    with pytest.raises(InvalidRequest) as fault:
        next(divided(spoken, request, read_request(spoken, request), 2, recorded_weights))
    assert fault.value.param == "statistic_options.passages.noun.4"


@pytest.mark.parametrize("fields", [
    {"alone": True}, {"text": WORDS[0]},
    {"edits": {"1": [{"tap": "weights", "value": np.zeros((5, 1, 1, 1), np.float32)}]}},
])  # fmt: skip
def test_a_pass_stays_whole(spoken, fields):
    request = validate(ModelForwardRequest, {"text": WORDS, **fields})
    assert not may_divide(spoken, request, read_request(spoken, request))
