"""Modes under which tensors on cuda:0 are fake and those of the host are real.

Operations of the host run as they are. Those of the device run on shapes alone and are counted; what comes back to the
host is one number everywhere.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_service.cost.cuda_kernels import results
from tests.fake_cuda.attention_kernels import refuse
from tests.fake_cuda.counting import Counts, name_of

_READ_BY_HOST = {"_local_scalar_dense", "is_nonzero", "item"}
_SHOWN_WHOLE = {"linear", "matmul", "to"}
"""Operations that inference mode does not take apart."""
_LAUNCH_NOTHING = {
    "_unsafe_view", "alias", "detach", "device", "empty", "empty_like", "empty_strided", "expand", "lift_fresh",
    "new_empty", "new_empty_strided", "resize_", "set_",
}  # fmt: skip


class DeviceSide(TorchDispatchMode):
    """Runs what concerns cuda:0 on shapes alone, and counts it."""

    def __init__(self, counts: Counts, fake: FakeTensorMode, scalar: float) -> None:
        super().__init__()
        self.counts, self.fake, self.scalar = counts, fake, scalar

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _SHOWN_WHOLE:
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = kwargs.get("device")
        if not any(x.is_cuda for x in tensors) and (device is None or torch.device(device).type != "cuda"):
            return _on_host(func, args, kwargs)
        if name in _READ_BY_HOST:
            self.counts.wait("reads a number")
            return self._number(args[0].dtype)
        if name == "copy_" and {x.device.type for x in args[:2]} == {"cpu", "cuda"}:
            return self._copied(*args, **kwargs)
        if name == "_to_copy" and device is not None and torch.device(device).type != tensors[0].device.type:
            return self._moved(func, args, kwargs)
        refuse(name, args, kwargs)
        with self.fake:  # PyTorch's own shapes of that one expect other arguments than the operation has
            found = results(name, args) if name == "_efficient_attention_backward" else func(*args, **kwargs)
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.counts.hold(made, tensors)
        if not (_is_view(func) or name in _LAUNCH_NOTHING):
            self.counts.launch(name, tensors, made)
        return found

    def _number(self, dtype: torch.dtype) -> float | int:
        if dtype == torch.bool:
            return bool(self.scalar)
        return self.scalar if dtype.is_floating_point else int(math.isfinite(self.scalar) and self.scalar)

    def _copied(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        host = source if into.is_cuda else into
        self.counts.copy(source, into, blocking=not (non_blocking and _is_pinned(host)))
        return into if into.is_cuda else into.fill_(self._number(into.dtype))

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A copy on the other device, in another dtype where it is asked for, which the device converts."""
        source, there = args[0], torch.device(kwargs["device"])
        dtype = kwargs.get("dtype") or source.dtype
        pinned = kwargs.get("pin_memory") or _is_pinned(source)
        blocking = not (kwargs.get("non_blocking") and pinned)
        if there.type == "cuda":
            with self.fake:
                found = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=there)
        else:
            found = torch.full(source.shape, self._number(dtype), dtype=dtype)
        if dtype != source.dtype:
            self.counts.launches["_to_copy"] += 1
        self.counts.copy(source, found, blocking=blocking)
        self.counts.hold([found])
        return found


class HostSide(TorchFunctionMode):
    """What reaches the device without an operation: constructors in C++, and addresses; and what should not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call one function."""
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])  # as C++ does, unseen by modes
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].element_size()
        if func is scaled_dot_product_attention and args[0].is_cuda:
            raise AssertionError("it chooses by flags of the whole process, and may hold all scores in memory")
        return func(*args, **kwargs)


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation of the host; memory that is asked for as pinned is marked, as there is no driver to pin it."""
    if not kwargs.get("pin_memory"):
        return func(*args, **kwargs)
    found = func(*args, **kwargs | {"pin_memory": False})
    found.untyped_storage().is_pinned_here = True
    return found


def _is_pinned(host: Tensor) -> bool:
    return getattr(host.untyped_storage(), "is_pinned_here", False)


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.arguments)
