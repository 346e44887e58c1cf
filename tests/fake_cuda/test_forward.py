"""Forward passes on a GPU: ceilings of what they make the GPU and the host do, over everything that is registered."""

import math
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_contract.base import ABSENT
from attention_contract.errors import InvalidTensor
from attention_contract.schemas.attention import ForwardRequest
from attention_contract.spec import AttentionSpec
from attention_service.core.kernels import KERNELS
from attention_service.core.tensors import are_finite, assumed_finite
from attention_service.runtime.device import torch_device
from attention_service.runtime.operations import forward
from attention_service.runtime.scheduling.passes import ran_of, run_alone
from tests.core.conftest import APPROXIMATIONS, MASKS, SPECS
from tests.fake_cuda.machine import BYTES, CUDA, H100, Machine

EVERY = SPECS | {name: AttentionSpec(masks=masks) for name, masks in MASKS.items()} | APPROXIMATIONS
CAUSAL = {"masks": [{"name": "causal"}]}
ROPE = {"position": {"name": "rope"}}


def job_of(cuda: Machine, module, shape, **more):
    """A job over zeros, which are float32 whatever the module computes in, and its device."""
    request = ForwardRequest.model_validate({"query": np.zeros(shape, np.float32)} | more)
    device = cuda.device()
    return forward.prepare(module, request, device, 2**62), request, device


def run(cuda, module, shape, *, scalar=0.0, **more):
    job, _, device = job_of(cuda, module, shape, **more)
    return *cuda.run(job, device, scalar=scalar), job.plan


def test_a_small_pass_launches_little_and_waits_once(cuda):
    fields, counts, _ = run(cuda, cuda.module(d_model=64, num_heads=4), (1, 16, 64))
    assert fields["output"].shape == (1, 16, 64)
    assert counts.launches.total() <= 5
    assert len(counts.waits) == 1
    assert [each.blocking for each in counts.uploads] == [False]
    assert not any(each.blocking for each in counts.downloads)
    assert counts.statistics <= 2


def test_a_prefill_with_rotations_launches_little(cuda):
    module = cuda.module("bfloat16", d_model=1024, num_heads=8, num_kv_heads=2, spec=CAUSAL | ROPE)
    request = ForwardRequest.model_validate({"query": np.zeros((1, 8192, 1024), ml_dtypes.bfloat16)})
    device = cuda.device()
    _, counts = cuda.run(forward.prepare(module, request, device, 2**62), device)
    assert counts.launches.total() <= 14
    assert [wait for wait in counts.waits if "tensors.py" not in wait] == []


@pytest.mark.slow
def test_results_of_one_request_come_together(cuda):
    past = np.zeros((1, 4, 5, 16), np.float32)
    more = {"past_key": past, "past_value": past, "return": ["output", "weights", "lse"]}
    fields, counts, _ = run(cuda, cuda.module(d_model=64, num_heads=4, spec=CAUSAL), (1, 3, 64), **more)
    assert {"output", "weights", "lse", "present_key", "present_value"} <= fields.keys()
    assert len(counts.waits) == 1


@pytest.mark.sampled(spec=20)
@pytest.mark.parametrize("spec", EVERY.values(), ids=EVERY)
def test_every_spec_keeps_devices_apart_and_waits_once_within_its_plan(cuda, spec):
    """In a type that some stages widen; the requests below come in float32."""
    module = cuda.module("bfloat16", d_model=64, num_heads=4, spec=spec)
    _, counts, plan = run(cuda, module, (2, 9, 64))
    assert not counts.mixed
    assert len(counts.waits) == 1
    assert not counts.blocking_uploads
    assert counts.peak <= plan.peak_bytes


REQUESTS = {
    "bool mask": {"mask": np.tri(9, dtype=bool)},
    "float mask": {"mask": np.zeros((9, 9), np.float32)},
    "key mask": {"key_mask": np.ones((2, 9), bool)},
    "key lengths": {"key_lengths": np.array([3, 9])},
    "offsets": {"offsets": np.array([4, 2])},
    "positions": {"positions": np.arange(18).reshape(2, 9)},
    "dropout": {"dropout": {"p": 0.1, "seed": 3, "return_mask": True}},
    "edits": {"edits": [{"tap": "weights", "heads": [1, 2], "set": 0, "renormalize": True}], "compare": "unedited"},
    "taps": {"return": ["output", "q", "scores", "weights", "lse", "context"]},
    "selected": {"return": ["weights"], "select": {"heads": [1, 3], "queries": [0, 4]}},
    **{kernel.name: {"kernel": kernel.name} for kernel in KERNELS},
}


@pytest.mark.sampled(more=2)
@pytest.mark.parametrize("more", REQUESTS.values(), ids=REQUESTS)
def test_every_request_keeps_devices_apart_within_its_plan(cuda, more):
    module = cuda.module("float32", d_model=64, num_heads=4, num_kv_heads=2, spec=CAUSAL | ROPE)
    _, counts, plan = run(cuda, module, (2, 9, 64), scalar=1.0, **more)
    assert not counts.mixed
    assert not counts.blocking_uploads
    assert counts.peak <= plan.peak_bytes


@pytest.mark.sampled(spec=1)
@pytest.mark.parametrize("spec", [{}, CAUSAL], ids=["dense", "causal"])
def test_numbers_that_are_not_finite_are_noticed_with_the_result(cuda, spec):
    """The pass runs again, and looks at them where they bear on other queries."""
    module = cuda.module(d_model=64, num_heads=4, spec=spec)
    _, finite, _ = run(cuda, module, (1, 16, 64))
    _, counts, _ = run(cuda, module, (1, 16, 64), scalar=math.nan)
    assert counts.launches["addmm"] == 2 * finite.launches["addmm"]
    assert counts.launches["masked_fill"] >= 3
    assert len(counts.uploads) == 2


def test_a_number_too_large_for_the_module_is_named_when_the_result_comes(cuda):
    module = cuda.module("float16", d_model=64, num_heads=4)
    with pytest.raises(InvalidTensor, match="query: a number is too large for float16"):
        run(cuda, module, (1, 16, 64), scalar=math.inf)


def test_what_is_assumed_ends_with_its_block(cuda):
    with cuda.counted(scalar=math.nan) as counts:
        x = torch.zeros((), device="cuda:0")
        with assumed_finite() as sums:
            assert are_finite(x, x)
            assert len(sums) == 2
            assert not counts.waits
        assert not are_finite(x)
        assert are_finite(torch.zeros(()))
    assert len(counts.waits) == 1


@pytest.mark.parametrize(
    ("tf32", "dtype", "named"), [(True, "float32", True), (True, "bfloat16", ABSENT), (False, "float32", ABSENT)]
)
def test_products_in_tf32_are_named(cuda, tf32, dtype, named):
    """It is a flag of the process, set before anything computes; convolutions of whole models have one of their own."""
    opening = {
        "resolve": lambda wanted: CUDA,
        "measure_rates": lambda device: H100,
        "_name": lambda device: "H100",
        "_total_bytes": lambda device: BYTES,
    }
    flags = [(of, of.allow_tf32) for of in (torch.backends.cuda.matmul, torch.backends.cudnn)]
    try:
        with mock.patch.multiple(torch_device, **opening), mock.patch.object(torch.cuda, "device"):
            device = torch_device.Device.open("cuda", tf32=tf32)
        assert [of.allow_tf32 for of, _ in flags] == [tf32, tf32]
    finally:
        for of, flag in flags:
            of.allow_tf32 = flag
    request = ForwardRequest(query=np.zeros((1, 16, 64), np.float32))
    job = forward.prepare(cuda.module(dtype, d_model=64, num_heads=4), request, device, 2**62)
    with cuda.counted():
        _, run_of_pass = run_alone(job, device.clock, device)
    assert ran_of(job, run_of_pass, 0.0, device).tf32 is named
