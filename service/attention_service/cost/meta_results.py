"""Answers of operations on meta tensors, told from shapes and strides alone.

Many of PyTorch's own functions for that are written in Python, for symbolic shapes: they take a tenth of a millisecond
each, and a second and 45 MB to be loaded. Operations without a rule here are left to PyTorch, which answers some of
them in C++.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_service.cost.elementwise_results import (
    arithmetic,
    chosen,
    compared,
    divided,
    elementwise,
    filled,
    kept,
)
from attention_service.cost.lying import laid, rows

_aten = torch.ops.aten
Answer = Tensor | tuple[Tensor, ...] | float | None
Rule = Callable[..., Answer]
_BY_CHANNEL = (1, 3, 2, 0)
"""Dimensions from the fastest in memory, as PyTorch lays out images whose channels come last."""


def answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer:
    """Return the result of an operation on meta tensors; None if no rule exists."""
    rule = _RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func._schema.is_mutable:  # in place
        first: Tensor = args[0]
        return first
    return elementwise(*args, **kwargs) if torch.Tag.pointwise in func.tags else None


def _made_like(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor | None:
    if kwargs.get("memory_format", torch.preserve_format) not in {None, torch.preserve_format}:
        return None
    return _laid_as(x, x.shape, dtype or x.dtype)


def _laid_as(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Without gaps, its dimensions in the order of those of x."""
    return laid(shape, sorted(range(x.ndim), key=lambda dim: (x.stride(dim), -dim)), dtype)


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """The answer, and what is kept for the way back."""
    return _copied(x), _copied(x)


def _cloned(x: Tensor, *, memory_format: Any = None) -> Tensor | None:
    return _copied(x) if memory_format is torch.contiguous_format else _made_like(x, memory_format=memory_format)


def _drawn(shape: Sequence[int], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor | None:
    return None if dtype is None else rows(shape, dtype)


def _put(x: Tensor, indices: object, values: object, accumulate: bool = False) -> Tensor | None:
    """Added up, it is the way back of an index: in place, but where operations are looked at as they are here."""
    return x.view(x.shape) if accumulate else _made_like(x)


def _added_up(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Accumulate in place, as the backward pass of an index does."""
    return x.view(x.shape)


def _sorted(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """And the places."""
    return _copied(x), rows(x.shape, torch.int64)


def _one(x: Tensor) -> float:
    """A number that is read: any, but no zero."""
    return 1.0


def _set(x: Tensor) -> Tensor:
    """The places of what is set, which all may be."""
    return rows((x.numel(), x.ndim), torch.int64)


def _topmost(x: Tensor, count: int, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """And the places."""
    shape = [count if at == dim % x.ndim else size for at, size in enumerate(x.shape)]
    return rows(shape, x.dtype), rows(shape, torch.int64)


def _searched(bounds: Tensor, x: Tensor, **kwargs: Any) -> Tensor:
    return rows(x.shape, torch.int64)


def _looked_up(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Index one dimension, by an index or by flags that may all be set."""
    told = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(told) == 1 and told[0] == (0, indices[0]) and told[0][1].dtype == torch.bool:
        return rows((told[0][1].numel(), *x.shape[told[0][1].ndim :]), x.dtype)
    if len(told) != 1 or told[0][1].dtype != torch.int64:
        return None
    dim, index = told[0]
    return rows((*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]), x.dtype)


def _of_shape(x: Tensor, shape: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
    return rows(shape, x.dtype)


def _copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return rows(x.shape, x.dtype)


def _softmax_back(upstream: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return rows(y.shape, dtype)


def _counted(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    """Like it; of whole numbers and flags the widest."""
    return rows(x.shape, dtype or _sums_in(x))


def _reduced(x: Tensor, dims: Any = (), keepdim: Any = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Over some dimensions, or over all."""
    listed = dims if isinstance(dims, Collection) else () if dims is None else (dims,)
    gone = {dim % x.ndim for dim in listed if x.ndim} or set(range(x.ndim))
    shape = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return rows(shape, dtype or x.dtype)


def _summed(x: Tensor, dims: Any = (), keepdim: Any = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return _reduced(x, dims, keepdim, dtype=dtype or _sums_in(x))


def _normed(x: Tensor, order: float, dims: Any = (), keepdim: Any = False, *, dtype: Any = None) -> Tensor:
    return _reduced(x, dims, keepdim, dtype=dtype)


def _told(x: Tensor, dims: Any = (), keepdim: Any = False) -> Tensor:
    """Reduce by all or any."""
    return _reduced(x, dims, keepdim, dtype=torch.bool)


def _put_together(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = parts[0]
    if any(x.dtype != first.dtype or x.ndim != first.ndim for x in parts):
        return None
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    by_channel = all(map(_channels_last, parts))
    return laid(shape, _BY_CHANNEL, first.dtype) if by_channel else rows(shape, first.dtype)


def _channels_last(x: Tensor) -> bool:
    """Return True if strides suggest to PyTorch that dimension 1 comes last in memory, as of heads that are 1 wide."""
    if x.ndim != len(_BY_CHANNEL) or not x.numel() or not x.stride(1):
        return False
    least = 0
    for dim in _BY_CHANNEL:
        if x.stride(dim) < least or (not dim and least == x.stride(1)):
            return False
        least = x.stride(dim) * max(x.shape[dim], 1)
    return True


def _stacked(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = [*parts[0].shape]
    shape.insert(dim % (len(shape) + 1), len(parts))
    return rows(shape, parts[0].dtype)


def _gathered(x: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Tensor:
    return rows(index.shape, x.dtype)


def _among(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return rows(x.shape, torch.bool)


def _unit(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return rows((n, n if m is None else m), dtype or torch.get_default_dtype())


def _sums_in(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.int64


def _multiplied(a: Tensor, b: Tensor) -> Tensor:
    return rows((*a.shape[:-1], b.shape[-1]), a.dtype)


def _projected(_: Tensor, a: Tensor, b: Tensor, **kwargs: object) -> Tensor:
    return _multiplied(a, b)


def _numbers(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor | None:
    if any(type(x) is not int for x in args):
        return None
    return rows((len(range(*args)),), dtype or torch.int64)


def _attended(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Answer:
    """The context, and a number for each query."""
    batch, heads, queries, _ = q.shape
    sums = rows((batch, queries, heads), torch.promote_types(q.dtype, torch.float32))
    return _laid_as(q, (*q.shape[:3], v.shape[3]), q.dtype), sums.transpose(1, 2)


def _attended_back(upstream: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values."""
    return tuple(rows(x.transpose(1, 2).shape, x.dtype).transpose(1, 2) for x in args[:3])


def _each(rule: Rule, *names: str) -> dict[Any, Rule]:
    """For every form of these operations that makes its answer."""
    packets = [getattr(_aten, name) for name in names]
    return {getattr(packet, form): rule for packet in packets for form in packet.overloads() if "out" not in form}


_RULES: dict[Any, Rule] = {
    _aten.clone.default: _cloned,
    _aten.sort.stable: _sorted,
    _aten.sort.default: _sorted,
    _aten.topk.default: _topmost,
    _aten.nonzero.default: _set,
    _aten._local_scalar_dense.default: _one,
    _aten.searchsorted.Tensor: _searched,
    _aten.index.Tensor: _looked_up,
    _aten.where.self: chosen,
    _aten.masked_fill.Scalar: filled,
    _aten.cat.default: _put_together,
    _aten.stack.default: _stacked,
    _aten.mm.default: _multiplied,
    _aten.bmm.default: _multiplied,
    _aten.addmm.default: _projected,
    _aten.gather.default: _gathered,
    _aten.index_put.default: _put,
    _aten.index_add.default: _added_up,
    _aten.isin.Tensor_Tensor: _among,
    _aten.eye.default: _unit,
    _aten.slice_backward.default: _of_shape,
    _aten.select_backward.default: _of_shape,
    _aten._softmax_backward_data.default: _softmax_back,
    _aten.log_sigmoid_forward.default: _twice,
    _aten.linalg_vector_norm.default: _normed,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attended_back,
    **_each(arithmetic, "add", "sub", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"),
    **_each(arithmetic, "__rshift__", "floor_divide", "remainder"),
    **_each(kept, "neg", "abs", "sign", "clamp", "bitwise_not", "elu_backward", "log_sigmoid_backward"),
    **_each(_copied, "_softmax", "_safe_softmax", "tril", "triu", "index_copy", "scatter_add"),
    **_each(divided, "div"),
    **_each(compared, "eq", "ne", "lt", "le", "gt", "ge"),
    **_each(_counted, "cumsum"),
    **_each(_summed, "sum"),
    **_each(_reduced, "mean", "amax", "logsumexp"),
    **_each(_told, "all", "any"),
    **_each(_numbers, "arange"),
    **_each(_drawn, "randn"),
    **_each(_made_like, "empty_like", "zeros_like", "ones_like", "full_like", "flip", "index_fill"),
}
"""Rules by operation. Elementwise operations in one dtype and in-place operations have none."""
