"""Modules that run several times in a pass, as those of HRM-Text: each run is a layer of its own."""

import copy
from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import numpy as np
import orjson
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device, near
from tests.models.small_models import loaded as small_model
from transformers import HrmTextConfig, HrmTextForCausalLM
from transformers.models.hrm_text import modeling_hrm_text

from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.openai import Completion, CompletionRequest
from attention_contract.validation import validate
from attention_contract.wire import to_json
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info

STACK, HIGH, LOW = 2, 2, 2
RUNS = HIGH * (LOW + 1) * STACK
KEYS = [f"attention.{number}" for number in range(RUNS)]
CLOSE = 1e-5


@cache
def eager():
    config = HrmTextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=STACK, num_attention_heads=4, head_dim=8,
        max_position_embeddings=64, H_cycles=HIGH, L_cycles=LOW, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(7)
    model = HrmTextForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return model.requires_grad_(False)


@cache
def loaded():
    return LoadedModel("hrm", copy.deepcopy(eager()), tokenizer(), device())


def own_layers():
    """What each layer returns in each of its runs, in their order, and the contexts before their projections."""
    states, contexts, model = [], [], eager().model
    with ExitStack() as hooks:
        for layer in (*model.L_module.layers, *model.H_module.layers):
            hook = layer.register_forward_hook(lambda _, __, output: states.append(output[0]))
            hooks.callback(hook.remove)
            hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: contexts.append(args[0][0]))
            hooks.callback(hook.remove)
        output = eager()(torch.tensor([IDS]), output_attentions=True)
    return states, contexts, output


def test_each_run_is_a_layer_in_the_order_of_the_runs():
    model = loaded()
    info = model_info(model)
    assert [layer.layer for layer in info["layers"]] == KEYS
    assert eager().config.num_hidden_layers == RUNS
    states, contexts, expected = own_layers()
    request = ModelForwardRequest(
        tokens=IDS, return_=["weights", "context", "gate", "hidden", "logits"], positions=[*range(len(IDS))]
    )
    reply = forward_reply(model, request)
    near(reply.logits, expected.logits[0], CLOSE)
    assert len(reply.layers) == len(expected.attentions) == len(states) == RUNS
    for layer, weights, state, own in zip(reply.layers, expected.attentions, states, contexts, strict=True):
        near(layer.weights, weights[0], CLOSE)
        gated = np.asarray(layer.gate) * np.asarray(layer.context)
        near(gated.transpose(1, 0, 2).reshape(len(IDS), -1), own, CLOSE)
        near(layer.hidden, state, CLOSE)
    first = forward_reply(model, ModelForwardRequest(tokens=IDS, layers=[KEYS[7]], return_=["weights"]))
    near(first.layers[0].weights, expected.attentions[7][0], CLOSE)


def test_an_edit_changes_one_run_alone():
    runs, eager_function = iter(range(RUNS)), modeling_hrm_text.eager_attention_forward

    def without_head(*args, **options):
        output, weights = eager_function(*args, **options)
        if next(runs) == 4:
            output = output.clone()
            output[:, :, 1] = 0
        return output, weights

    with patch.object(modeling_hrm_text, "eager_attention_forward", without_head):
        expected = eager()(torch.tensor([IDS])).logits[0, -1]
    edits = {KEYS[4]: [{"tap": "weights", "heads": [1], "set": 0}]}
    reply = forward_reply(loaded(), ModelForwardRequest(tokens=IDS, edits=edits, return_=["logits"]))
    near(reply.logits[0], expected, CLOSE)


def test_gradients_are_those_of_each_run_and_0_where_the_model_cuts_them_off():
    own, eager_function = [], modeling_hrm_text.eager_attention_forward

    def kept(module, query, key, value, *args, **options):
        output, weights = eager_function(module, query, key, value, *args, **options)
        if weights.requires_grad:
            weights.retain_grad()
        own.append(weights)
        return output, weights

    plain = copy.deepcopy(eager())
    plain.model.embed_tokens.weight.requires_grad_()
    with patch.object(modeling_hrm_text, "eager_attention_forward", kept):
        plain(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)[7].backward()
    request = ModelGradientsRequest(tokens=IDS, of={"token": 7}, wrt=["weights", "hidden"])
    reply = ModelGradients(loaded(), request).reply()
    assert [layer.layer for layer in reply.layers] == KEYS
    for layer, weights in zip(reply.layers, own, strict=True):
        near(layer.gradients["weights"], 0 if weights.grad is None else weights.grad[0], 1e-4)
    reached = [bool(np.asarray(layer.gradients["hidden"]).any()) for layer in reply.layers]
    assert reached == [False] * STACK + [True] * (RUNS - STACK)


def test_a_generated_token_has_the_weights_of_each_run():
    fields = {"model": "hrm", "prompt": IDS, "max_tokens": 2, "temperature": 0, "attention": {"weights": True}}
    request = validate(CompletionRequest, fields)
    (ended,) = generate(loaded(), request, plan_generation(loaded(), request), lambda _: None).last
    token = validate(Completion, orjson.loads(to_json(ended))).choices[0].attention[0]
    *_, expected = own_layers()
    assert [layer.layer for layer in token.layers] == KEYS
    for layer, weights in zip(token.layers, expected.attentions, strict=True):
        near(np.asarray(layer.weights).reshape(4, len(IDS)), weights[0, :, -1], CLOSE)


def test_layers_that_share_a_module_keep_their_numbers():
    places = small_model("albert").places
    assert [place.key for place in places.values()] == [*range(len(places))]
