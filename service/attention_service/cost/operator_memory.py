"""Workspace of CPU operators, beside their inputs and results: an upper bound.

Source: PyTorch 2.13's flash kernel of the CPU, and products in half types that oneDNN 3 computes with AMX.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_FUSED_KEYS, _FUSED_ROWS, _FUSED_FEW = 512, (64, 256), 768
"""Keys and queries that the fused kernel takes at a time: the larger number from so many queries on."""
_PACKED = 2**20 + 5 * 2**16
"""Bytes of a second factor that a thread packs at a time."""


def workspace_bytes(func: Any, args: Sequence[Any], out: Any, threads: int) -> int:
    """Bytes at the most while an operator runs on so many threads."""
    rule = _RULES.get(func)
    return 0 if rule is None else int(rule(args, out, threads))


def _fused(args: Sequence[Any], out: Any, threads: int) -> int:
    """A tile of scores and outputs for each thread; in half types a second one, and packed keys and values."""
    q, k = args[:2]
    rows, keys, width = *_tile(q, k), q.shape[-1]
    thread_bytes = rows * (keys + width + 2) * max(q.itemsize, 4)
    if q.itemsize != 2:
        return int(threads * thread_bytes)
    thread_bytes += 2 * (rows + 1) * (keys + 1) + 2 * (rows + keys) * (width + 1)
    packed = 4 * k.shape[:2].numel() * (k.shape[2] + 1) * (width + 1) if _packs_keys(q, k, threads) else 0
    return int(threads * thread_bytes + packed)


def _packs_keys(q: Tensor, k: Tensor, threads: int) -> bool:
    """Return True if keys and values are packed: not for few queries or keys, in bfloat16 for few to each thread."""
    half, rows = q.dtype == torch.float16, _tile(q, k)[0]
    if not _has_amx() or min(q.shape[-2], k.shape[-2]) < (16 if half else 64):
        return False
    tasks = q.shape[:2].numel() * -(-q.shape[2] // rows)
    return half or -(-tasks // threads) * rows >= 4 * k.shape[:2].numel()


def _fused_backward(args: Sequence[Any], out: Any, threads: int) -> int:
    """A tile of scores and one of their gradients for each thread, and a contiguous copy of the gradient."""
    upstream, q, k = args[:3]
    rows, keys = _tile(q, k)
    thread_bytes = 2 * rows * keys * max(q.itemsize, 4)
    if q.itemsize == 2:
        thread_bytes += 4 * rows * keys + 640 * rows + 5248
    copied = 0 if upstream.transpose(1, 2).is_contiguous() else upstream.nbytes
    return int(threads * thread_bytes + copied)


def _tile(q: Tensor, k: Tensor) -> tuple[int, int]:
    queries = q.shape[-2]
    return min(_FUSED_ROWS[queries >= _FUSED_FEW], queries), min(_FUSED_KEYS, k.shape[-2])


def _product(second: Tensor, out: Tensor, threads: int) -> int:
    """Blocks of the second factor, packed by each thread; sums of many numbers wait in float32."""
    if not _packs(second.dtype):
        return 0
    rows, (inner, columns) = out.shape[-2], second.shape[-2:]
    thread_bytes = 2 * _padded(inner) * _padded(columns)
    if rows < 256 and columns > 96 and (rows == 1 or second.stride(-1) != 1):  # each thread packs some of the columns
        thread_bytes = min(thread_bytes, (128 if rows == 1 else 64) * _padded(inner) + 200 * rows)
    else:
        thread_bytes = min(thread_bytes, _PACKED)
        threads = min(threads, out.numel() // max(rows * columns, 1) * -(-rows // 256))
    waiting = 4 * rows * columns if inner > 1024 and rows > 256 else 0
    return threads * (thread_bytes + 8192) + waiting


def _converted(args: Sequence[Any], out: Tensor, threads: int) -> int:
    """Copies of inputs in the dtype of the result."""
    others = (x for x in args if isinstance(x, Tensor) and x.ndim and x.dtype != out.dtype)
    return sum(x.numel() * out.itemsize for x in others)


def _padded(size: int) -> int:
    return -(-size // 32) * 32


@cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Return True if oneDNN computes products of this type, as for half types on processors that support them."""
    known: dict[torch.dtype, Any] = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in known and bool(known[dtype]())


_RULES: dict[Any, Callable[[Sequence[Any], Any, int], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _fused,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _fused_backward,
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default), lambda args, out, threads: _product(args[1], out, threads)),
    _aten.addmm.default: lambda args, out, threads: _product(args[2], out, threads),
    **{getattr(_aten, name).Tensor: _converted for name in ("add", "add_", "sub", "mul", "div")},
    **dict.fromkeys((_aten.sum.default, _aten.sum.dim_IntList), _converted),
    # Half types and their sum, in float32.
    **dict.fromkeys(
        (_aten.mean.default, _aten.mean.dim),
        lambda args, out, _: 4 * (args[0].numel() + out.numel()) if out.itemsize == 2 else 0,
    ),
    _aten.index_select.default: lambda args, out, _: 0 if args[0].is_contiguous() else args[0].nbytes,
    _aten.logsumexp.default: lambda args, out, _: args[0].nbytes,
    _aten._safe_softmax.default: lambda args, out, _: args[0].numel(),  # flags of the scores that are −∞
}
"""Rules by operator: from its arguments, its result and the threads."""
