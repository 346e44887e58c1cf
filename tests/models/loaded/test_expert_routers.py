"""The point router: read, edited, watched and refused, beside plain hooks on the modules of transformers.

By construction, what the MLP of a layer adds is the sum of these weights times the outputs of experts, each computed
alone.
"""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from tests.client.tiny_models import tokenizer
from tests.models.small_models import IDS, device, near
from tests.models.small_models import loaded as loaded_family
from tools.models_walk.model_types import built
from torch.nn.functional import one_hot

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.model_requests import ModelForwardRequest, ModelGradientsRequest
from attention_contract.schemas.openai import CompletionRequest
from attention_contract.validation import validate
from attention_service.models.answers.model_forward import forward_reply
from attention_service.models.answers.model_gradients import ModelGradients
from attention_service.models.generation.decoding.decoder import Decoder
from attention_service.models.generation.generation import RunningGeneration
from attention_service.models.generation.generation_turns import decode, read_prompts
from attention_service.models.generation.plans.generation_plan import plan_generation
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.model_description import model_info
from attention_service.models.loaded.streams.watched_probes import WatchedProbe
from attention_service.models.passes.float64_runs import in_float64

LAYER = 1
KINDS = ("mixtral", "gpt_oss", "olmoe", "qwen3_moe", "phimoe", "granitemoe", "jamba", "dbrx")
"""Layers whose MLP is the sum of experts, and nothing beside."""
SHARED = ("qwen2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4", "switch_transformers")
"""With experts that every token takes, several states of a token, a choice that is one-hot."""


@cache
def loaded(kind):
    return LoadedModel(kind, copy.deepcopy(built(kind)).requires_grad_(False), tokenizer(), device())


def key(kind):
    return "encoder.1" if kind == "switch_transformers" else LAYER


def experts(kind):
    """The module that holds the experts of a layer."""
    layer = next(place for place in loaded(kind).all_places if place.key == key(kind)).layer
    return next(module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts")


def forward(kind, **fields):
    taps = ["router", "mlp"] if kind in KINDS else ["router"]
    sent = {"tokens": IDS, "layers": [key(kind)], "return": taps, "top_k": 0, **fields}
    return forward_reply(loaded(kind), validate(ModelForwardRequest, sent))


def given(kind, **fields):
    """The states ``[N, d]`` that the experts are given, their dense weights ``[N, E]``, and what they return."""
    seen = []

    def hook(module, args, options, output):
        states, choice, weights = [*args, *options.values()][:3]
        chosen = one_hot(choice, module.num_experts) if choice.ndim == 2 else choice
        seen.append((states.clone(), (chosen * weights[..., None]).sum(1), output))

    handle = experts(kind).register_forward_hook(hook, with_kwargs=True)
    forward(kind, **fields)
    handle.remove()
    return seen[0]


@torch.no_grad()
def outputs(kind, states):
    """The output ``[N, E, d]`` of each expert for each token, computed alone."""
    module, (tokens, width) = experts(kind), states.reshape(-1, states.shape[-1]).shape
    of_each = []
    for expert in range(module.num_experts):
        choice = torch.full((tokens, 1), expert)
        if kind == "switch_transformers":
            choice = one_hot(choice, module.num_experts)
        of_each.append(module(states.reshape(tokens, width), choice, torch.ones(tokens, 1)).reshape(tokens, width))
    return torch.stack(of_each, 1)


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", [*KINDS, *SHARED])
def test_the_weights_are_those_that_multiply_the_outputs_of_experts(kind):
    (layer,) = forward(kind).layers
    states, dense, made = given(kind)
    near(layer.router, dense, 1e-6)
    assert (np.asarray(layer.router) == 0).any(-1).all()
    total = (dense[..., None] * outputs(kind, states)).sum(1)
    near(made.reshape(total.shape), total, 1e-5 * float(total.abs().max()))
    if kind in KINDS:  # times the factor by which Granite adds it
        added, factor = torch.from_numpy(np.array(layer.mlp)), 1.0
        if kind == "granitemoe":
            factor = loaded(kind).model.config.residual_multiplier
        near(added, factor * total, 1e-5 * float(total.abs().max()))


@pytest.mark.sampled(kind=3)
@pytest.mark.parametrize("kind", [*KINDS, "switch_transformers"])
def test_an_edit_changes_the_sum_of_the_experts_at_its_tokens_and_nowhere_else(kind):
    before = forward(kind)
    states, dense, made = given(kind)
    new = dense.clone()
    taken, free = int(dense[2].argmax()), int(dense[2].argmin())
    new[2, free] = 0.75
    new[1] *= 0.5
    new[2, taken] += 0.25
    new[3] = 0
    edits = [
        {"tap": "router", "queries": [2], "experts": [free], "set": 0.75},
        {"tap": "router", "queries": [1], "scale": 0.5},
        {"tap": "router", "queries": [2], "experts": [taken], "add": 0.25},
        {"tap": "router", "queries": [3], "set": 0},
    ]
    reply = forward(kind, edits={str(key(kind)): edits})
    near(reply.layers[0].router, new, 1e-6)
    _, seen, edited = given(kind, edits={str(key(kind)): edits})
    near(seen, new, 1e-6)
    expected = (new[..., None] * outputs(kind, states)).sum(1)
    near(edited.reshape(expected.shape), expected, 1e-5 * float(expected.abs().max()))
    rest = [at for at in range(len(dense)) if at not in {1, 2, 3}]
    near(edited.reshape(expected.shape)[rest], made.reshape(expected.shape)[rest], 1e-6)
    if kind in KINDS:
        near(reply.layers[0].mlp[0], before.layers[0].mlp[0], 1e-6)


def by_plain_hooks(kind, model, arguments):
    """∂ log p of the likeliest next token by the weights ``[N, E]`` of a layer's experts, and that token."""
    layer = next(place for place in loaded(kind).all_places if place.key == key(kind)).layer
    path = next(name for name, module in loaded(kind).model.named_modules() if module is layer)
    module = next(m for n, m in model.get_submodule(path).named_modules() if n.rpartition(".")[2] == "experts")
    seen = []

    def hook(module, args, options):
        states, choice, weights = [*args, *options.values()][:3]
        seen[:] = [choice, weights.detach().clone().requires_grad_()]
        values = iter([states, *seen])
        return tuple(next(values) for _ in args), {name: next(values, x) for name, x in options.items()}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    logs = model(**arguments).logits[0, -1].log_softmax(-1)
    handle.remove()
    choice, weights = seen
    (gradient,) = torch.autograd.grad(logs.max(), weights)
    chosen = one_hot(choice, module.num_experts) if choice.ndim == 2 else choice
    return (chosen * gradient[..., None]).sum(1).numpy(), int(logs.argmax())


@pytest.mark.sampled(kind=4)
@pytest.mark.parametrize("kind", [*KINDS, *SHARED])
def test_the_gradient_is_that_of_autograd_through_plain_hooks_in_float64(kind):
    eager = copy.deepcopy(built(kind)).requires_grad_(False).double().eval()
    eager.set_experts_implementation("eager")  # the default has no float64
    model = LoadedModel(kind, copy.deepcopy(eager), tokenizer(), device())
    asked = {"tokens": IDS, "layers": [key(kind)], "wrt": ["router", "tokens"]}
    gradients = ModelGradients(model, validate(ModelGradientsRequest, asked))
    with in_float64(eager), in_float64(model.model):  # also where transformers rounds to float32
        expected, token = by_plain_hooks(kind, eager, gradients.checked.inputs.arguments)
        reply = gradients.reply()
        plain = ModelGradients(model, validate(ModelGradientsRequest, asked | {"wrt": ["tokens"]})).reply()
    assert reply.token == [token]
    found = np.asarray(reply.layers[0].gradients["router"])
    assert np.abs(expected).max() > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(reply.tokens, plain.tokens, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_the_gradient_agrees_with_central_differences_also_behind_edits(kind):
    """At a token whose experts are all taken, each has a derivative."""
    edits = {"0": [{"tap": "router", "queries": [1], "scale": 0.5}, {"tap": "router", "queries": [2], "set": 1}]}
    asked = {"tokens": IDS, "layers": [0], "wrt": ["router"], "check": True, "edits": edits}
    reply = ModelGradients(loaded(kind), validate(ModelGradientsRequest, asked)).reply()
    check = reply.check["0.router"]
    assert check.passed
    assert (np.asarray(reply.layers[0].gradients["router"])[2] != 0).all()


@pytest.mark.parametrize(
    ("family", "fields", "param", "reason"),
    [
        ("llama", {"return": ["router"]}, "return.0", "no module is seen in its layer"),
        ("llama", {"edits": {"1": [{"tap": "router", "set": 0}]}}, "edits.1.0.tap", "it has no router"),
        ("mixtral", {"edits": {"1": [{"tap": "router", "experts": [4], "set": 0}]}}, "edits.1.0.experts", "4 experts"),
        ("mixtral", {"edits": {"1": [{"tap": "router", "heads": [0], "set": 0}]}}, "edits.1.0.heads", "no heads"),
        ("mixtral", {"edits": {"1": [{"tap": "mlp", "experts": [0], "set": 0}]}}, "edits.1.0.experts", "no experts"),
        ("mixtral", {"edits": {"1": [{"tap": "router", "value": [0, 0, 1]}]}}, "edits.1.0.value", "broadcasts"),
        ("llama4_text", {"return": ["router"]}, "return.0", "weights for the outputs of experts"),
        ("jetmoe", {"return": ["router"]}, "return.0", "weights for the outputs of experts"),
    ],
)
def test_a_router_that_is_not_there_and_edits_that_do_not_fit_are_refused_by_field(family, fields, param, reason):
    model = loaded_family(family) if family == "llama" else loaded(family)
    with pytest.raises(InvalidRequest, match=reason) as refused:
        forward_reply(model, validate(ModelForwardRequest, {"tokens": IDS, **fields}))
    assert refused.value.param == param


def test_the_description_of_a_model_tells_which_layers_have_a_router():
    first, last = model_info(loaded("deepseek_v3"))["layers"]
    assert "router" in last.taps
    assert "router" in last.edits
    assert "router" not in first.taps
    assert "router" not in first.edits
    assert "router" not in first.refused
    assert "router" in last.gradients
    assert "router" not in first.gradients


def generated(watches, edits=None, prompts=((5, 3, 7), (8, 6))):
    model, given = loaded("mixtral"), []
    decoder, running = Decoder(model), []
    for row, watch in zip(prompts, watches, strict=True):
        sent = {"model": "mixtral", "prompt": [*row], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        beside = {"attention": {"layers": [LAYER], "edits": edits}} if edits and watch is None else {}
        request = validate(CompletionRequest, sent | beside)
        plan = plan_generation(model, request)
        object.__setattr__(plan, "watch", () if watch is None else [watch])
        running.append(RunningGeneration(decoder, request, plan, given.append))
    while waiting := [generation for generation in running if not generation.has_ended]:
        unread = [generation for generation in waiting if generation.unread]
        assert not (read_prompts(decoder, unread, 10_000) if unread else decode(decoder, waiting))
    decoder.close()
    return [generation.end().last[0] for generation in running]


def test_a_generation_is_watched_and_edited_at_the_router_beside_another_text():
    weights = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    probe = WatchedProbe("0" * 32, LAYER, "router", weights, 0.25, None, False)
    edits = {str(LAYER): [{"tap": "router", "experts": [0, 1], "set": 0.5}]}
    watched, edited = generated([probe, None], edits)
    (choice,) = watched["choices"]
    tokens = [5, 3, 7, *[token["id"] for token in choice["attention"]]]
    (layer,) = forward("mixtral", tokens=tokens).layers
    expected = np.asarray(layer.router, np.float64) @ weights.numpy() + 0.25
    near([token["scores"]["0" * 32] for token in choice["attention"]], expected[2:-1], 1e-5)
    (choice,) = edited["choices"]
    ids = [8, 6, *[token["id"] for token in choice["attention"]]]
    logits = np.asarray(
        forward(
            "mixtral", tokens=ids, edits=edits, **{"return": ["logits", "router"]}, positions=[*range(len(ids))]
        ).logits
    )
    assert logits.argmax(-1)[1:-1].tolist() == ids[2:]
    plain = np.asarray(
        forward("mixtral", tokens=ids, **{"return": ["logits", "router"]}, positions=[*range(len(ids))]).logits
    )
    assert np.abs(plain - logits).max() > 1e-3
