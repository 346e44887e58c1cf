"""Layers that mix tokens by a running state: their weights beside their own outputs, edits, gradients and refusals."""

import copy
from functools import cache, partial

import numpy as np
import pytest
from tests.client.tiny_models import tokenizer
from tests.cost.peaks import peaks
from tests.models.small_models import IDS, device
from tools.models_walk.implicit import implicit_error, wide
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.validation import validate
from attention_service.models.answers.joined_questions import group_of
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import recorded_weights, weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.loaded.checked_request import read_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info

KINDS = {
    "qwen3_5": {"0": "linear", "1": "attention"},
    "minimax": {"0": "attention", "1": "linear"},
    "bamba": {"0": "state_space", "1": "attention"},
    "falcon_h1": {"state_space.0": "state_space", "0": "attention", "state_space.1": "state_space", "1": "attention"},
    "jamba": {"0": "state_space", "1": "attention"},
    "mamba2": {"0": "state_space", "1": "state_space"},
    "rwkv": {"0": "linear", "1": "linear"},
    "xlstm": {"0": "linear", "1": "linear"},
    "recurrent_gemma": {"0": "state_space", "1": "attention"},
}
MORE = {
    "qwen3_next": {"0": "linear", "1": "attention"},
    "olmo_hybrid": {"0": "linear", "1": "attention"},
    "kimi_linear": {"0": "linear", "1": "linear", "2": "attention"},
    "nemotron_h": {"0": "state_space", "2": "attention"},
    "zamba2": {"0": "state_space", "state_space.1": "state_space", "1": "attention", "2": "state_space"},
    "granitemoehybrid": {"0": "state_space", "1": "attention"},
    "mamba": {"0": "state_space", "1": "state_space"},
    "falcon_mamba": {"0": "state_space", "1": "state_space"},
}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in MORE]
LONG = [5, 3, 7, 8, 6, 4, 9, 10, 11] * 4


@cache
def loaded(kind, *, in_float64=True):
    model = built(kind)
    return LoadedModel(kind, wide(model) if in_float64 else copy.deepcopy(model), tokenizer(), device())


@pytest.mark.sampled(kind=2)
@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
def test_weights_times_values_are_the_layers_own_output(kind):
    times = 2 if kind == "xlstm" else 1  # whose chunks have 64 tokens
    assert implicit_error(kind, built(kind), LONG * times) <= 1e-10


@pytest.mark.sampled(kind=5)
@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
def test_the_layers_are_listed_with_their_kind(kind):
    info = model_info(loaded(kind))
    assert {str(layer.layer): layer.kind for layer in info["layers"]} == (KINDS | MORE)[kind]
    assert info["unseen"] == []


@pytest.mark.parametrize("kind", ["qwen3_5", "minimax", "bamba", "recurrent_gemma"])
def test_edited_weights_act_on_the_values_and_nothing_changes_by_looking(kind):
    model = loaded(kind, in_float64=False)
    (key,) = model.implicit
    request = {"tokens": IDS, "layers": [int(key)], "return": ["weights", "v", "context", "output"]}
    plain = forward_reply(model, ModelForwardRequest(tokens=IDS, layers=[int(key)], return_=["output"])).layers[0]
    seen = forward_reply(model, validate(ModelForwardRequest, request)).layers[0]
    np.testing.assert_array_equal(seen.output, plain.output)
    edit = {"tap": "weights", "heads": [1], "keys": [2], "set": 0.0}
    changed = forward_reply(model, validate(ModelForwardRequest, request | {"edits": {key: [edit]}})).layers[0]
    assert not np.any(changed.weights[1, :, 2])
    np.testing.assert_allclose(changed.weights @ changed.v, changed.context, atol=1e-5 * abs(seen.context).max())
    np.testing.assert_allclose(changed.context[[0, 2, 3]], seen.context[[0, 2, 3]], atol=1e-5 * abs(seen.context).max())
    assert abs(np.asarray(changed.output) - seen.output).max() > 0


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["qwen3_5", "bamba", "mamba2", "rwkv", "xlstm", "recurrent_gemma", "kimi_linear"])
def test_gradients_of_the_weights_are_exact(kind):
    model = loaded(kind, in_float64=False)
    key, *_ = model.implicit
    request = ModelGradientsRequest(
        tokens=IDS, layers=[int(key)], wrt=["weights", "v", "context"], of={"token": 7}, check=True
    )
    reply = ModelGradients(model, request).reply()
    assert all(each.passed for each in reply.check.values())
    found = reply.layers[0].gradients
    values = forward_reply(model, ModelForwardRequest(tokens=IDS, layers=[int(key)], return_=["v"])).layers[0].v
    expected = np.asarray(found["context"]) @ np.swapaxes(values, 1, 2)
    np.testing.assert_allclose(found["weights"], expected, atol=1e-5 * abs(expected).max())


@pytest.mark.parametrize("kind", ["recurrent_gemma", "rwkv", "xlstm"])
def test_a_text_of_a_padded_batch_has_the_numbers_that_it_has_alone(kind):
    model = loaded(kind)
    texts = [IDS, IDS[:3]]
    together = forward_reply(model, ModelForwardRequest(tokens=texts, return_=["logits"])).logits
    alone = forward_reply(model, ModelForwardRequest(tokens=texts[1], return_=["logits"])).logits
    np.testing.assert_allclose(together[1], alone, atol=1e-10)


def test_all_are_the_layers_that_can_answer():
    model = loaded("qwen3_5")
    every = weights_reply(model, ModelWeightsRequest(tokens=IDS))
    assert [(layer.layer, layer.implicit) for layer in every.layers] == [(0, True), (1, None)]
    assert {name for name, value in every.layers[0].statistics if value is not None} == {"max_weight"}
    named = weights_reply(model, ModelWeightsRequest(tokens=IDS, statistics=["entropy"]))
    assert [layer.layer for layer in named.layers] == [1]
    shares = weights_reply(model, ModelWeightsRequest(tokens=IDS, statistics=["entropy"], normalize="absolute"))
    assert [layer.layer for layer in shares.layers] == [0, 1]
    taps = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["q"]))
    assert [layer.layer for layer in taps.layers] == [1]
    by_channel = weights_reply(loaded("jamba"), ModelWeightsRequest(tokens=IDS))
    assert [layer.layer for layer in by_channel.layers] == [1]
    answered = weights_reply(loaded("jamba"), ModelWeightsRequest(tokens=IDS, layers=[0]))
    assert np.shape(answered.layers[0].weights) == (64, len(IDS), len(IDS))


def test_shares_are_those_of_magnitudes():
    request = ModelWeightsRequest(tokens=IDS, layers=[0], statistics=["entropy"], normalize="absolute", top_k=2)
    layer = weights_reply(loaded("qwen3_5"), request).layers[0]
    shares = abs(layer.weights) / abs(layer.weights).sum(-1, keepdims=True)
    expected = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(-1).mean(-1)
    np.testing.assert_allclose(layer.statistics.entropy, expected, atol=1e-10)
    np.testing.assert_allclose(abs(layer.top.weights[..., 0]), abs(layer.weights).max(-1))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"layers": [0], "statistics": ["entropy"]}, "statistics.0", "needs a distribution"),
        ({"layers": [0], "keep": True}, "layers.0", "implicit"),
        ({"layers": [7]}, "layers.0", "it has 0, 1"),
        ({"edits": {"0": [{"tap": "scores", "set": 0}]}}, "edits.0.0.tap", "running state, which has no scores"),
    ],
)
def test_refusals_name_the_field(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        weights_reply(loaded("qwen3_5"), validate(ModelWeightsRequest, {"tokens": IDS} | fields))
    assert refused.value.param == param


def test_a_recording_leaves_them_out_and_says_why():
    model = loaded("qwen3_5")
    recording = recorded_weights(model, ModelWeightsRequest(tokens=IDS, keep=True)).recording
    assert recording.unseen.keys() == {"layers.0"}
    assert "implicit" in recording.unseen["layers.0"]


def test_such_questions_share_no_pass():
    model = loaded("qwen3_5")
    for request, joins in (
        (ModelWeightsRequest(tokens=IDS), False),
        (ModelWeightsRequest(tokens=IDS, layers=[1]), True),
    ):
        assert (group_of(model, request, read_request(model, request)) is not None) == joins


def test_the_memory_of_the_matrices_is_admitted_before():
    model = LoadedModel("long", built("bamba", max_position_embeddings=1024), tokenizer(), device())
    costs, need = ModelCosts(model), {}
    for layer in (0, 1):
        request = ModelWeightsRequest(tokens=IDS * 80, layers=[layer], return_weights=False)
        checked = read_request(model, request)
        need[layer] = costs.memory.needed_bytes(checked, request)
        (held,) = peaks([partial(weights_reply, model, request, checked)])
        assert held < need[layer]
    assert need[0] > need[1]


def test_a_closed_input_gate_of_the_rg_lru_shows_in_its_values_and_not_in_its_weights():
    """M holds the products of the recurrent gates alone."""
    model = built("recurrent_gemma").requires_grad_(False)
    found = []
    for closed in (False, True):
        own = copy.deepcopy(model)
        if closed:
            own.get_submodule("model.layers.0.temporal_block.rg_lru").input_gate_bias.fill_(-1e4)
        shut = LoadedModel("gate", own, tokenizer(), device())
        found += forward_reply(shut, ModelForwardRequest(tokens=IDS, layers=[0], return_=["weights", "v"])).layers
    open_gate, closed_gate = found
    np.testing.assert_array_equal(closed_gate.weights, open_gate.weights)
    assert np.abs(open_gate.v).max() > 1e-3
    assert not np.abs(closed_gate.v).any()
