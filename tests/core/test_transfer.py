"""Tensors brought to a device and back: the same numbers, in the dtype that is asked for."""

import pytest
import torch

from attention_service.core.tensors import PIECE, to_device, to_host, to_numpy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(), (0, 3), (2, 3), (3, PIECE // 8 + 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_there_and_back(dtype, shape, device):
    x = torch.randint(-9, 9, shape).to(dtype)
    there = to_device(x, torch.device(device))
    assert (there.device.type, there.dtype, there.shape) == (device, dtype, x.shape)
    assert torch.equal(to_host(there), x)
    if dtype.is_floating_point:
        for other in (torch.float64, torch.float16):
            assert torch.equal(to_host(to_device(x, torch.device(device), other)), x.to(other))


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_lie_row_by_row(device):
    x = torch.randn(5, 4, 3).transpose(0, 2)
    there = to_device(x, torch.device(device))
    assert torch.equal(to_host(there), x)
    assert (to_numpy(there.transpose(0, 1)) == x.transpose(0, 1).numpy()).all()


def test_on_the_host_nothing_is_copied():
    x = torch.randn(3)
    assert to_device(x, torch.device("cpu")) is x
    assert to_host(x) is x
