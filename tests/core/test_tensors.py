import gc

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_contract.tensors import DTYPES, Untyped
from attention_service.core.tensors import TORCH_DTYPES, side_by_side, to_numpy, to_torch, torch_dtype_name


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_the_wire_crosses_and_comes_back_without_a_copy(name):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(DTYPES[name])
    tensor = to_torch(array)
    assert tensor.dtype == TORCH_DTYPES[name]
    assert torch_dtype_name(tensor.dtype) == name
    assert tensor.tolist() == array.astype(float).tolist()
    assert tensor.data_ptr() == array.ctypes.data
    back = to_numpy(tensor)
    assert back.dtype == array.dtype
    assert np.shares_memory(back, array)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_read_only_memory_is_shared_silently(dtype):
    array = np.frombuffer(bytes(24), dtype)
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.ctypes.data
    del array
    gc.collect()
    assert tensor.float().tolist() == [0] * tensor.numel()


def test_what_torch_cannot_hold_is_copied():
    assert to_torch(np.arange(4.0)[::-1]).tolist() == [3, 2, 1, 0]
    assert to_torch(np.arange(3, dtype=">f4")).tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0)])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_scalars_and_empty_arrays_keep_their_shape(shape, name):
    tensor = to_torch(np.ones(shape, DTYPES[name]))
    assert tuple(tensor.shape) == shape
    assert to_numpy(tensor).shape == shape


def test_strides_subclasses_and_gradients_are_no_obstacle():
    array = np.arange(6.0).reshape(2, 3).T
    assert to_torch(array).stride() == (1, 3)
    assert type(to_torch(array.view(Untyped))) is torch.Tensor
    tensor = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    assert to_numpy(tensor.T).shape == (3, 2)


def test_parts_side_by_side_are_one_tensor_without_a_copy():
    whole = torch.randn(2, 6, 3)
    parts = whole.split([1, 2, 3], 1)
    found = side_by_side(parts, 1)
    assert found.equal(whole)
    assert found.data_ptr() == whole.data_ptr()
    assert side_by_side(parts[1:], 1).equal(whole[:, 1:])
    for others in (
        [parts[1], parts[0]],
        [parts[0], parts[2]],
        [parts[0], parts[1].clone()],
        [parts[0], whole[:, 1:3, :2]],
    ):
        assert side_by_side(others, 1) is None
    assert side_by_side([whole[:, :3], whole[:, 3:]], 0) is None
    assert side_by_side([whole.mT[:, :2], whole.mT[:, 2:]], 1).equal(whole.mT)
