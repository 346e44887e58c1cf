"""Models that compute their attention themselves: what is seen there beside what they return, edits and gradients."""

import copy
from contextlib import contextmanager
from functools import cache, partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.cost.peaks import peaks
from tests.models.small_models import IDS, device, near
from tools.models_walk.model_types import built
from torch import nn

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.costs.model_costs import ModelCosts
from attention_service.models.generation.generation_turns import generate
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info

DECODERS = ("falcon", "bloom", "gptj", "gpt_neo", "codegen")
KINDS = (*DECODERS, "deberta", "deberta-v2", "xlnet", "mpnet", "big_bird")
EXACT = 1e-6


ENTRIES = {
    "big_bird": {"attention_type": "original_full"},
    "reformer": {"lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8},
}


@cache
def eager(kind):
    return built(kind, **ENTRIES.get(kind, {}))


@cache
def loaded(kind):
    model = copy.deepcopy(eager(kind)).requires_grad_(False)
    return LoadedModel(kind, model, tokenizer(), device())


def run(kind, **options):
    return eager(kind)(torch.tensor([IDS]), **options)


@contextmanager
def softmax_by_hand(change):
    """Let every softmax over pairs of tokens return what ``change`` makes of its number and its result."""
    own, count = nn.functional.softmax, iter(range(100))

    def changed(x, *args, **options):
        found = own(x, *args, **options)
        return change(next(count), found) if found.shape[-2:] == (len(IDS), len(IDS)) else found

    with patch.object(nn.functional, "softmax", changed):
        yield


@pytest.mark.sampled(kind=6)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_the_model_returns(kind):
    model = loaded(kind)
    assert model_info(model)["attention"] == "observed"
    assert model_info(model)["unseen"] == []
    with torch.no_grad():
        expected = run(kind, output_attentions=True, output_hidden_states=True)
    taps = ["weights", "v", "context", "hidden", "logits"]
    reply = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=taps, positions=[*range(len(IDS))]))
    assert reply.ran.kernels == ["eager"]
    near(reply.logits, expected.logits[0], EXACT)
    for layer, own in zip(reply.layers, expected.attentions, strict=True):
        near(layer.weights, own[0], EXACT)
        values = np.asarray(layer.v).repeat(len(layer.weights) // len(layer.v), 0)
        near(layer.weights @ values, layer.context, EXACT)
    hidden = [x.squeeze() for x in expected.hidden_states]
    near(reply.layers[0].hidden, hidden[1], EXACT)


@pytest.mark.parametrize("kind", ["deberta-v2", "falcon", "xlnet"])
def test_statistics_and_top_keys_are_those_of_the_weights(kind):
    reply = weights_reply(loaded(kind), ModelWeightsRequest(tokens=IDS, top_k=2, return_weights=True))
    with torch.no_grad():
        expected = run(kind, output_attentions=True).attentions
    for layer, own in zip(reply.layers, expected, strict=True):
        near(layer.weights, own[0], EXACT)
        top = own[0].topk(2)
        assert np.array_equal(layer.top.keys, top.indices.where(top.values > 0, -1))
        entropy = -(own[0].double().xlogy(own[0].double())).sum(-1).mean(-1)
        near(layer.statistics.entropy, entropy)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_changes_what_follows_as_a_hand_made_hook_does(kind):
    edits = {"0": [{"tap": "weights", "heads": [1], "queries": [2, 8], "scale": 0.5}]}

    def halved(number, weights):
        if number:
            return weights
        weights = weights.clone()
        weights[:, 1, [2, 8]] *= 0.5
        return weights

    request = validate(ModelForwardRequest, {"tokens": IDS, "return": ["logits"], "edits": edits, "positions": [8]})
    reply = forward_reply(loaded(kind), request)
    with torch.no_grad(), softmax_by_hand(halved):
        expected = run(kind).logits[0, 8:]
    near(reply.logits, expected, 1e-5)
    assert np.abs(np.asarray(reply.logits) - np.asarray(run(kind).logits[0, 8:].detach())).max() > 1e-3


@pytest.mark.parametrize("kind", ["falcon", "deberta"])
def test_edits_of_values_contexts_and_outputs_change_what_follows(kind):
    model, plain = loaded(kind), None
    for tap in ("v", "context", "output"):
        heads = {} if tap == "output" else {"heads": [0]}
        edits = {"1": [{"tap": tap, **heads, "set": 0}]}
        request = validate(ModelForwardRequest, {"tokens": IDS, "return": [tap], "edits": edits, "layers": [1]})
        found = np.asarray(getattr(forward_reply(model, request).layers[0], tap))
        assert not (found if tap == "output" else found[0]).any()
    with torch.no_grad():
        plain = run(kind).logits[0]
    rows = forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["logits"], positions=[*range(len(IDS))]))
    near(rows.logits, plain, EXACT)  # no edit stays


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_weights_are_those_of_autograd(kind):
    request = ModelGradientsRequest(tokens=IDS, of={"token": 7}, wrt=["weights"])
    reply = ModelGradients(loaded(kind), request).reply()
    kept = []

    def keep(_, weights):
        kept.append(weights)
        return weights

    with softmax_by_hand(keep):
        value = run(kind).logits[0, -1].log_softmax(-1)[7]
    for layer, own in zip(reply.layers, torch.autograd.grad(value, kept), strict=True):
        scale = float(own.abs().max())
        near(np.asarray(layer.gradients["weights"]) / scale, own[0] / scale)


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["gptj", "xlnet"])
def test_gradients_hold_against_central_differences(kind):
    wrt = ["weights", "v", "context", "hidden", "output", "tokens"]
    request = ModelGradientsRequest(tokens=IDS[:4], of={"token": 7}, wrt=wrt, check=True)
    reply = ModelGradients(loaded(kind), request).reply()
    assert len(reply.check) == 11
    assert all(check.passed for check in reply.check.values())


@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_each_generated_token_comes_with_the_weights_that_chose_it(kind):
    model = loaded(kind)
    fields = {"model": kind, "prompt": IDS, "max_tokens": 3, "temperature": 0, "attention": {"weights": True}}
    request = validate(CompletionRequest, fields)
    ended = generate(model, request, plan_generation(model, request), lambda _: None).last[0]
    tokens = ended["choices"][0]["attention"]
    ids = IDS
    for token in tokens:
        with torch.no_grad():
            expected = eager(kind)(torch.tensor([ids]), output_attentions=True)
        assert token["id"] == int(expected.logits[0, -1].argmax())
        for layer, own in zip(token["layers"], expected.attentions, strict=True):
            near(layer["weights"], own[0, :, -1], 1e-5)
        ids = [*ids, token["id"]]


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["bloom", "deberta", "prophetnet"])
def test_the_memory_of_own_scores_is_estimated_before_a_pass(kind):
    length = 512
    config = dict.fromkeys(("max_position_embeddings", "n_positions"), 2 * length)
    model = LoadedModel(kind, built(kind, **config).requires_grad_(False), tokenizer(), device())
    costs, scores = ModelCosts(model), 4 * 4 * length**2
    for options in (
        {"layers": [next(iter(model.places.values())).key]},
        {"return_weights": True},
        {"compare": "unedited"},
    ):
        request = validate(ModelWeightsRequest, {"tokens": [3 + n % 90 for n in range(length)], "top_k": 1} | options)
        checked = check_request(model, request)
        needed = costs.memory.needed_bytes(checked, request)
        (held,) = peaks([partial(weights_reply, model, request, checked)])
        assert 4 * scores < held < needed < 2 * held + 2**26


def test_taps_that_are_not_seen_are_refused_by_name():
    model = loaded("falcon")
    for tap in ("q", "k", "scores", "masked_scores", "lse"):
        with pytest.raises(InvalidRequest, match=f"{tap} is not seen") as refusal:
            forward_reply(model, ModelForwardRequest(tokens=IDS, return_=["weights", tap]))
        assert refusal.value.param == "return.1"
    with pytest.raises(InvalidRequest, match="q is not seen"):
        forward_reply(model, validate(ModelForwardRequest, {"tokens": IDS, "edits": {"0": [{"tap": "q", "set": 0}]}}))
    with pytest.raises(InvalidRequest, match="scores is not seen"):
        ModelGradients(model, ModelGradientsRequest(tokens=IDS, of={"token": 7}, wrt=["tokens", "scores"]))


def test_what_chose_a_token_is_refused_where_generation_adds_tokens():
    model = loaded("xlnet")  # predicts by a token of its own behind the text
    request = validate(CompletionRequest, {"model": "x", "prompt": IDS, "max_tokens": 1, "attention": {"top_k": 1}})
    with pytest.raises(InvalidRequest, match="other keys than the 10 tokens"):
        generate(model, request, plan_generation(model, request), lambda _: None)


def test_layers_that_attend_over_pieces_of_a_long_text_are_refused_by_name():
    model = loaded("reformer")
    with pytest.raises(InvalidRequest, match="pieces of a text"):
        weights_reply(model, ModelWeightsRequest(tokens=[*range(3, 27)]))
    forward_reply(model, ModelForwardRequest(tokens=[*range(3, 27)]))


@pytest.mark.parametrize("kind", ["fnet", "yoso"])
def test_a_model_without_weights_over_pairs_is_refused(kind):
    with pytest.raises(InvalidCheckpoint, match="none has a softmax over pairs"):
        loaded(kind)
