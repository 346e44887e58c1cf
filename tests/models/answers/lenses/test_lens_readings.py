"""Lenses give the numbers of plain formulas over transformers' own models in float64."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.client.transformers.families import DECODERS, tiny
from tests.models.small_models import IDS, device, near
from torch.nn.functional import layer_norm

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.lenses import ModelLensRequest
from attention_contract.schemas.attention import Edit
from attention_service.models.answers.lenses.lens_plan import plan_lens
from attention_service.models.answers.lenses.lens_reply import LensRun
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.held_norm import HeldNorm
from attention_service.models.loaded.streams.state_sums import factors_of
from attention_service.models.loaded.streams.stream_search import find_stream

TARGETS = [3, 5, 17]
OTHERS = {
    "granite": {"residual_multiplier": 0.22, "logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "gemma2": {"final_logit_softcapping": 2.0},
    "olmo2": {}, "gpt2": {}, "llama": {"attention_bias": True}, "gpt_neox": {}, "cohere2": {}, "mixtral": {},
    "deepseek_v3": {}, "opt": {}, "lfm2": {}, "phi": {},
}  # fmt: skip
"""Families that add, norm and read out in different ways, with the entries of their configs."""


@cache
def original(family):
    """A model with random biases and norms, too."""
    model = tiny(family, **OTHERS[family])
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.requires_grad_(False)


@cache
def served(family):
    model = LoadedModel(family, copy.deepcopy(original(family)), tokenizer(), device())
    return model, find_stream(model)


def lens(family, **fields):
    model, stream = served(family)
    request = ModelLensRequest(**{"tokens": IDS, "targets": TARGETS} | fields)
    return LensRun(model, plan_lens(model, request, stream)).reply()


class Seen:
    """A run of the model in float64, by hooks of PyTorch."""

    def __init__(self, family, ids=IDS):
        self.model = copy.deepcopy(original(family)).double()
        self.model.set_experts_implementation("eager")
        self.given, self.made = {}, {}
        for module in self.model.modules():
            module.register_forward_hook(self._hook, with_kwargs=True)
        self.logits = self.model(torch.tensor([ids])).logits[0]

    def _hook(self, module, args, options, output):
        tensors = [*args, *options.values()]
        given = next((x for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
        self.given[module], self.made[module] = given, output[0] if isinstance(output, tuple) else output

    def base(self):
        return getattr(self.model, "model", None) or getattr(self.model, "transformer", None) or self.model.gpt_neox


@pytest.mark.sampled(family=4)
@pytest.mark.parametrize("family", sorted(OTHERS))
def test_the_states_of_the_last_layer_read_as_the_models_own_logits(family):
    reply = lens(family, top_k=3)
    logits = Seen(family).logits
    last = reply.layers[-1].hidden
    near(last.targets, logits[:, TARGETS])
    best = logits.softmax(-1).topk(3)
    near(last.top.probabilities, best.values, 1e-4)
    np.testing.assert_array_equal(last.top.ids, best.indices)
    assert {str(each) for each in [*last.top.ids.flat, *TARGETS]} <= reply.names.keys()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "granite", "cohere2"])
def test_the_states_of_a_layer_read_by_the_models_norm_and_unembedding(family):
    seen, reply = Seen(family), lens(family, positions=[2, -1], top_k=2)
    base = seen.base()
    layers, norm = (base.h, base.ln_f) if family == "gpt2" else (base.layers, base.norm)
    for layer, answer in zip(layers, reply.layers, strict=True):
        made = seen.made[layer]
        expected = (seen.model.lm_head(norm(made[0] if made.ndim == 3 else made)))[[2, -1]]
        if family == "granite":
            expected = expected / 4
        if family == "gemma2":
            expected = 2 * torch.tanh(expected / 2)
        if family == "cohere2":
            expected = expected * seen.model.config.logit_scale
        near(answer.hidden.targets, expected[:, TARGETS])
    assert reply.positions == [2, 8]


def by_hand(family):
    """The contributions of the heads ``[layers, H, L, T]`` of three families, by their formulas."""
    seen = Seen(family)
    base, model = seen.base(), seen.model
    unembedding = model.lm_head.weight[TARGETS]
    found = []
    for layer in base.h if family == "gpt2" else base.layers:
        attention = layer.attn if family == "gpt2" else layer.self_attn
        output = attention.c_proj if family == "gpt2" else attention.o_proj
        matrix = output.weight if family == "gpt2" else output.weight.T
        heads = seen.given[output][0].unflatten(-1, (4, -1))
        parts = torch.einsum("lhv,hvd->hld", heads, matrix.unflatten(0, (4, -1)))
        if family == "gemma2":
            norm = layer.post_attention_layernorm
            state = seen.given[norm][0]
            parts = parts * (1 + norm.weight) / (state.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        if family == "granite":
            parts = parts * 0.22
        found.append(parts)
    parts = torch.stack(found)
    if family == "gpt2":
        state = seen.given[base.ln_f][0]
        parts = (parts - parts.mean(-1, keepdim=True)) * base.ln_f.weight
        parts = parts / (state.var(-1, unbiased=False, keepdim=True) + base.ln_f.eps).sqrt()
    else:
        state = seen.given[base.norm][0]
        eps = base.norm.eps if family == "gemma2" else base.norm.variance_epsilon
        weight = 1 + base.norm.weight if family == "gemma2" else base.norm.weight
        parts = parts * weight / (state.square().mean(-1, keepdim=True) + eps).sqrt()
    return parts @ unembedding.T / (4 if family == "granite" else 1), seen


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "granite"])
def test_heads_contribute_what_the_formulas_say(family):
    expected, _ = by_hand(family)
    reply = lens(family, of=["heads"], top_k=1)
    near(np.stack([layer.heads.targets for layer in reply.layers]), expected)


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_the_parts_sum_to_the_logit(family):
    reply = lens(family, of=["output", "heads"], top_k=0)
    seen, rest = Seen(family), reply.rest
    head = seen.model.get_output_embeddings()
    uncapped = seen.made[head][0][:, TARGETS] if family == "gemma2" else seen.logits[:, TARGETS]
    near(reply.logits, uncapped)
    total = rest.embeddings + rest.mlps.sum(0) + rest.others + rest.unembedding
    near(total + sum(layer.output.targets for layer in reply.layers), uncapped, 1e-5)
    for layer, bias in zip(reply.layers, rest.biases, strict=True):
        near(layer.heads.targets.sum(0) + bias, layer.output.targets)
    if family != "lfm2":
        near(rest.others, 0 * rest.others, 2e-6)


def test_layers_that_are_not_requested_are_among_the_others():
    whole, part = lens("llama", of=["output"], top_k=0), lens("llama", of=["output"], layers=[1], top_k=0)
    rest = whole.rest
    near(part.rest.others, rest.others + rest.mlps[0] + whole.layers[0].output.targets)
    near(part.layers[0].output.targets, whole.layers[1].output.targets)


def test_the_largest_contributions_of_each_head_are_named():
    reply, every = lens("gpt2", of=["heads"], top_k=2, positions=[-1]), [*range(96)]
    reply_of_targets = lens("gpt2", of=["heads"], top_k=0, positions=[-1], targets=every)
    for layer, other in zip(reply.layers, reply_of_targets.layers, strict=True):
        best = np.sort(other.heads.targets, -1)[..., ::-1][..., :2]
        near(layer.heads.top.logits, best)
        near(np.take_along_axis(other.heads.targets, layer.heads.top.ids, -1), best)
        assert layer.heads.top.probabilities is None


def test_several_texts_have_the_numbers_of_each_alone():
    texts = [IDS, IDS[2:]]
    fields = {"of": ["hidden", "heads"], "positions": [-1, -3], "top_k": 2}
    reply = lens("llama", tokens=texts, **fields)
    assert reply.positions == [[8, 6], [8, 6]]
    for at, ids in enumerate(texts):
        alone = lens("llama", tokens=ids, **fields)
        near(reply.logits[at], alone.logits)
        for layer, own in zip(reply.layers, alone.layers, strict=True):
            near(layer.hidden.targets[at], own.hidden.targets)
            near(layer.heads.targets[at], own.heads.targets)


def test_an_edited_head_contributes_nothing():
    edits = {"1": [Edit(tap="context", heads=[2], set=0)]}
    reply = lens("llama", of=["heads", "output"], edits=edits, top_k=0)
    assert not reply.layers[1].heads.targets[2].any()
    assert reply.layers[1].heads.targets[1].any()
    near(reply.layers[1].heads.targets.sum(0) + reply.rest.biases[1], reply.layers[1].output.targets)


def test_the_scale_is_that_of_a_layer_norm():
    """Which is probed, whatever its class."""
    _, stream = served("gpt2")
    norm, module = stream.unembedding.norm, stream.unembedding.module
    x = torch.randn(4, 32)
    near(norm.held(x, norm.scale(x, module(x))) + norm.bias, layer_norm(x, (32,), module.weight, module.bias, 1e-5))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"layers": [7]}, "layers.0"),
        ({"positions": [9]}, "positions.0"),
        ({"targets": [3, 96]}, "targets.1"),
        ({"top_k": 1024, "of": ["heads"], "tokens": [IDS * 6] * 8}, "top_k"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        lens("llama", **fields)
    assert caught.value.param == param


def test_a_model_without_an_unembedding_is_refused_by_name():
    bert = LoadedModel("bert", tiny("bert").requires_grad_(False), tokenizer(), device())
    with pytest.raises(InvalidRequest, match="has no prediction head") as caught:
        find_stream(bert)
    assert caught.value.param == "kind"


def test_states_that_are_no_sum_are_read_but_not_divided():
    """BART norms the sum of its states and its attention."""
    bart = LoadedModel("bart", tiny("bart").requires_grad_(False), tokenizer(), device())
    stream = find_stream(bart)
    read = LensRun(bart, plan_lens(bart, ModelLensRequest(tokens=IDS, targets=TARGETS), stream)).reply()
    assert read.layers[-1].hidden.targets.shape == (1, 3)
    with pytest.raises(InvalidRequest, match="returns its sum behind a norm") as caught:
        plan_lens(bart, ModelLensRequest(tokens=IDS, of=["hidden", "heads"]), stream)
    assert caught.value.param == "of.1"


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*DECODERS} - OTHERS.keys()))
def test_every_other_family_of_decoders_is_divided_into_heads(family):
    model = LoadedModel(family, tiny(family).requires_grad_(False), tokenizer(), device())
    request = ModelLensRequest(tokens=IDS, of=["heads"], top_k=0, targets=TARGETS)
    reply = LensRun(model, plan_lens(model, request, find_stream(model))).reply()
    rest = reply.rest
    heads = sum(layer.heads.targets.sum(0) for layer in reply.layers)
    total = rest.embeddings + rest.mlps.sum(0) + rest.others + rest.biases.sum(0) + rest.unembedding + heads
    near(total, reply.logits)


@pytest.mark.parametrize("small", [1e-7, 1e-20])
def test_summands_are_found_whatever_their_size(small):
    generator = torch.Generator().manual_seed(0)
    part, beside = torch.randn(2, 1, 5, 8, generator=generator, dtype=torch.float64)
    part = small * part
    for factor in (1.0, 0.5):
        assert factors_of(factor * part, [part], [beside], 1e-4) == pytest.approx([factor])
        assert factors_of(factor * part + small * beside, [part], [beside], 1e-4) == pytest.approx([factor])
    assert factors_of(part, [torch.zeros_like(part)], [], 1e-4) is None


def test_a_norm_is_known_beside_a_state_of_zeros():
    model = original("llama")
    state = torch.randn(1, 4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    state[0, 1] = 0
    norm = HeldNorm.of(model.model.norm, state)
    assert norm is not None
    assert norm.explains(state.double(), model.model.norm(state).double(), 1e-4)


def test_states_that_are_not_finite_are_refused_by_their_layer():
    model = copy.deepcopy(original("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(torch.inf)
    with pytest.raises(InvalidRequest, match="behind layer 1 of LlamaForCausalLM are not finite in float32"):
        find_stream(LoadedModel("llama", model, tokenizer(), device()))
