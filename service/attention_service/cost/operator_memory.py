"""Workspace of CPU operators, beside their inputs and results."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attention_service.core.kernels.fused.call_memory import FusedCall

_aten = torch.ops.aten
_FUSED = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FUSED_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_PRODUCTS = {_aten.mm.default: 1, _aten.bmm.default: 1, _aten.addmm.default: 2}
"""And which argument is the second factor."""
_ROWS, _NARROW, _DEEP = 256, 96, 1024
"""From so many rows on the second factor is packed whole, of fewer only where it is as narrow as this or lies row by
row; of a factor with so many rows sums wait in float32."""
_MOST_PACKED = {True: 2**20 + 5 * 2**16, False: 2**20}
"""Bytes that a thread packs at a time, of what lies row by row and of what does not."""


def workspace_bytes(func: Any, args: Sequence[Any], out: Any, threads: int) -> int:
    """Bytes at the most while an operator runs on so many threads."""
    if func is _FUSED:
        return _call(args[0], args[1], threads).workspace()
    if func is _FUSED_BACKWARD:
        gradient, q, k = args[:3]
        laid_out = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
        return int(_call(q, k, threads).backward_workspace() + laid_out)
    if func in _PRODUCTS:
        second = args[_PRODUCTS[func]]
        return _packed(out, second, threads) if _packs(second.dtype) else 0
    rule = _RULES.get(func)
    return 0 if rule is None else rule(args, out)


def _call(q: Tensor, k: Tensor, threads: int) -> FusedCall:
    batch, heads, queries, width = q.shape
    half = q.dtype == torch.float16
    return FusedCall(batch, heads, k.shape[1], queries, k.shape[2], width, q.itemsize, half, threads)


def _converting(args: Sequence[Any], out: Tensor) -> int:
    """Copies of inputs in the dtype of the result."""
    others = (x for x in args if isinstance(x, Tensor) and x.ndim and x.dtype != out.dtype)
    return sum(x.numel() * out.itemsize for x in others)


def _adding_up(args: Sequence[Any], out: Tensor) -> int:
    """All numbers in the dtype of their sum."""
    return 0 if args[0].dtype == out.dtype else int(args[0].numel() * out.itemsize)


def _averaging(args: Sequence[Any], out: Tensor) -> int:
    """Half types, and their sum, in float32."""
    return int(4 * (args[0].numel() + out.numel())) if out.itemsize == 2 else 0


def _picking(args: Sequence[Any], out: Tensor) -> int:
    """A row-major copy of the source of an index."""
    return 0 if args[0].is_contiguous() else int(args[0].numel() * out.itemsize)


def _exponentials(args: Sequence[Any], out: Tensor) -> int:
    return int(args[0].nbytes)


def _flags(args: Sequence[Any], out: Tensor) -> int:
    """Flags of the scores that are −∞."""
    return int(args[0].numel())


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Return True if oneDNN computes products of this type, as for half types on processors that support them."""
    known: dict[torch.dtype, Any] = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in known and bool(known[dtype]())


def _packed(out: Tensor, second: Tensor, threads: int) -> int:
    """The second factor as the instructions want it, of as many threads as have rows; a bound, found by trying.

    Source: what oneDNN 3's products for AMX take, of 1 to 8,000 rows, 64 to 2,048 wide.
    """
    rows, columns, inner = out.shape[-2], out.shape[-1], second.shape[-2]
    if rows * columns * inner <= 16**3:  # too small for it
        return 0
    by_row = second.stride(-1) == 1 and rows > 1
    whole = 2 * _whole(inner) * _whole(columns) + 8192
    if rows < _ROWS and columns > _NARROW and not by_row:
        each = min(whole, (128 if rows == 1 else 64) * _whole(inner) + 200 * rows + 8192)
    else:
        each = min(whole, _MOST_PACKED[by_row] + 8192)
        threads = min(threads, -(-rows // _ROWS) * (out.numel() // max(rows * columns, 1)))
    waiting = 4 * rows * columns if inner > _DEEP and rows > _ROWS else 0
    return threads * each + waiting


def _whole(size: int) -> int:
    return -(-size // 32) * 32


_RULES: dict[Any, Callable[[Sequence[Any], Tensor], int]] = {
    **{getattr(_aten, name).Tensor: _converting for name in ("add", "add_", "sub", "mul", "div")},
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList), _adding_up),
    **dict.fromkeys((_aten.mean.default, _aten.mean.dim), _averaging),
    _aten.index_select.default: _picking,
    _aten.logsumexp.default: _exponentials,
    _aten._safe_softmax.default: _flags,
}
"""Rules by operator."""
