"""Features of probes against hooks of PyTorch on transformers' own models, and generated tokens' own statistics."""

import copy

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import device, near
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.probes import FeaturesRequest
from attention_contract.schemas.model_requests import ModelForwardRequest
from attention_service.models.answers.probes.token_features import features_reply, plan_features
from attention_service.models.loaded.loaded_model import LoadedModel

TEXT = "the cat sat on the mat"
LAYERS = {
    "llama": "model.layers", "gpt2": "transformer.h", "bloom": "transformer.h", "qwen3_next": "model.layers",
    "t5": "encoder.block", "bert": "bert.encoder.layer", "mamba": "backbone.layers",
}  # fmt: skip


def features(loaded, of, positions="all", text=TEXT):
    request = FeaturesRequest(text=text, of=of, positions=positions)
    return features_reply(loaded, plan_features(loaded, request)).features


def opened(kind):
    model = built(kind)
    return model, LoadedModel(kind, copy.deepcopy(model).requires_grad_(False), tokenizer(), device())


@pytest.mark.parametrize("kind", LAYERS)
def test_hidden_is_what_a_layer_of_transformers_returns(kind):
    model, loaded = opened(kind)
    states = []

    def keep(_, __, output):
        states.append((output[0] if isinstance(output, tuple) else output).detach()[0])

    for layer in model.get_submodule(LAYERS[kind]):
        layer.register_forward_hook(keep)
    with torch.no_grad():
        model(**loaded.reader.read(ModelForwardRequest(text=TEXT)).arguments)
    found = features(loaded, {"point": "hidden", "layer": "all"})
    assert len(found) == (len(states) if kind != "t5" else 2)
    for name, x in found.items():
        near(x, states[int(name.rpartition(".")[2])], 1e-5)
    name = next(iter(found))
    one = {"point": "hidden", "layer": int(name) if name.isdecimal() else name}
    np.testing.assert_array_equal(features(loaded, one, "last")[name], found[name][-1:])
    np.testing.assert_array_equal(features(loaded, one, [1, -2])[name], found[name][[1, -2]])
    np.testing.assert_allclose(features(loaded, one, "mean")[name], found[name].mean(0, keepdims=True), atol=1e-6)
    loaded.close()


@pytest.mark.parametrize(
    ("point", "module"),
    [("q", "self_attn.q_proj"), ("v", "self_attn.v_proj"), ("output", "self_attn.o_proj"), ("mlp", "mlp")],
)
def test_taps_have_their_heads_one_behind_the_other(point, module):
    model, loaded = opened("llama")
    states = []
    model.model.layers[1].get_submodule(module).register_forward_hook(
        lambda *found: states.append(found[2].detach()[0])
    )
    with torch.no_grad():
        model(**loaded.reader.read(ModelForwardRequest(text=TEXT)).arguments)
    (x,) = features(loaded, {"point": point, "layer": 1}).values()
    assert x.shape == states[0].shape
    if point != "q":  # which is rotated
        near(x, states[0], 1e-5)
    else:
        near(x[0], states[0][0], 1e-5)  # the first token is not
    loaded.close()


def test_statistics_have_each_query_alone():
    _, loaded = opened("llama")
    weights = [layer.weights for layer in every_weight(loaded)]
    found = features(loaded, {"statistics": ["entropy", "first_key"], "heads": [2, 0]})["statistics"]
    length, heads = weights[0].shape[1], 2
    assert found.shape == (length, len(weights) * 2 * heads)
    for number, layer in enumerate(weights):
        entropy, first = np.split(found[:, number * 4 : number * 4 + 4], 2, axis=1)
        for at, head in enumerate((2, 0)):
            p = layer[head].astype(np.float64)
            np.testing.assert_allclose(first[:, at], p[:, 0], atol=1e-6)
            own = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
            np.testing.assert_allclose(entropy[:, at], own, atol=1e-5)
    loaded.close()


def every_weight(loaded):
    from attention_contract.schemas.model_requests import ModelWeightsRequest
    from attention_service.models.answers.model_weights import weights_reply

    return weights_reply(loaded, ModelWeightsRequest(text=TEXT)).layers


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("llama", {"of": {"point": "hidden", "layer": 2}}, "of.layer"),
        ("llama", {"of": {"statistics": ["retrieval"]}}, "of.statistics.0"),
        ("llama", {"of": {"statistics": ["pairs"]}}, "of.statistics.0"),
        ("llama", {"of": {"statistics": ["entropy", "received"]}}, "of.statistics.1"),
        ("llama", {"of": {"statistics": ["alignment"]}}, "of.statistics.0"),
        ("llama", {"of": {"statistics": ["sink_mass"]}}, "of.statistics.0"),
        ("llama", {"of": {"statistics": ["entropy"], "heads": [9]}}, "of.heads"),
        ("llama", {"of": {"point": "hidden", "layer": 0}, "positions": [6]}, "positions.0"),
        ("mamba", {"of": {"point": "q", "layer": 0}}, "of.point"),
        ("mamba", {"of": {"statistics": ["entropy"]}}, "of.statistics"),
        ("t5", {"of": {"point": "hidden", "layer": "decoder.0"}}, "of.layer"),
    ],
)
def test_a_refusal_names_the_field(kind, fields, param):
    _, loaded = opened(kind)
    with pytest.raises(InvalidRequest) as fault:
        plan_features(loaded, FeaturesRequest(text=TEXT, **fields))
    assert fault.value.param == param, fault.value.detail
    loaded.close()
