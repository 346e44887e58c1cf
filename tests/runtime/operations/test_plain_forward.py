"""The plain forward pass against float64 PyTorch, and the numbers that are not finite."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core import multihead
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.core.types import Selection
from attention_service.modules.resident import Module, complete
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.operations.compute import TORCH_DTYPES
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.operations.operation import execute

CPU = torch.device("cpu")
CLOSE = {"float32": 2e-5, "float64": 1e-12}
CAUSAL = AttentionSpec(masks=[Causal()])


def module(rng, spec=None, *, biased=True, **config):
    """A module with random parameters, also its biases; laid out as a resident one."""
    widths = {"d_model": 8, "num_heads": 2} | config
    whole = complete(ModuleConfig(**widths, bias=biased, spec=spec or AttentionSpec()))
    dtype = TORCH_DTYPES[whole.dtype]
    parameters = initial_parameters(Sizes.of(whole), 0, dtype)
    for name, value in parameters.items():
        if name.endswith("bias"):
            parameters[name] = torch.from_numpy(rng.standard_normal(value.shape)).to(dtype)
    return Module.of("m", whole, parameters).on(CPU)


def answered(module, request):
    """The output of the executor."""
    operation = Forward(bind(module, request), request, Selection(), "fused")
    return execute(operation, CPU)["output"]


def expected(module, request):
    """In float64, by PyTorch, from the formula."""
    sizes, p = module.sizes, {name: value.double() for name, value in module.parameters.items()}
    query = torch.from_numpy(request.query).double()
    key = query if request.key is None else torch.from_numpy(request.key).double()
    value = key if request.value is None else torch.from_numpy(request.value).double()

    def split(x, role, heads):
        x = linear(x, p[f"{role}_proj.weight"], p.get(f"{role}_proj.bias"))
        return x.unflatten(-1, (heads, -1)).transpose(-2, -3)

    q, k, v = split(query, "q", sizes.heads), split(key, "k", sizes.kv_heads), split(value, "v", sizes.kv_heads)
    k, v = (x.repeat_interleave(sizes.heads // sizes.kv_heads, -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    spec = module.config.spec
    scale = getattr(spec.score, "scale", 1.0) or sizes.head_dim**-0.5
    scores = scores * (1.0 if spec.score.name == "dot" else scale) / spec.normalizer.temperature
    if spec.masks:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    context = scores.softmax(-1) @ v
    merged = context.transpose(-2, -3).flatten(-2)
    return linear(merged, p["o_proj.weight"], p.get("o_proj.bias")).numpy()


def drawn(rng, dtype):
    """Random sizes, and the inputs of one request."""
    heads = int(rng.choice([1, 2, 4, 6]))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    head_dim, d_model = int(rng.integers(1, 20)), int(rng.integers(1, 40))
    config = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    config |= {"d_model": d_model, "biased": bool(rng.random() < 0.5), "dtype": dtype}
    lead = (int(rng.integers(1, 4)),) if rng.random() < 0.7 else ()
    queries = int(rng.integers(1, 40))
    shapes = {"query": (*lead, queries, d_model)}
    spec = {"score": [{"name": "scaled_dot"}, {"name": "dot"}, {"name": "scaled_dot", "scale": 0.3}][rng.integers(3)]}
    spec |= {"normalizer": {"name": "softmax", "temperature": float(rng.choice([1.0, 2.5]))}}
    if rng.random() < 0.5:
        config |= {"key_width": int(rng.integers(1, 40)), "value_width": int(rng.integers(1, 40))}
        keys = int(rng.integers(1, 40))
        shapes |= {"key": (*lead, keys, config["key_width"]), "value": (*lead, keys, config["value_width"])}
    elif rng.random() < 0.5:
        shapes["key"] = (*lead, int(rng.integers(1, 40)), d_model)
    if rng.random() < 0.5:
        spec["masks"] = [{"name": "causal", "align": "top_left"}]
    given = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return AttentionSpec(**spec), config, ForwardRequest(**given)


@pytest.mark.parametrize("seed", range(60))
def test_a_module_gives_the_numbers_of_the_formula(seed):
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float32", "float64"]))
    spec, config, request = drawn(rng, dtype)
    here = module(rng, spec, **config)
    found = answered(here, request)
    assert (found.dtype.name, found.shape) == (dtype, request.query.shape)
    np.testing.assert_allclose(found, expected(here, request), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def drawn_raw(rng, dtype):
    """A request of raw attention of random sizes and layout."""
    heads, width = int(rng.choice([1, 2, 6])), int(rng.integers(1, 20))
    kv_heads = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    queries = int(rng.integers(1, 40))
    keys = int(rng.integers(1, 40)) if rng.random() < 0.5 else queries
    lead = [(int(rng.integers(1, 4)),), ()][rng.integers(2)]
    by_head = bool(lead) or rng.random() < 0.5
    if not by_head:
        heads = kv_heads = 1

    def shape(heads, length):
        return (*lead, *((heads,) if by_head else ()), length, width)

    shapes = {"query": shape(heads, queries), "key": shape(kv_heads, keys), "value": shape(kv_heads, keys)}
    if rng.random() < 0.3 or not keys:
        del shapes["value"]
    if rng.random() < 0.2 and heads == kv_heads:
        shapes = {"query": shapes["query"]}
    spec = {"score": [{"name": "scaled_dot"}, {"name": "dot"}, {"name": "scaled_dot", "scale": 0.3}][rng.integers(3)]}
    spec |= {"normalizer": {"name": "softmax", "temperature": float(rng.choice([1.0, 2.5]))}}
    if rng.random() < 0.5:
        spec["masks"] = [{"name": "causal", "align": "top_left"}]
    given = {name: rng.standard_normal(each).astype(dtype) for name, each in shapes.items()}
    return RawForwardRequest(spec=spec, **given)


def expected_raw(request):
    """In float64, from the formula."""
    q, k = request.query, request.query if request.key is None else request.key
    q, k, v = (torch.from_numpy(x).double() for x in (q, k, k if request.value is None else request.value))
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = getattr(request.spec.score, "scale", 1.0) or q.shape[-1] ** -0.5
    scale = (1.0 if request.spec.score.name == "dot" else scale) / request.spec.normalizer.temperature
    scores = q @ k.transpose(-1, -2) * scale
    if request.spec.masks:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return (scores.softmax(-1) @ v).numpy()


@pytest.mark.parametrize("seed", range(60))
def test_raw_attention_gives_the_numbers_of_the_formula(seed):
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice(["float32", "float64"]))
    request = drawn_raw(rng, dtype)
    found = answered(None, request)
    assert found.dtype.name == dtype
    np.testing.assert_allclose(found, expected_raw(request), rtol=CLOSE[dtype], atol=CLOSE[dtype])


X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)


def test_one_product_projects_a_tensor_that_has_all_roles(rng, monkeypatch):
    taken, real = [], multihead.project_jointly
    monkeypatch.setattr(multihead, "project_jointly", lambda *x: taken.append(1) or real(*x))
    here = module(rng, CAUSAL, num_kv_heads=1)
    found = answered(here, ForwardRequest(query=X))
    assert taken == [1]
    apart = answered(here, ForwardRequest(query=X, key=X.copy()))
    assert taken == [1]
    np.testing.assert_allclose(found, apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, "most", "root"])
def test_a_key_that_is_not_finite_harms_only_the_queries_that_may_look_at_it(rng, dtype, number):
    most = float(np.finfo(dtype).max)
    x = rng.standard_normal((2, 5, 8)).astype(dtype)
    x[0, 3, 2] = {"most": most, "root": 4 * most**0.5}.get(number, number)
    found = answered(module(rng, CAUSAL, dtype=dtype), ForwardRequest(query=x))
    assert np.isfinite(found[1]).all()
    assert np.isfinite(found[0, :3]).all()
    assert isinstance(number, str) or np.isnan(found[0, 3:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("biased", [True, False])
def test_up_to_the_bound_all_keys_and_values_are_finite(rng, dtype, size, biased):
    weights = {f"{role}_proj.weight": torch.from_numpy(rng.standard_normal((8, 8))).to(dtype) * size for role in "kv"}
    biases = {f"{role}_proj.bias": torch.full((8,), 0.02 * torch.finfo(dtype).max, dtype=dtype) for role in "kv"}
    parameters = weights | (biases if biased else {})
    most = multihead.largest_finite(parameters)
    assert most > 0
    for role in "kv":
        weight = parameters[f"{role}_proj.weight"]
        worst = weight[weight.double().norm(dim=1).argmax()].double()
        x = (worst / worst.norm() * math.sqrt(most) * (1 - 1e-6)).to(dtype)  # it points where the product is greatest
        assert linear(x, weight, parameters.get(f"{role}_proj.bias")).isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"])
def test_parameters_that_are_not_finite_have_no_bound(rng, name, number):
    here = module(rng)
    here.parameters[name][..., 3] = number
    assert multihead.largest_finite(here.parameters) < 0
    assert np.isnan(answered(here, ForwardRequest(query=X))).any()
