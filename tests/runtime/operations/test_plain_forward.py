"""The plain forward pass: joint projections, and numbers that are not finite."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from attention_contract.schemas.attention import ForwardRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core import multihead
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.core.problem import Selection
from attention_service.modules.resident import Module, complete
from attention_service.runtime.binding.module_binding import bind
from attention_service.runtime.operations.compute import TORCH_DTYPES
from attention_service.runtime.operations.forward import Forward
from attention_service.runtime.scheduling.operation import execute

CPU = torch.device("cpu")
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
