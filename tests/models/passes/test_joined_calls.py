"""Differential attention: two maps, whose values come in two calls, are one attention with exact gradients."""

from functools import cache

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device, near
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel


@cache
def loaded():
    return LoadedModel("diffllama", built("diffllama").requires_grad_(False), tokenizer(), device())


def forward(**fields):
    return forward_reply(loaded(), validate(ModelForwardRequest, {"tokens": IDS, **fields}))


@torch.no_grad()
def eager():
    """The eager model's weights, the input of each output projection, and λ of each layer."""
    model, seen = built("diffllama"), []
    attentions = [layer.self_attn for layer in model.model.layers]
    for each in attentions:
        each.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    output = model(input_ids=torch.tensor([IDS]), output_attentions=True, use_cache=False)
    shares = [
        float((one.lambda_q1 * one.lambda_k1).sum().exp() - (one.lambda_q2 * one.lambda_k2).sum().exp())
        + one.lambda_init
        for one in attentions
    ]
    return output, seen, shares, attentions


def test_both_maps_make_the_output_of_the_eager_model():
    output, projected, shares, attentions = eager()
    near(forward(**{"return": ["logits"]}).logits[0], output.logits[0, -1])
    reply = forward(**{"return": ["weights", "v", "context"]})
    for layer, own, expected, share, module in zip(
        reply.layers, output.attentions, projected, shares, attentions, strict=True
    ):
        near(layer.weights, own[0])
        groups = layer.weights.shape[0] // layer.v.shape[0]
        near(layer.context, layer.weights @ np.repeat(layer.v, groups, 0))
        first, second = np.split(np.asarray(layer.context, np.float64), 2)  # the maps of each pair of heads
        mixed = torch.from_numpy(first - share * second).transpose(0, 1)
        normed = (1 - module.lambda_init) * mixed * (mixed.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        near(normed.reshape(len(IDS), -1), expected, 1e-4)


@pytest.mark.slow
def test_gradients_go_through_the_values_of_both_calls():
    taps = ["q", "k", "v", "scores", "weights", "context"]
    fields = {"tokens": IDS[:6], "wrt": taps, "check": True}
    reply = ModelGradients(loaded(), validate(ModelGradientsRequest, fields)).reply()
    assert len(reply.check) == 1 + 2 * len(taps)
    assert all(each.passed for each in reply.check.values()), reply.check


def test_an_edit_of_one_map_acts_on_both_parts_of_the_values():
    edits = {"1": [{"tap": "weights", "heads": [2], "set": 0}]}
    same = {"1": [{"tap": "context", "heads": [2], "set": 0}]}
    taps = {"return": ["logits"]}
    one, other, plain = forward(edits=edits, **taps), forward(edits=same, **taps), forward(**taps)
    near(one.logits, other.logits)
    assert abs(np.asarray(one.logits) - plain.logits).max() > 1e-3
    value = {"1": [{"tap": "context", "heads": [2], "value": [[[[0.5] * 16]]]}]}
    assert forward(edits=value, layers=[1], **{"return": ["context"]}).layers[0].context[2].max() == 0.5
    request = {"model": "diffllama", "prompt": IDS, "attention": {"edits": value}}
    with pytest.raises(InvalidRequest, match="by numbers while tokens are generated"):
        plan_generation(loaded(), validate(CompletionRequest, request))
