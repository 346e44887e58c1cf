"""The fastest of PyTorch's fused kernels for a GPU: found by its events, and never another answer."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from attention_contract.spec import AttentionSpec, Causal
from attention_service.core.attention import attend
from attention_service.core.kernels.fused import cuda_backends
from attention_service.core.problem import Problem


@pytest.fixture(autouse=True)
def nothing_is_known():
    cuda_backends.ranked.cache_clear()
    yield
    cuda_backends.ranked.cache_clear()


def test_they_are_ordered_by_their_time_and_one_that_fails_comes_last():
    times = iter([None, 1.0, 2.0])

    def timer(run):
        if (taken := next(times)) is None:
            raise RuntimeError("no kernel")
        return taken

    order = cuda_backends.ranked(torch.device("cpu"), torch.float32, 8, 16, False, timer)
    assert order == (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION)


def test_on_a_cpu_nothing_is_asked():
    q = torch.randn(1, 2, 4, 8)
    with cuda_backends.fastest(q, q, q, None, causal=False):
        scaled_dot_product_attention(q, q, q)
    assert cuda_backends.ranked.cache_info().currsize == 0


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [100, 1000])
def test_the_numbers_of_the_formula_on_a_gpu(length, dtype, causal):
    q, k, v = torch.randn(3, 2, 4, length, 64, device="cuda", dtype=dtype)
    spec = AttentionSpec(masks=[Causal()] if causal else [])
    with torch.inference_mode():
        found = attend(Problem(q, k, v, spec), kernel="fused").context
    assert cuda_backends.ranked.cache_info().currsize == 1
    wide = [x.double().cpu() for x in (q, k, v)]
    expected = scaled_dot_product_attention(*wide, is_causal=causal)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=2e-2 if dtype.itemsize == 2 else 2e-3)
