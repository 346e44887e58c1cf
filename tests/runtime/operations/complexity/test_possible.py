"""What is said of a shape, and what becomes of a request of that shape: one is refused where the other is."""

import numpy as np
import pytest
import torch

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import ForwardRequest, RawForwardRequest
from attention_contract.schemas.costs.complexity import ComplexityRequest, RawComplexityRequest
from attention_contract.schemas.modules import ModuleConfig
from attention_contract.tensors import DTYPES
from attention_service.core.multihead import Sizes, initial_parameters
from attention_service.cost import Rates, Roofline
from attention_service.modules.resident import Module, complete
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations import forward
from attention_service.runtime.operations.complexity import report
from attention_service.runtime.operations.complexity.subjects import DeviceMemory

DEVICE = Device(torch.device("cpu"), "a cpu", 2**40, Roofline(Rates(1e11, 1e10, 1e-5)))
FREE_BYTES = 2**22
H, D = 2, 4
APART = {"masks": [{"name": "global_tokens", "positions": [1], "projections": "separate"}]}
MIXED = {"method": {"name": "linformer", "rank": 3, "length": 16}}
WRITTEN = {"masks": [{"name": "causal"}], "method": {"name": "linear", "rule": "gated_delta"}}


def module(spec):
    config = complete(ModuleConfig(d_model=H * D, num_heads=H, spec=spec))
    return Module.of("m", config, initial_parameters(Sizes.of(config), 0, torch.float32))


def cost(of, **fields):
    if isinstance(of, Module):
        return report(of, ComplexityRequest.model_validate(fields), DeviceMemory(DEVICE, FREE_BYTES, FREE_BYTES))
    request = RawComplexityRequest.model_validate({"num_heads": H, "head_dim": D, "spec": of} | fields)
    return report(None, request, DeviceMemory(DEVICE, FREE_BYTES, FREE_BYTES))


def request(of, queries, keys=None, past=0, dtype="float32", **more):
    """One of this shape, planned."""

    def zeros(length):
        shape = (1, length, H * D) if isinstance(of, Module) else (1, H, length, D)
        return np.zeros(shape, DTYPES[dtype])

    fields = {"query": zeros(queries)}
    if keys is not None:
        fields |= {"key": zeros(keys), "value": zeros(keys)}
    if past:
        fields |= dict.fromkeys(("past_key", "past_value"), np.zeros((1, H, past, D), DTYPES[dtype]))
    if isinstance(of, Module):
        return forward.prepare(of, ForwardRequest(**fields, **more), DEVICE.exact(), FREE_BYTES)
    return forward.prepare(None, RawForwardRequest(**fields, **more, spec=of), DEVICE.exact(), FREE_BYTES)


@pytest.mark.parametrize(
    ("of", "shape", "named", "sent"),
    [
        (module(MIXED), {"queries": 17}, "shape.queries", "query"),
        (module(MIXED), {"queries": 4, "keys": 17}, "shape.keys", "key"),
        (MIXED, {"queries": 14, "past": 3}, "shape.queries", "query"),
        (module(APART), {"queries": 4, "past": 3}, "shape.past", "past_key"),
        (module(WRITTEN), {"queries": 4, "past": 3}, "shape.past", "past_key"),
        (APART, {"queries": 4}, "spec.masks", "spec.masks"),
    ],
)
def test_a_shape_is_refused_where_its_request_is(of, shape, named, sent):
    for ask, param in ((lambda: cost(of, shape=shape), named), (lambda: request(of, **shape), sent)):
        with pytest.raises(InvalidRequest) as refused:
            ask()
        assert refused.value.param == param
        assert refused.value.detail.startswith(f"{param}: ")


@pytest.mark.sampled(of=1, shape=1)
@pytest.mark.parametrize(
    ("of", "shape"),
    [
        (module(MIXED), {"queries": 20, "keys": 16}),
        (module(APART), {"queries": 4}),
        (module(WRITTEN), {"queries": 4}),
    ],
)
def test_a_shape_that_a_request_can_have_is_reported(of, shape):
    assert cost(of, shape=shape).costs[0].peak_bytes.request == request(of, **shape).plan.peak_bytes


def test_a_method_with_a_length_bounds_what_fits():
    found = cost(module(MIXED), shape={"queries": 4, "past": 3}).limits.forward.longest
    assert (found.size, found.bound) == (13, "spec")


def test_an_alternative_is_named_down_to_what_makes_a_shape_impossible():
    for spec, named in ((MIXED, "spec.method.length"), (WRITTEN, "spec")):
        with pytest.raises(InvalidRequest) as refused:
            cost(module({}), shape={"queries": 20, "past": 3}, compare=[{"spec": spec}])
        assert refused.value.param == f"compare.0.{named}"


def test_what_holds_no_past_has_no_decode_step():
    costs = cost(module(APART), shape={"queries": 4}).costs[0]
    assert (costs.decode_kernel, costs.executed.decode, costs.predicted.decode) == (None, None, None)
    assert cost(module({}), shape={"queries": 4}).costs[0].decode_kernel is not None


@pytest.mark.sampled(dtype=3)
@pytest.mark.parametrize("taps", [["output"], ["scores", "q"]], ids="+".join)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_each_dtype_costs_what_it_runs_as(dtype, taps):
    """Half types are not computed alike, and what is scored in float32 is answered in them."""
    costs = cost({}, shape={"queries": 40}, dtype=dtype, **{"return": taps}).costs[0]
    plan = request({}, 40, 40, dtype=dtype, return_=taps).plan
    assert (costs.kernel, costs.executed_flops) == (plan.kernel, plan.flops)
    assert costs.peak_bytes.request == plan.peak_bytes
    assert costs.predicted_ms == pytest.approx(plan.predicted.median * 1e3)
