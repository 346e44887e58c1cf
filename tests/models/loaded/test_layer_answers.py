"""What a layer says it can answer is what it answers, and a tap that it refuses is refused for the reason given."""

from functools import cache
from typing import get_args

import pytest
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device, loaded
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import EditableTap
from attention_contract.schemas.model_requests import (
    ModelForwardRequest,
    ModelGradient,
    ModelGradientsRequest,
    ModelWeightsRequest,
)
from attention_contract.schemas.models import LayerTap
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.passes.module_taps import MODULE_TAPS

KINDS = ("llama", "gpt_oss", "lfm2", "gpt_neo")
"""gpt_neo computes its attention itself, and layer 0 of lfm2 is a convolution."""
TAPS = [tap for each in get_args(LayerTap) for tap in get_args(each)]


@cache
def model(kind):
    if kind == "gpt_neo":
        return LoadedModel(kind, built(kind).requires_grad_(False), tokenizer(), device())
    return loaded(kind)


def last_layer(kind):
    return model_info(model(kind))["layers"][-1]


def requests_of(tap, layer):
    """Each request that names a tap, with the list of the layer that says so."""
    key = layer.layer
    fields = {
        "taps": (forward_reply, ModelForwardRequest, {"return": [tap], "layers": [key]}),
        "edits": (forward_reply, ModelForwardRequest, {"edits": {str(key): [{"tap": tap, "set": 0}]}}),
        "gradients": (gradients_reply, ModelGradientsRequest, {"wrt": [tap], "layers": [key], "by_head": False}),
    }
    words = {"taps": TAPS, "edits": get_args(EditableTap), "gradients": get_args(ModelGradient)}
    return [(name, *fields[name]) for name in fields if tap in words[name]]


def gradients_reply(loaded_model, request):
    return ModelGradients(loaded_model, request).reply()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tap", TAPS)
def test_a_layer_answers_for_the_taps_that_it_names(kind, tap):
    layer = last_layer(kind)
    assert set(layer.taps) | set(layer.refused) >= {*TAPS} - MODULE_TAPS - {"router"}
    for name, answer, form, fields in requests_of(tap, layer):
        request = validate(form, {"tokens": IDS, **fields})
        if tap in getattr(layer, name):
            answer(model(kind), request)
            continue
        with pytest.raises(InvalidRequest) as refused:
            answer(model(kind), request)
        assert layer.refused.get(tap, "is seen") in str(refused.value)


def test_a_layer_without_weights_is_listed_with_the_reason():
    info = model_info(model("lfm2"))
    assert info["without_weights"] == {"0": "conv has no weights of pairs of tokens"}
    assert [layer.layer for layer in info["layers"]] == [1]
    reply = weights_reply(model("lfm2"), ModelWeightsRequest(tokens=IDS))
    assert [layer.layer for layer in reply.layers] == [1]


def test_a_layer_of_a_model_that_generates_nothing_has_no_answers_in_generations():
    assert last_layer("bert").generation is None
    assert last_layer("llama").generation.attention


def test_a_model_that_computes_its_attention_says_what_is_not_seen():
    layer = last_layer("gpt_neo")
    assert layer.taps == ["v", "weights", "context", "output", "mlp", "hidden"]
    assert layer.edits == ["v", "weights", "context", "output", "mlp", "hidden"]
    assert layer.refused["q"] == "the model computes this attention itself, and q is not seen there"
