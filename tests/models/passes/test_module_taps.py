"""Gates, the scores of indexers and the keys that they choose, beside the eager model's own computation."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models import small_models
from tests.models.small_models import device, near
from tools.models_walk.model_types import built

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest, ModelWeightsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.joined_questions import group_of, joined_replies
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.answers.model_weights import weights_reply
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.checked_request import check_request
from attention_service.models.loaded.loaded_model import LoadedModel

IDS = [5, 3, 7, 8, 6, 4, 9, 10, 11, 5, 3, 7, 8, 12, 4, 6, 9, 3, 8, 7, 5, 11, 10, 4, 6, 3, 9, 8, 5, 7, 4, 3]
SHORT = IDS[:13]
"""Of these, the compressed keys of deepseek_v4 are fewer than its choice."""
CHOOSING = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", pytest.param("glm5_next_text", marks=pytest.mark.slow))
GATED = ("qwen3_next", "qwen3_5_text", "lfm3", pytest.param("hrm_text", marks=pytest.mark.slow), "axk2", "laguna")
"""With a number for each of V numbers, or for each head; before the context, or behind it; a sigmoid or a softplus."""
ONE_BY_HEAD = {"lfm3", "laguna"}


@cache
def loaded(kind):
    return LoadedModel(kind, built(kind).requires_grad_(False), tokenizer(), device())


def forward(kind, ids=IDS, **fields):
    return forward_reply(loaded(kind), validate(ModelForwardRequest, {"tokens": ids, **fields}))


def choosing_layers(kind):
    return [place.key for place in loaded(kind).places.values() if "chosen" in place.beside.names]


def gated(kind):
    return next(place for place in loaded(kind).places.values() if place.beside.gate is not None)


@contextmanager
def own_choices(change=lambda scores: scores):
    """The scores that an eager model passes to ``topk`` for each query, which ``change`` may change."""
    found, own = [], torch.Tensor.topk

    def topk(self, *args, **options):
        if self.shape[:2] == (1, len(IDS)):  # and not those of experts
            self = change(self)
            found.append(self)
        return own(self, *args, **options)

    torch.Tensor.topk = topk
    try:
        yield found
    finally:
        torch.Tensor.topk = own


@torch.no_grad()
def eager(kind, ids=IDS, change=lambda scores: scores):
    """The eager model's output, with its weights, and the scores of its indexers."""
    with own_choices(change) as scores:
        return built(kind)(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False), scores


@pytest.mark.parametrize("kind", CHOOSING)
def test_scores_and_choice_are_those_of_the_models_own_indexer(kind):
    layers = choosing_layers(kind)
    output, scores = eager(kind)
    reply = forward(kind, layers=layers, **{"return": ["index_scores", "chosen", "weights"]})
    order = list(loaded(kind).places)
    attentions = [each for each in output.attentions if each is not None]
    assert len(scores) == len(layers)
    assert len(attentions) == len(order)
    for layer, own in zip(reply.layers, scores, strict=True):
        lowest = torch.finfo(own.dtype).min
        near(layer.index_scores, own[0].masked_fill(own[0] <= lowest, -torch.inf), 1e-4)
        weights = attentions[order.index(str(layer.layer))][0].numpy()
        near(layer.weights, weights)
        assert layer.chosen.dtype == bool
        assert (layer.chosen == (weights > 0).any(0)).all()
        assert not layer.weights[:, ~layer.chosen].any()
        assert layer.chosen.sum(-1).max() < layer.chosen.shape[-1]


@pytest.mark.parametrize("kind", CHOOSING)
def test_an_edit_of_the_scores_changes_the_choice_as_it_does_in_the_model(kind):
    layer = choosing_layers(kind)[0]

    def first_at_all_costs(scores):
        if not calls:  # those of the first layer
            scores = scores.clone()
            hidden = scores <= torch.finfo(scores.dtype).min
            scores[..., 0] = 1e4
            scores = torch.where(hidden, own_lowest(scores), scores)
        calls.append(1)
        return scores

    def own_lowest(scores):
        return torch.full_like(scores, -torch.inf if kind != "glm5_next_text" else torch.finfo(scores.dtype).min)

    calls = []
    output, _ = eager(kind, change=first_at_all_costs)
    edits = {str(layer): [{"tap": "index_scores", "keys": [0], "set": 1e4}]}
    taps = {"return": ["chosen", "weights"], "layers": [layer]}
    plain, changed = forward(kind, **taps).layers[0], forward(kind, edits=edits, **taps).layers[0]
    order = list(loaded(kind).places)
    near(changed.weights, output.attentions[order.index(str(layer))][0])
    assert (changed.chosen != plain.chosen).any()
    assert group_of(*checked(kind, edits)) is None  # shares no pass


def checked(kind, edits):
    request = validate(ModelForwardRequest, {"tokens": IDS, "edits": edits})
    return loaded(kind), request, check_request(loaded(kind), request)


def dense_share(kind, key):
    """The share of dense attention's weight that the choice keeps, by loops over q, k and the scores."""
    place = loaded(kind).places[str(key)]
    layer = forward(kind, layers=[key], **{"return": ["q", "k", "index_scores", "chosen"]}).layers[0]
    q, k = (np.asarray(x, np.float64) for x in (layer.q, layer.k))
    k = k.repeat(len(q) // len(k), 0)
    candidates = layer.index_scores > -np.inf
    own = len(IDS)
    shares = np.zeros((len(q), own))
    for head in range(len(q)):
        for i in range(own):
            dense = np.arange(own) <= i if place.compression is None else np.r_[layer.chosen[i, :own], candidates[i]]
            scores = q[head, i] @ k[head].T * place.spec.score.scale
            weights = np.where(dense, np.exp(scores - scores[dense].max()), 0)
            shares[head, i] = weights[layer.chosen[i]].sum() / weights.sum()
    return shares.mean(1)


@pytest.mark.parametrize("kind", CHOOSING)
def test_the_chosen_share_is_that_of_dense_attention(kind):
    request = validate(ModelWeightsRequest, {"tokens": IDS, "statistics": ["chosen_share", "entropy"]})
    reply = weights_reply(loaded(kind), request)
    for layer in reply.layers:
        found = layer.statistics.chosen_share
        if layer.layer in choosing_layers(kind):
            near(found, dense_share(kind, layer.layer))
            assert (found < 1).all()
        else:
            assert np.isnan(found).all()


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_the_chosen_share_of_padded_texts_is_that_of_each_alone(kind, monkeypatch):
    monkeypatch.setattr(loaded(kind).reader, "pads_up_to", None)  # its scores have no ties in the first layer
    fields = {"layers": [0], "statistics": ["chosen_share"]}  # later layers choose among equal scores by place
    both, alone = (
        weights_reply(loaded(kind), ModelWeightsRequest(tokens=texts, **fields)) for texts in ([IDS, SHORT], SHORT)
    )
    near(both.layers[0].statistics.chosen_share[1], alone.layers[0].statistics.chosen_share)


def test_weights_come_with_the_chosen_keys_also_from_a_padded_pass():
    model = loaded("deepseek_v32")
    requests = [ModelWeightsRequest(tokens=ids, layers=[0]) for ids in (IDS, SHORT)]
    questions = [(request, check_request(model, request)) for request in requests]
    assert group_of(model, *questions[0]) is None  # since padding decides between keys of equal scores
    for request, reply in zip(requests, joined_replies(model, questions), strict=True):
        layer = reply.layers[0]
        assert (layer.chosen == weights_reply(model, request).layers[0].chosen).all()
        assert (layer.chosen == (layer.weights > 0).any(0)).all()
    assert weights_reply(loaded("lfm3"), ModelWeightsRequest(tokens=SHORT)).layers[0].chosen is None


def test_the_sink_mass_is_what_the_weights_leave():
    loaded = small_models.loaded
    with torch.no_grad():
        weights = small_models.eager("gpt_oss")(input_ids=torch.tensor([SHORT]), output_attentions=True).attentions
    request = ModelWeightsRequest(tokens=SHORT, statistics=["sink_mass", "first_key"])
    for layer, own in zip(weights_reply(loaded("gpt_oss"), request).layers, weights, strict=True):
        near(layer.statistics.sink_mass, 1 - own[0].double().sum(-1).mean(-1))
        assert (layer.statistics.sink_mass > 0.01).all()
    edits = {"0": [{"tap": "weights", "heads": [0], "set": 0}]}
    with pytest.raises(InvalidRequest, match=r"statistics\.0: sink_mass is 1 − Σ w, which an edit of weights changes"):
        weights_reply(loaded("gpt_oss"), validate(ModelWeightsRequest, request.model_dump() | {"edits": edits}))
    with pytest.raises(InvalidRequest, match=r"statistics\.0: sink_mass needs a softmax with learned sinks"):
        weights_reply(loaded("llama"), request)


def test_a_choice_has_no_gradient_and_no_edit_of_its_own():
    for tap in ("chosen", "index_scores"):
        with pytest.raises(InvalidRequest, match="wrt"):
            validate(ModelGradientsRequest, {"tokens": IDS, "wrt": [tap]})
    with pytest.raises(InvalidRequest, match="tap"):
        validate(ModelForwardRequest, {"tokens": IDS, "edits": {"0": [{"tap": "chosen", "set": 0}]}})
    with pytest.raises(InvalidRequest, match="32 is out of range; there are 32 keys"):
        forward("deepseek_v32", edits={"0": [{"tap": "index_scores", "keys": [32], "set": 0}]})
    with pytest.raises(InvalidRequest, match="8 is out of range; there are 8 keys"):  # compressed ones
        forward("deepseek_v4", edits={"1": [{"tap": "index_scores", "keys": [8], "set": 0}]})
    with pytest.raises(InvalidRequest, match=r"statistics\.0: chosen_share needs"):
        weights_reply(loaded("qwen3_next"), ModelWeightsRequest(tokens=IDS, statistics=["chosen_share"]))


def test_a_layer_that_shares_the_choice_of_another_says_so():
    model = loaded("dots3_note_text")
    shared = next(place for place in model.places.values() if place.beside.shares)
    assert model.runner.refuses((shared.key, "chosen"), "read") is None
    with pytest.raises(InvalidRequest, match="an earlier layer chose; ask that layer for index_scores"):
        forward("dots3_note_text", layers=[shared.key], **{"return": ["index_scores"]})


@torch.no_grad()
def before_projection(kind, place, ids):
    """The input of the output projection in the eager model, and its context ``[L, H, V]``."""
    model, seen = built(kind), []
    path = next(name for name, module in loaded(kind).model.named_modules() if module is place.module)
    module = model.get_submodule(path)
    projection = getattr(module, "o_proj", None) or module.out_proj
    projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(input_ids=torch.tensor([ids]), use_cache=False)
    return seen[place.turn][0]


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", GATED)
def test_the_gate_is_the_factor_of_the_context_before_the_projection(kind):
    place = gated(kind)
    reply = forward(kind, SHORT, layers=[place.key], **{"return": ["gate", "context"]}).layers[0]
    assert reply.gate.shape == (*reply.context.shape[:2], 1 if kind in ONE_BY_HEAD else reply.context.shape[2])
    product = np.asarray(reply.gate * reply.context).transpose(1, 0, 2).reshape(len(SHORT), -1)
    near(product, before_projection(kind, place, SHORT))
    selected = forward(
        kind, SHORT, layers=[place.key], select={"heads": [1], "queries": [2, 5]}, **{"return": ["gate"]}
    )
    near(selected.layers[0].gate, np.asarray(reply.gate)[[1]][:, [2, 5]])


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm3"])
def test_an_edit_of_the_gate_of_a_head_is_one_of_its_context(kind):
    key = gated(kind).key
    closed, without = (
        forward(kind, SHORT, edits={str(key): [{"tap": tap, "heads": [1], "set": 0}]}, **{"return": ["logits"]})
        for tap in ("gate", "context")
    )
    near(closed.logits, without.logits)
    halved = forward(kind, SHORT, edits={str(key): [{"tap": "gate", "scale": 0.5}]}, **{"return": ["gate"]})
    plain = forward(kind, SHORT, **{"return": ["gate"]}, layers=[key])
    own = next(layer for layer in halved.layers if layer.layer == key) if len(halved.layers) > 1 else halved.layers[0]
    near(own.gate, np.asarray(plain.layers[0].gate) / 2)


@pytest.mark.sampled(kind=1)
@pytest.mark.parametrize("kind", ["qwen3_next", "lfm3"])
def test_gradients_of_a_gate_are_exact(kind):
    key = gated(kind).key
    fields = {"tokens": SHORT[:6], "wrt": ["gate", "context"], "layers": [key], "check": True}
    reply = ModelGradients(loaded(kind), validate(ModelGradientsRequest, fields)).reply()
    assert all(each.passed for each in reply.check.values()), reply.check
    taps = forward(kind, SHORT[:6], layers=[key], **{"return": ["gate", "context"]}).layers[0]
    found = reply.layers[0].gradients
    # gate · ∂L/∂gate and context · ∂L/∂context are the gradient of the same product
    gate = (np.asarray(taps.gate) * found["gate"]).sum(-1)
    near(gate, (np.asarray(taps.context) * found["context"]).sum(-1))


def test_taps_of_a_module_are_refused_where_there_are_none():
    with pytest.raises(InvalidRequest, match="no gate that is seen multiplies its context"):
        forward("deepseek_v32", layers=[0], **{"return": ["gate"]})
    with pytest.raises(InvalidRequest, match="no indexer that is seen"):
        forward("lfm3", SHORT, **{"return": ["chosen"]})
    key = str(gated("lfm3").key)
    request = {"model": "lfm3", "prompt": SHORT, "attention": {"edits": {key: [{"tap": "gate", "set": 0}]}}}
    with pytest.raises(InvalidRequest, match="gate is not edited while tokens are generated"):
        plan_generation(loaded("lfm3"), validate(CompletionRequest, request))


def test_padding_chooses_nothing_for_other_texts(monkeypatch):
    monkeypatch.setattr(loaded("deepseek_v32").reader, "pads_up_to", None)  # its scores have no ties
    alone = forward("deepseek_v32", SHORT, **{"return": ["index_scores", "chosen"]}).layers[0]
    both = forward("deepseek_v32", [IDS, SHORT], **{"return": ["index_scores", "chosen"]}).layers[0]
    pads_left = loaded("deepseek_v32").reader.pads_left
    own = slice(len(IDS) - len(SHORT), None) if pads_left else slice(0, len(SHORT))
    assert (both.chosen[1, own, own] == alone.chosen).all()
    near(both.index_scores[1, own, own], alone.index_scores)
