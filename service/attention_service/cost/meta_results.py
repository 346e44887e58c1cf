"""Answers of operations on meta tensors.

Three need an answer, since no real number is known: a number that is read, flags that pick rows, and places of flags.
Two add up in place where PyTorch's answer is a copy. The others save time: PyTorch's own functions are written in
Python for symbolic shapes, take five to ten times as long and load another second and 45 MB first. An operation
without a rule is left to PyTorch.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_service.cost import cuda_kernels

_aten = torch.ops.aten
Answer = Tensor | tuple[Any, ...] | float | None
Rule = Callable[..., Answer]


def answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Answer:
    """Return the result of an operation on meta tensors; None if no rule exists."""
    rule = _RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if func._schema.is_mutable:  # in place
        first: Tensor = args[0]
        return first
    return _elementwise(*args) if torch.Tag.pointwise in func.tags else None


def _contiguous(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _columns(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return matrices as LAPACK stores them, column by column."""
    return _contiguous((*shape[:-2], shape[-1], shape[-2]), dtype).mT


def _like(x: Tensor, *args: object, dtype: torch.dtype | None = None, **kwargs: object) -> Tensor | None:
    """Return a tensor without gaps: contiguous if that is asked for, else its dimensions in the order of those of x."""
    layout = kwargs.get("memory_format")
    if x.is_contiguous() or layout is torch.contiguous_format:
        return _contiguous(x.shape, dtype or x.dtype)
    if layout not in {None, torch.preserve_format}:
        return None
    strides, step = [0] * x.ndim, 1
    for dim in sorted(range(x.ndim), key=lambda dim: (x.stride(dim), -dim)):
        strides[dim] = step
        step *= max(x.shape[dim], 1)
    return torch.empty_strided(x.shape, strides, dtype=dtype or x.dtype, device="meta")


def _broadcast(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return an elementwise result: contiguous, or in the order of the first tensor that is more than a number."""
    first = next((x for x in tensors if x.numel() > 1 and any(x.stride())), tensors[0])
    shape = _shape(tensors) if any(x.shape != first.shape for x in tensors) else first.shape
    if all(x.is_contiguous() or _in_order(x) for x in tensors):
        return _contiguous(shape, dtype)
    return _like(first, dtype=dtype) if first.shape == shape and 0 not in first.stride() else None


def _in_order(x: Tensor) -> bool:
    """Return True if each dimension comes before the faster ones in memory; one that is expanded may come anywhere."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if stride and size > 1]
    return all(one > other for one, other in pairwise(strides))


def _shape(tensors: Sequence[Tensor]) -> Sequence[int]:
    """Return the shape to which tensors are broadcast."""
    shape: Sequence[int] = np.broadcast_shapes(*(tuple(x.shape) for x in tensors))
    return shape


def _elementwise(*args: Any) -> Tensor | None:
    """Return the result of an operation on floating-point tensors of one dtype."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    dtype = tensors[0].dtype
    return _broadcast(tensors, dtype) if dtype.is_floating_point and all(x.dtype == dtype for x in tensors) else None


def _kept(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return a result in the dtype of the first tensor, whole numbers included."""
    return _broadcast([x for x in args if isinstance(x, Tensor)], args[0].dtype)


def _promoted(x: Any, y: Any, **kwargs: Any) -> Tensor | None:
    return _broadcast([operand for operand in (x, y) if isinstance(operand, Tensor)], torch.result_type(x, y))


def _divided(x: Any, y: Any, *, rounding_mode: str | None = None) -> Tensor | None:
    quotient = _promoted(x, y)
    return quotient if quotient is None or quotient.is_floating_point() or rounding_mode else None


def _flags(*args: Any) -> Tensor | None:
    return _broadcast([x for x in args if isinstance(x, Tensor)], torch.bool)


def _chosen(condition: Tensor, x: Tensor, y: Tensor) -> Tensor | None:
    return _broadcast([condition, x, y], torch.result_type(x, y))


def _filled(x: Tensor, mask: Tensor, value: object) -> Tensor:
    return _contiguous(_shape([x, mask]), x.dtype)


def _copied(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _contiguous(x.shape, x.dtype)


def _softmax_back(upstream: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return _contiguous(y.shape, dtype)


def _of_shape(x: Tensor, shape: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
    return _contiguous(shape, x.dtype)


def _reduced(x: Tensor, dims: Any = (), keepdim: Any = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Reduce over some dimensions, or over all."""
    listed = dims if isinstance(dims, Collection) else () if dims is None else (dims,)
    gone = {dim % x.ndim for dim in listed if x.ndim} or set(range(x.ndim))
    shape = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return _contiguous(shape, dtype or x.dtype)


def _summed(x: Tensor, dims: Any = (), keepdim: Any = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return _reduced(x, dims, keepdim, dtype=dtype or _sums_in(x))


def _truth(x: Tensor, dims: Any = (), keepdim: Any = False) -> Tensor:
    """Reduce by all or any."""
    return _reduced(x, dims, keepdim, dtype=torch.bool)


def _cumulated(x: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    return _contiguous(x.shape, dtype or _sums_in(x))


def _sums_in(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.int64


def _product(*args: Tensor, **kwargs: Any) -> Tensor:
    """Return the product of the last two arguments."""
    a, b = args[-2:]
    return _contiguous((*a.shape[:-1], b.shape[-1]), a.dtype)


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = parts[0]
    if any(x.dtype != first.dtype or x.ndim != first.ndim for x in parts):
        return None
    if all(_is_image(x) for x in parts):
        return None
    shape = list(first.shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    return _contiguous(shape, first.dtype)


def _is_image(x: Tensor) -> bool:
    """Return True if PyTorch may take x for an image with its channels last, and make others alike."""
    return x.ndim == 4 and x.numel() > 0 and 0 < x.stride(1) <= x.stride(3)


def _numbers(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor | None:
    if any(type(x) is not int for x in args):
        return None
    return _contiguous((len(range(*args)),), dtype or torch.int64)


def _drawn(shape: Sequence[int], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor | None:
    return None if dtype is None else _contiguous(shape, dtype)


def _picked(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Pick along one dimension by places, or rows by flags, all of which may be set."""
    chosen = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(chosen) != 1:
        return None
    dim, index = chosen[0]
    if index.dtype == torch.int64:
        return _contiguous((*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]), x.dtype)
    if index.dtype != torch.bool or dim:
        return None
    return _contiguous((index.numel(), *x.shape[index.ndim :]), x.dtype)


def _each(rule: Rule, *names: str) -> dict[Any, Rule]:
    """For every form of these operations that makes its answer."""
    packets = [getattr(_aten, name) for name in names]
    return {getattr(packet, form): rule for packet in packets for form in packet.overloads() if "out" not in form}


def _twice(x: Tensor) -> tuple[Tensor, Tensor]:
    """The answer, and what is kept for the way back."""
    return _copied(x), _copied(x)


def _normed(x: Tensor, order: float, dims: Any = (), keepdim: Any = False, *, dtype: Any = None) -> Tensor:
    return _reduced(x, dims, keepdim, dtype=dtype)


def _unit(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **kwargs: object) -> Tensor:
    return _contiguous((n, n if m is None else m), dtype or torch.get_default_dtype())


def _sorted(x: Tensor, *args: object, **kwargs: object) -> Answer:
    """In order, and the places."""
    ordered, places = _like(x), _like(x, dtype=torch.int64)
    return None if ordered is None or places is None else (ordered, places)


def _topmost(x: Tensor, count: int, dim: int = -1, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
    """The largest, and their places."""
    shape = list(x.shape)
    shape[dim] = count
    return _contiguous(shape, x.dtype), _contiguous(shape, torch.int64)


def _searched(bounds: Tensor, x: Tensor, **kwargs: object) -> Tensor:
    return _contiguous(x.shape, torch.int64)


def _among(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return _contiguous(x.shape, torch.bool)


def _stacked(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape.insert(dim % (len(shape) + 1), len(parts))
    return _contiguous(shape, parts[0].dtype)


def _put(x: Tensor, indices: object, values: object, accumulate: bool = False) -> Tensor | None:
    """The way back of an index adds up in place, except where operations are looked at as they are here."""
    return x.view(x.shape) if accumulate else _like(x)


def _gathered(x: Tensor, dim: int, index: Tensor, **kwargs: object) -> Tensor:
    return _contiguous(index.shape, x.dtype)


def _added_up(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Accumulate in place, as the way back of an index does."""
    return x.view(x.shape)


def _diagonals(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor | None:
    """Matrices with the last dimension of x on their diagonals."""
    if (offset, dim1, dim2) != (0, -2, -1):
        return None
    return _contiguous((*x.shape, x.shape[-1]), x.dtype)


def _extremes(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The least and the largest."""
    dims = () if dim is None else (dim,)
    return _reduced(x, dims, keepdim), _reduced(x, dims, keepdim)


def _pooled(x: Tensor, window: Sequence[int], step: Sequence[int], *more: object) -> tuple[Tensor, Tensor] | None:
    """The largest of windows beside each other, one at the end cut short if it must be, and their places."""
    if list(window) != list(step) or more != ([0, 0], [1, 1], True):
        return None
    shape = *x.shape[:-2], *(-(-size // window_size) for size, window_size in zip(x.shape[-2:], window, strict=True))
    return _contiguous(shape, x.dtype), _contiguous(shape, torch.int64)


def _factored(x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor] | None:
    """Q and R."""
    *batch, rows, columns = x.shape
    least = min(rows, columns)
    if mode != "reduced":
        return None
    return _columns((*batch, rows, least), x.dtype), _columns((*batch, least, columns), x.dtype)


def _solved(triangle: Tensor, right: Tensor, **kwargs: object) -> Tensor | None:
    return _columns(right.shape, right.dtype) if triangle.shape[:-2] == right.shape[:-2] else None


def _attended(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Answer:
    """The context, and a number for each query."""
    batch, heads, queries, _ = q.shape
    context = _like(q)
    sums = _contiguous((batch, queries, heads), torch.promote_types(q.dtype, torch.float32)).transpose(1, 2)
    return None if context is None else (context, sums)


def _attended_back(upstream: Tensor, *args: Any, **kwargs: object) -> Answer:
    """The gradients of queries, keys and values."""
    return tuple(_contiguous(x.transpose(1, 2).shape, x.dtype).transpose(1, 2) for x in args[:3])


def _on_gpu(name: str) -> Rule:
    return lambda *args, **options: cuda_kernels.results(name, args)


_RULES: dict[Any, Rule] = {
    **{getattr(_aten, name).default: _on_gpu(name) for name in cuda_kernels.KERNELS},
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attended_back,
    _aten.index_put.default: _put,
    _aten.index_add.default: _added_up,
    _aten.gather.default: _gathered,
    _aten._local_scalar_dense.default: lambda x: 1.0,  # any number but zero
    _aten.nonzero.default: lambda x: _contiguous((x.numel(), x.ndim), torch.int64),  # all may be set
    _aten.index.Tensor: _picked,
    _aten.searchsorted.Tensor: _searched,
    _aten.isin.Tensor_Tensor: _among,
    _aten.topk.default: _topmost,
    _aten.stack.default: _stacked,
    _aten.eye.default: _unit,
    _aten.diag_embed.default: _diagonals,
    _aten.aminmax.default: _extremes,
    _aten.max_pool2d_with_indices.default: _pooled,
    _aten.linalg_qr.default: _factored,
    _aten.linalg_solve_triangular.default: _solved,
    _aten.log_sigmoid_forward.default: _twice,
    _aten.linalg_vector_norm.default: _normed,
    _aten.where.self: _chosen,
    _aten.masked_fill.Scalar: _filled,
    _aten.cat.default: _joined,
    _aten.slice_backward.default: _of_shape,
    _aten.select_backward.default: _of_shape,
    _aten._softmax_backward_data.default: _softmax_back,
    **_each(_promoted, "add", "sub", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"),
    **_each(_promoted, "__rshift__", "floor_divide", "remainder"),
    **_each(_kept, "neg", "abs", "sign", "clamp", "bitwise_not", "elu_backward", "log_sigmoid_backward"),
    **_each(_divided, "div"),
    **_each(_flags, "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
    **_each(_copied, "_softmax", "_safe_softmax", "tril", "triu", "index_copy", "scatter_add"),
    **_each(_sorted, "sort"),
    **_each(_cumulated, "cumsum"),
    **_each(_summed, "sum"),
    **_each(_reduced, "mean", "amax", "amin", "logsumexp"),
    **_each(_truth, "all", "any"),
    **_each(_product, "mm", "bmm", "addmm"),
    **_each(_numbers, "arange"),
    **_each(_drawn, "randn"),
    **_each(_like, "empty_like", "zeros_like", "ones_like", "full_like", "flip", "clone", "index_fill"),
}
"""Rules by operation. Elementwise operations in one dtype and in-place operations have none."""
