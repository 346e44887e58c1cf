"""Tensors of torch that a caller may pass, and replies that become tensors of torch."""

import numpy as np
import pytest
import torch

from attention_client import InvalidTensor
from attention_client.array_likes import plain
from attention_contract.tensors import DTYPES
from tests.client.service import ask, call_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.requires_grad_(),
        torch.nn.Parameter,
        lambda x: x.T,
        lambda x: x[::2],
        lambda x: x[0, 0],
    ],
    ids=["plain", "requires_grad", "parameter", "transposed", "strided", "scalar"],
)
def test_torch_tensors_are_taken_as_they_are(make, dtype):
    x = make(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(dtype))
    array = call_of("forward", "demo", x).request.query
    assert array.dtype == DTYPES[str(dtype).removeprefix("torch.")]
    np.testing.assert_array_equal(array.astype(np.float64), x.detach().double().numpy())


@pytest.mark.gpu
def test_torch_tensors_come_from_the_device():
    x = torch.randn(3, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    array = call_of("forward", "demo", x).request.query
    np.testing.assert_array_equal(array.astype(np.float32), x.detach().float().cpu().numpy())


def test_a_torch_tensor_that_numpy_cannot_hold_is_refused():
    with pytest.raises(InvalidTensor, match="float8"):
        call_of("forward", "demo", torch.ones(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(InvalidTensor, match="meta"):
        call_of("forward", "demo", torch.ones(2, 2, device="meta"))


def test_torch_masks_and_lengths_keep_their_meaning():
    request = call_of(
        "forward",
        "demo",
        torch.ones(2, 3, 4),
        mask=torch.ones(3, 3, dtype=torch.bool).tril(),
        key_lengths=torch.tensor([3, 2]),
    ).request
    assert (request.mask.dtype, request.key_lengths.dtype) == (np.bool_, np.int64)


def test_lists_of_tensors_and_arrays_are_stacked():
    rows = [np.ones(3, np.float32), torch.zeros(3)]
    np.testing.assert_array_equal(plain(rows), np.array([[1, 1, 1], [0, 0, 0]], np.float32))


def test_a_tensor_made_of_a_reply_can_be_written_into(kind, played):
    output = torch.from_numpy(ask(kind, played, "forward", "demo", np.ones((2, 2), np.float32)).output)
    output[0] += 1
    assert output[0, 0] == 2
