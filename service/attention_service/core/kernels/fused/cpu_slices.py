"""PyTorch's flash kernel of the CPU in slices of heads and queries, so that a long call can be cancelled between them.

A causal slice is two calls: its queries over all keys before them, and over their own keys. The results are merged by
their log-sum-exp (Dao et al. 2022, section 3.1). The backward pass takes the same slices with the merged sums.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention_service.core.blocks import some_of
from attention_service.core.kernels.fused.cpu_flash import attend, differentiate
from attention_service.core.slices import cuts, slice_flops
from attention_service.core.tensors import by_kv_head

LEAST_ROWS = 128
"""Queries of a slice at least: the kernel is slow on fewer."""
Slice = tuple[slice, slice, slice]
"""Query heads, key/value heads and queries."""


def attend_in_slices(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool) -> Tensor:
    """The context ``[B, H, Q, D]``. All widths are equal; ``causal`` aligns at the top left and takes no mask."""
    context: Tensor = _Sliced.apply(q, k, v, mask, scale, causal)  # type: ignore[no-untyped-call]
    return context


class _Sliced(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        batch, heads_of_q, queries, width = q.shape
        exact, summed_in = any(ctx.needs_input_grad), torch.promote_types(q.dtype, torch.float32)
        kept_in = summed_in if exact else q.dtype
        context = q.new_empty(batch, queries, heads_of_q, width, dtype=kept_in).transpose(1, 2)  # merged without a copy
        sums = q.new_empty(q.shape[:3], dtype=summed_in)
        for heads, kv_heads, rows in _slices(q, k):
            q_part, k_part, v_part = q[:, heads, rows], k[:, kv_heads], v[:, kv_heads]
            for index, (keys, diagonal) in enumerate(_spans(rows, k.shape[2], causal=causal)):
                paired = _paired(q_part, k_part[:, :, keys], v_part[:, :, keys])
                context_part, total = attend(*paired, _narrow(mask, heads, rows), scale, causal=diagonal, exact=exact)
                at = context[:, heads, rows], sums[:, heads, rows]
                _put(at, context_part, total) if index == 0 else _merge(at, context_part, total)
                del paired, context_part, total  # before the next slice
        ctx.scale, ctx.causal = scale, causal
        ctx.save_for_backward(q, k, v, mask, context, sums)
        return context.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Slice by slice; summed over the slices, half types in float32."""
        q, k, v, mask, context, sums = ctx.saved_tensors
        of_q, of_k, of_v = (torch.zeros_like(x, dtype=context.dtype) for x in (q, k, v))
        for heads, kv_heads, rows in _slices(q, k):
            for keys, diagonal in _spans(rows, k.shape[2], causal=ctx.causal):
                paired = _paired(q[:, heads, rows], k[:, kv_heads, keys], v[:, kv_heads, keys])
                gradients = differentiate(
                    gradient[:, heads, rows], paired, context[:, heads, rows], sums[:, heads, rows],
                    _narrow(mask, heads, rows), ctx.scale, causal=diagonal,
                )  # fmt: skip
                of_q[:, heads, rows] += gradients[0]
                for total, part in ((of_k, gradients[1]), (of_v, gradients[2])):
                    total[:, kv_heads, keys] += by_kv_head(part, kv_heads.stop - kv_heads.start)
                del paired, gradients, total, part  # before the next slice
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None, None


def _slices(q: Tensor, k: Tensor) -> Iterator[Slice]:
    """Parts of the queries by head and row, each about one slice of work, with a checkpoint before each."""
    batch, heads, queries, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if not cuts(q):  # its operations are counted, and no one part stands for all under a causal mask
        yield slice(0, heads), slice(0, kv_heads), slice(0, queries)
        return
    row = 4.0 * batch * group * k.shape[2] * width  # FLOPs of one query of all heads that read one key/value head
    at_once = min(max(int(slice_flops() / (row * queries)), 1), kv_heads)
    rows = max(LEAST_ROWS, int(slice_flops() / row)) if at_once == 1 else queries
    for head, start in some_of(q, list(product(range(0, kv_heads, at_once), range(0, queries, rows)))):
        last = min(head + at_once, kv_heads)
        yield slice(head * group, last * group), slice(head, last), slice(start, min(start + rows, queries))


def _spans(rows: slice, keys: int, *, causal: bool) -> Iterator[tuple[slice, bool]]:
    """The keys that queries look at, and if they are on the diagonal, where query i sees the keys up to i."""
    if not causal:
        yield slice(0, keys), False
        return
    if rows.start and keys:
        yield slice(0, min(rows.start, keys)), False
    if rows.start < keys:
        yield slice(rows.start, min(rows.stop, keys)), True


def _paired(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and one head of keys and values for each of theirs."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return q, k, v
    k, v = (x.repeat_interleave(group, 1) if x.shape[1] > 1 else x.expand(-1, group, -1, -1) for x in (k, v))
    return q, k, v


def _narrow(mask: Tensor | None, heads: slice, rows: slice) -> Tensor | None:
    if mask is None:
        return None
    mask = mask.view((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask if mask.shape[1] == 1 else mask[:, heads]
    return mask if mask.shape[2] == 1 else mask[:, :, rows]


def _put(at: tuple[Tensor, Tensor], context: Tensor, sums: Tensor) -> None:
    at[0].copy_(context)
    at[1].copy_(sums)


def _merge(at: tuple[Tensor, Tensor], context: Tensor, sums: Tensor) -> None:
    """Add what the queries find at further keys: both weighted by their share of the whole sum."""
    total = torch.logaddexp(at[1], sums)
    for part, share in ((at[0], (at[1] - total).exp()), (context, (sums - total).exp())):
        part.mul_(share[..., None].to(part.dtype))
    at[0].add_(context)
    at[1].copy_(total)
