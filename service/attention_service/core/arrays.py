"""Conversion between numpy and torch, without a copy if the memory can be shared.

numpy has no bfloat16 of its own: on its side it is that of ml_dtypes, and crosses over as the int16 of the same bits.
"""

from typing import Any, Final

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_service.core.transfer import to_host

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""The dtypes of the wire, by name."""

_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_USUAL: Final = (np.dtype(np.float32), np.dtype(np.float64))


def torch_dtype_name(dtype: torch.dtype) -> str:
    """Return the wire's name of a torch dtype. Raises KeyError for a dtype without one."""
    return _NAMES[dtype]


def to_torch(array: NDArray[Any]) -> Tensor:
    """The array as a tensor on the host, of the same shape and dtype.

    The memory is shared, also that of a read-only array: write to the tensor only if the array is writable. A
    byte order that is not the machine's and a negative stride cost a copy.
    """
    if type(array) is np.ndarray and array.dtype in _USUAL and array.flags.carray:  # as most are
        return torch.from_numpy(array)
    plain = np.asarray(array)  # a subclass may not be passed on
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    if any(stride < 0 for stride in plain.strides):
        plain = plain.copy()
    if plain.dtype == _BFLOAT16:
        return torch.from_numpy(_writable(plain.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(_writable(plain))


class _Claim:
    """Exposes an array's memory to numpy as writable; the new array keeps this object alive, and this the old array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself, or a view of its read-only memory about which torch does not warn.

    Filtering that warning instead would change the filters of every thread.
    """
    return array if array.flags.writeable else np.asarray(_Claim(array))


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array, of the same shape and dtype; shares the memory of a tensor that is on the host."""
    host = tensor if tensor.device.type == "cpu" else to_host(tensor)
    if host.requires_grad:
        host = host.detach()
    if host.dtype == torch.bfloat16:
        bits: NDArray[Any] = host.view(torch.int16).numpy()
        return bits.view(_BFLOAT16)
    plain: NDArray[Any] = host.numpy()
    return plain
