"""The fused kernel on a GPU: which of PyTorch's kernels runs, whatever other threads do, and what it holds."""

import threading
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_contract.schemas.attention import RawForwardRequest
from attention_contract.schemas.gradients import RawGradientsRequest
from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.attention import attend
from attention_service.core.kernels.fused import cuda_attention
from attention_service.core.problem import Problem
from attention_service.runtime.operations import forward, gradients
from tests.fake_cuda.counting import Counts
from tests.fake_cuda.machine import CUDA, modes

FLASH, EFFICIENT, CUDNN = (
    "_flash_attention_forward", "_efficient_attention_forward", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
CAUSAL = {"masks": [{"name": "causal"}]}
WINDOW = {"masks": [{"name": "causal"}, {"name": "sliding_window", "left": 511}]}
DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}


def tensor(dtype, *shape):
    return np.zeros(shape, DTYPES[dtype])


def raw(cuda, dtype, shape, kv_heads=None, **more):
    """Counts of a raw forward pass, and its plan."""
    query = tensor(dtype, *shape)
    kv = tensor(dtype, shape[0], kv_heads or shape[1], *shape[2:])
    request = RawForwardRequest.model_validate({"query": query, "key": kv, "value": kv} | more)
    device = cuda.device()
    job = forward.prepare(None, request, device, 2**62)
    return cuda.run(job, device)[1], job.plan


def test_flags_of_the_process_are_neither_set_nor_read(cuda):
    setters = ["_set_sdp_use_flash", "_set_sdp_use_mem_efficient", "_set_sdp_use_math", "_set_sdp_use_cudnn"]
    with mock.patch.multiple(torch._C, **dict.fromkeys([*setters, "_set_sdp_priority_order"], mock.DEFAULT)) as set_:
        for dtype, kernel in (("bfloat16", FLASH), ("float32", EFFICIENT)):
            assert raw(cuda, dtype, (1, 4, 64, 32), spec=CAUSAL)[0].launches[kernel] == 1
    assert not any(each.called for each in set_.values())
    torch.backends.cuda.enable_flash_sdp(False)  # as two contexts that interleave leave it
    try:
        assert raw(cuda, "bfloat16", (1, 4, 64, 32), spec=CAUSAL)[0].launches[FLASH] == 1
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.slow
def test_two_lanes_take_each_its_own_kernel(cuda):
    """One lane computes half types and the other float32, at the same time; a flag would serve one of them wrongly."""
    found, barrier = {}, threading.Barrier(2)

    def lane(dtype):
        found[dtype] = Counts()
        with modes(found[dtype], FakeTensorMode(allow_non_fake_inputs=True)):
            q = torch.zeros(1, 4, 64, 32, dtype=dtype, device=CUDA)
            barrier.wait()
            for _ in range(50):
                attend(Problem(q, q, q, AttentionSpec(masks=[Causal()]), finite=True))

    with cuda.counted():
        threads = [threading.Thread(target=lane, args=(dtype,)) for dtype in (torch.bfloat16, torch.float32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[torch.bfloat16].launches[FLASH] == found[torch.float32].launches[EFFICIENT] == 50


@pytest.mark.parametrize("length", [64, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_capture_takes_the_same_kernel(cuda, dtype, length):
    def launched(*, capturing):
        with cuda.counted() as counts:
            q = torch.zeros(1, 4, length, 64, dtype=getattr(torch, dtype), device=CUDA)
            counts.capturing = capturing
            attend(Problem(q, q, q, AttentionSpec(masks=[Causal()]), finite=True))
        assert not counts.illegal
        return counts.launches

    assert launched(capturing=True) == launched(capturing=False)


@pytest.mark.sampled
@pytest.mark.parametrize("masks", [{}, CAUSAL, WINDOW], ids=["dense", "causal", "window"])
@pytest.mark.parametrize("width", [8, 10, 64, 100, 300])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_no_request_holds_scores_that_were_not_planned(cuda, dtype, width, masks):
    """Each planned byte is one that a kernel holds: PyTorch's MATH, which no plan knows, is never taken."""
    counts, plan = raw(cuda, dtype, (1, 2, 600, width), spec=masks)
    assert counts.peak <= plan.peak_bytes
    if dtype != "float64":
        assert plan.kernel == "fused"


@pytest.mark.sampled(width=1)
@pytest.mark.parametrize("width", [64, 10])
def test_gradients_checked_in_float64_hold_what_was_planned(cuda, width):
    query = tensor("float32", 1, 2, 40, width)
    request = RawGradientsRequest.model_validate(
        {"query": query, "key": query, "value": query, "wrt": ["query"], "check": True}
    )
    device = cuda.device()
    job = gradients.prepare(None, request, device, 2**62)
    assert cuda.run(job, device, scalar=1.0)[1].peak <= job.plan.peak_bytes


@pytest.mark.sampled(shape=1)
@pytest.mark.parametrize("shape", [(1, 32, 8192, 128), (4, 8, 2048, 64)])
def test_a_window_takes_no_mask_in_memory(cuda, shape):
    counts, _ = raw(cuda, "bfloat16", shape, spec=WINDOW)
    assert counts.launches[FLASH] == 1
    assert counts.largest == 2 * np.prod(shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_past_takes_no_mask_in_memory(cuda, dtype):
    past = tensor(dtype, 1, 8, 4096, 128)
    counts, _ = raw(cuda, dtype, (1, 32, 16, 128), kv_heads=8, spec=CAUSAL, past_key=past, past_value=past)
    assert counts.largest <= DTYPES[dtype](0).itemsize * 8 * 4112 * 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_a_group_share_their_keys(cuda, dtype):
    counts, _ = raw(cuda, dtype, (1, 32, 512, 64), kv_heads=4, spec=CAUSAL)
    assert "repeat_interleave" not in counts.launches
    assert "index_select" not in counts.launches
    assert counts.peak <= DTYPES[dtype](0).itemsize * 64 * 512 * (3 * 32 + 2 * 4) + 2**20


@pytest.mark.parametrize(("dtype", "launches"), [("float32", 3), ("bfloat16", 2)])
def test_more_sequences_than_a_grid_has_are_launched_in_parts_within_the_plan(cuda, dtype, launches):
    """In float32 each head of keys is a sequence of its own."""
    counts, plan = raw(cuda, dtype, (70_000, 4, 2, 8), kv_heads=2)
    assert plan.kernel == "fused"
    assert counts.launches[FLASH] + counts.launches[EFFICIENT] == launches
    assert counts.peak <= plan.peak_bytes


@pytest.mark.slow
def test_lengths_share_cudnns_plans(cuda):
    """Each shape of its own takes cuDNN some 60 ms to plan."""
    shapes = set()

    def planned(q, *args, **options):
        if q.is_cuda:
            shapes.add(tuple(q.shape))
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, *args, **options)

    with mock.patch.object(cuda_attention, "_cudnn", planned):
        for length in [64, 1024, 2047, 2048, 3000, 3001, 3002, 3071, 3072, 3073]:
            counts, _ = raw(cuda, "bfloat16", (1, 1, length, 64), spec=CAUSAL)
            assert counts.launches[CUDNN if length >= 2048 else FLASH] == 1
    assert shapes == {(1, 1, length, 64) for length in (2048, 3072, 3328)}
