"""Questions that share a pass: each reply has the numbers that it has alone."""

import numpy as np
import pytest
from tests.models.small_models import DECODERS, loaded

from attention_contract.base import ABSENT
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelWeightsReply, ModelWeightsRequest
from attention_contract.schemas.weights import HeadStatistics
from attention_contract.tensor_files import from_pieces, to_safetensors
from attention_contract.validation import validate
from attention_contract.wire import SAFETENSORS, to_body
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_inspection import forward_reply, weights_reply

TEXTS = [[3, 4, 5, 6], [8, 3, 7, 9, 10, 3, 4], [6, 5, 7, 8, 4]]


def questions(family, kind, **fields):
    model = loaded(family)
    requests = [validate(kind, {"tokens": text, **fields}) for text in TEXTS]
    return model, [(request, model.asked(request)) for request in requests]


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"return_weights": False, "statistics": ["entropy", "duplicate_token", "own_position", "mean_distance"]},
        {"average_heads": True, "layers": [1], "statistics": [], "statistic_options": {"window": 2}},
        {"statistics": ["classes", "first_key"], "statistic_options": {"token_classes": {"nouns": [4, 8]}}},
    ],
)
def test_the_weights_of_a_text_are_those_that_it_has_alone(family, fields):
    model, asked = questions(family, ModelWeightsRequest, **fields)
    assert len({group_of(model, *each) for each in asked}) == 1
    assert group_of(model, *asked[0]) is not None
    for (request, own), reply in zip(asked, joined_replies(model, asked), strict=True):
        expected = weights_reply(model, request, own)
        found = from_pieces(to_safetensors(reply, "reply"), "reply", ModelWeightsReply)  # as it is sent
        assert found.labels == expected.labels
        to_body(found, SAFETENSORS, "reply")  # every number is in a form that the wire has
        assert (found.ran.joined, expected.ran.joined) == (3, 1)
        for layer, other in zip(found.layers, expected.layers, strict=True):
            assert layer.layer == other.layer
            assert np.asarray(layer.queries) == np.asarray(other.queries)
            if other.weights is ABSENT:
                assert layer.weights is ABSENT
            else:
                np.testing.assert_allclose(layer.weights, other.weights, atol=1e-5)
            for name in HeadStatistics.model_fields:
                same(getattr(layer.statistics, name), getattr(other.statistics, name))
            if other.top is not ABSENT:
                np.testing.assert_allclose(layer.top.weights, other.top.weights, atol=1e-5)
                clear = np.asarray(other.top.weights) > 1e-3
                np.testing.assert_array_equal(np.asarray(layer.top.keys)[clear], np.asarray(other.top.keys)[clear])


def same(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif expected is ABSENT:
        assert found is ABSENT
    else:
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_the_predictions_of_a_text_are_those_that_it_has_alone(family):
    model, asked = questions(family, ModelForwardRequest, top_k=4)
    assert len({group_of(model, *each) for each in asked}) == 1
    for (request, own), found in zip(asked, joined_replies(model, asked), strict=True):
        (ours,), (alone,) = found.predictions, forward_reply(model, request, own).predictions
        assert (ours.text, ours.position) == (alone.text, alone.position)
        assert [each.id for each in ours.top] == [each.id for each in alone.top]
        np.testing.assert_allclose([each.logit for each in ours.top], [each.logit for each in alone.top], atol=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"alone": True},
        {"edits": {"0": [{"tap": "weights", "heads": [0], "set": 0}]}},
        {"keep": True},
        {"compare": "unedited"},
        {"select": {"heads": [0]}},
        {"pool": 2},
        {"tokens": [[3, 4], [5, 6]]},
    ],
)
def test_what_cannot_share_a_pass_runs_by_itself(fields):
    model = loaded("llama")
    request = validate(ModelWeightsRequest, {"tokens": [3, 4], **fields})
    assert group_of(model, request, model.asked(request)) is None
