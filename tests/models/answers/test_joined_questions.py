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
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.checked_request import check_request

TEXTS = [[3, 4, 5, 6], [8, 3, 7, 9, 10, 3, 4], [6, 5, 7, 8, 4]]


def questions(family, kind, **fields):
    model = loaded(family)
    requests = [validate(kind, {"tokens": text, **fields}) for text in TEXTS]
    return model, [(request, check_request(model, request)) for request in requests]


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"return_weights": False, "statistics": ["entropy", "duplicate_token", "own_position", "mean_distance"]},
        {"average_heads": True, "layers": [1], "statistics": [], "statistic_options": {"window": 2}},
        {"statistics": ["classes", "first_key"], "statistic_options": {"token_classes": {"nouns": [4, 8]}}},
        {"select": {"heads": [2, 0]}, "layers": [1]},
    ],
)
def test_the_weights_of_a_text_are_those_that_it_has_alone(family, fields):
    check_weights(*questions(family, ModelWeightsRequest, **fields))


def check_weights(model, pairs):
    assert len({group_of(model, *each) for each in pairs}) == 1
    assert group_of(model, *pairs[0]) is not None
    for (request, own), reply in zip(pairs, joined_replies(model, pairs), strict=True):
        expected = weights_reply(model, request, own)
        found = from_pieces(to_safetensors(reply, "reply"), "reply", ModelWeightsReply)  # as it is sent
        assert found.labels == expected.labels
        to_body(found, SAFETENSORS, "reply")  # every number is in a form that the wire has
        assert (found.ran.joined, expected.ran.joined) == (len(pairs), 1)
        for layer, other in zip(found.layers, expected.layers, strict=True):
            assert layer.layer == other.layer
            np.testing.assert_array_equal(layer.queries, other.queries)
            if other.weights is ABSENT:
                assert layer.weights is ABSENT
            else:
                np.testing.assert_allclose(layer.weights, other.weights, atol=1e-5)
            for name in HeadStatistics.model_fields:
                same(getattr(layer.statistics, name), getattr(other.statistics, name))
            if other.top is not ABSENT:
                np.testing.assert_allclose(layer.top.weights, other.top.weights, atol=1e-5)
                weights = np.asarray(other.top.weights)
                ties = np.abs(np.diff(weights, axis=-1)).min(-1, keepdims=True) < 1e-4
                clear = (weights > 1e-3) & ~ties
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
    check_predictions(*questions(family, ModelForwardRequest, top_k=4))


def check_predictions(model, pairs):
    assert len({group_of(model, *each) for each in pairs}) == 1
    for (request, own), found in zip(pairs, joined_replies(model, pairs), strict=True):
        expected = forward_reply(model, request, own).predictions
        for ours, alone in zip(found.predictions, expected, strict=True):
            assert (ours.text, ours.position) == (alone.text, alone.position)
            assert [each.id for each in ours.top] == [each.id for each in alone.top]
            np.testing.assert_allclose([each.logit for each in ours.top], [each.logit for each in alone.top], atol=1e-4)
            same(ours.divergence, alone.divergence)


EDITED = [
    {"1": [{"tap": "weights", "heads": [0], "set": 0}]},
    {"0": [{"tap": "scores", "heads": [1], "queries": [3, 4], "keys": [0], "set": 4.0}], "1": []},
    {},
    {"0": [{"tap": "context", "queries": [2], "scale": 3.0}], "1": [{"tap": "output", "queries": [1, 3], "scale": -2}]},
    {"0": [{"tap": "output", "set": 0.5}]},
    {
        "1": [
            {"tap": "v", "keys": [0, 2], "scale": 0.0},
            {"tap": "weights", "keys": [1], "set": 1.0, "renormalize": True},
        ]
    },
    {"0": [{"tap": "masked_scores", "keys": [1], "set": 2.0}, {"tap": "q", "scale": 2.0}]},
]
"""The edits of each of several requests: of every kind of tap, at one layer, at both and at none."""


def edited(family, kind, **fields):
    model = loaded(family)
    texts = [[3 + (5 * place + at) % 8 for at in range(4 + place % 4)] for place in range(len(EDITED))]
    texts[1] = [3, 7, 4, 8, 5]
    keys = list(model.places)[:2]
    found = []
    for text, edits in zip(texts, EDITED, strict=True):
        named = {keys[int(layer)]: own for layer, own in edits.items() if int(layer) < len(keys)}
        request = validate(kind, {"tokens": text, "edits": named, **fields})
        found.append((request, check_request(model, request)))
    return model, found


@pytest.mark.sampled(family=3)
@pytest.mark.parametrize("family", DECODERS)
def test_requests_with_edits_share_a_pass_and_each_has_its_own(family):
    check_weights(*edited(family, ModelWeightsRequest, top_k=2))
    check_predictions(*edited(family, ModelForwardRequest, top_k=4))
    check_predictions(*edited(family, ModelForwardRequest, top_k=4, compare="unedited"))


def test_a_value_is_put_into_its_own_text():
    model = loaded("llama")
    value = np.arange(5 * 5, dtype=np.float32).reshape(5, 5)
    requests = [
        validate(ModelWeightsRequest, {"tokens": [3, 4, 5, 6, 7], "edits": {"0": [{"tap": "scores", "value": value}]}}),
        validate(ModelWeightsRequest, {"tokens": [3, 4, 5, 6, 7, 8, 9]}),
    ]
    check_weights(model, [(request, check_request(model, request)) for request in requests])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sixteen_requests_that_add_other_vectors_share_a_pass_with_one_that_adds_none(family):
    model, draws = loaded(family), np.random.default_rng(0)
    width = model.places["0"].output_width
    requests = [validate(ModelForwardRequest, {"tokens": [3, 4, 5, 6, 7, 8, 9]})]
    for number in range(16):
        tap = ("output", "context", "q", "v")[number % 4]
        add = draws.normal(size=width if tap == "output" else 1).astype(np.float32)
        edits = {str(number % 2): [{"tap": tap, "add": 4 * add}]}
        tokens = [3 + (at + number) % 8 for at in range(4 + number % 4)]
        requests.append(validate(ModelForwardRequest, {"tokens": tokens, "edits": edits}))
    check_predictions(model, [(request, check_request(model, request)) for request in requests])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_requests_with_several_texts_share_a_pass_with_others(family):
    model = loaded(family)
    edits = {next(iter(model.places)): [{"tap": "weights", "heads": [1], "scale": 0.5}]}
    for kind, check in ((ModelWeightsRequest, check_weights), (ModelForwardRequest, check_predictions)):
        several = [[[3, 4, 5, 6], [4, 5, 6]], [[7, 8], [3, 4, 5], [5, 6, 7]], [4, 5, 6, 7]]
        requests = [validate(kind, {"tokens": tokens}) for tokens in several]
        requests.append(validate(kind, {"tokens": [[5, 4, 3], [3, 4, 5, 6, 7]], "edits": edits}))
        if kind is ModelForwardRequest and model.head.predicts != "next":
            continue
        check(model, [(request, check_request(model, request)) for request in requests])


@pytest.mark.parametrize(
    "fields",
    [
        {"alone": True},
        {"keep": True},
        {"compare": "unedited"},
        {"select": {"queries": [0]}},
        {"pool": 2},
    ],
)
def test_what_cannot_share_a_pass_runs_by_itself(fields):
    model = loaded("llama")
    request = validate(ModelWeightsRequest, {"tokens": [3, 4], **fields})
    assert group_of(model, request, check_request(model, request)) is None
