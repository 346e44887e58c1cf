"""Tensors of any library as numpy arrays, which the contract's models take."""

import sys
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, Final, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_contract.errors import InvalidTensor


class Exchanged(Protocol):
    """An array of any library that speaks DLPack."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        """Hand the memory over."""
        ...

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the kind and the number of the device."""
        ...


TensorLike: TypeAlias = ArrayLike | Exchanged
"""A numpy array, a torch tensor on any device, anything with ``__array__`` or ``__dlpack__``, or a nested list.

Arrays keep their dtype. A nested list takes the dtype of the module or of the request's other tensors.
"""


_CPU: Final = 1
"""DLPack's number of the host."""
SCALARS: Final = frozenset({bool, int, float, str, NoneType})
"""Types of values that stay as they are."""


def plain(value: Any) -> Any:
    """Convert everything array-like in a value to numpy arrays. Models and nested lists of numbers stay as they are.

    Raises InvalidTensor for a tensor that numpy cannot hold.
    """
    if type(value) in SCALARS:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if _is_array(value):
        return as_array(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return _plain_list(value) if isinstance(value, list | tuple) else value


def _plain_list(value: Sequence[Any]) -> Any:
    leaf = _first_leaf(value)
    if _is_array(leaf):
        try:
            return np.stack([np.asarray(plain(item)) for item in value])
        except ValueError as fault:
            raise InvalidTensor(f"a list of arrays cannot be stacked: {fault}") from None
    return value if isinstance(leaf, bool | int | float | str) else [plain(item) for item in value]


def as_array(value: Any) -> NDArray[Any]:
    """Return one array. A torch tensor is detached and moved to the host; its memory is shared if possible.

    Raises InvalidTensor for a tensor that numpy cannot hold, and for masked values, whose numbers mean nothing.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_meta:
            raise InvalidTensor("a torch tensor on the device meta has no numbers to send")
        value = value.detach().cpu().resolve_neg()
        if value.dtype == torch.bfloat16:
            return _numpy(value.view(torch.int16)).view(ml_dtypes.bfloat16)
        return _numpy(value)
    if not hasattr(value, "__array__") or not _on_host(value):
        return _exchanged(value)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise InvalidTensor(
            "a numpy array with masked values: fill them (.filled(0)) and send the mask in its own field"
        )
    return np.asarray(value)


def _on_host(value: Any) -> bool:
    """Return True if a value has no device, or the host as its device."""
    return not hasattr(value, "__dlpack_device__") or value.__dlpack_device__()[0] == _CPU


def _exchanged(value: Any) -> NDArray[Any]:
    """Read an array of another library by DLPack; one on a device is copied to the host first."""
    try:
        if _on_host(value):
            return np.from_dlpack(value)
        if hasattr(value, "get"):  # CuPy's copy to the host
            return np.asarray(value.get())
        if hasattr(value, "__array__"):  # JAX copies by itself
            return np.asarray(value)
        return np.from_dlpack(value, device="cpu", copy=True)
    except (BufferError, RuntimeError, TypeError, ValueError) as fault:
        raise InvalidTensor(
            f"a {type(value).__name__}: cannot be copied to the host as a numpy array: {fault}"
        ) from None


def _numpy(tensor: Any) -> NDArray[Any]:
    try:
        array: NDArray[Any] = tensor.numpy()
    except (TypeError, RuntimeError) as fault:
        raise InvalidTensor(f"a torch tensor of {tensor.dtype} and layout {tensor.layout}: {fault}") from None
    return array


def _is_array(value: Any) -> bool:
    return (hasattr(value, "__array__") or hasattr(value, "__dlpack__")) and not isinstance(value, np.generic)


def _first_leaf(value: Any) -> Any:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value
