"""PyTorch's fused kernel on meta tensors: it makes, keeps and works in what the real one does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from attention_service.core.extent import Extent
from attention_service.core.kernels.fused_call import FusedCall
from attention_service.core.kernels.sliced import exceeds_a_slice, largest_slice

Take = Callable[[int], None]
_LAID_OUT_IN = 8
"""Elements of a half type by which a GPU takes its arguments."""
_ROLES = 3
"""Queries, keys and values; after them comes the mask."""


@dataclass(frozen=True)
class Opaque:
    """One operation from queries, keys and values to the context, known by what it makes and takes."""

    take: Take
    forward: int
    """Bytes that it works in."""
    backward: Callable[[Tensor], int]
    """Bytes that its backward pass works in, for a gradient of the context."""
    context: Callable[[Tensor, Tensor], Tensor]
    """Makes the context of queries and values."""
    sums: torch.dtype
    """The dtype of each query's log-sum-exp."""
    total: Callable[[int, Tensor], Tensor]
    """Makes what the gradient of queries, keys or values, 0 to 2, is accumulated in."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The context ``[B, H, Q, V]`` and the log-sum-exp."""
        context, sums = _Step.apply(self, q, k, v, mask)  # type: ignore[no-untyped-call]
        return context, sums


class _Step(Function):
    @staticmethod
    def forward(ctx: Any, step: Opaque, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
        context = step.context(q, v)
        sums = context.new_empty(context.shape[:3], dtype=step.sums)
        step.take(step.forward)
        ctx.step = step
        ctx.save_for_backward(q, k, v, *more, context, sums)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return context, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        step, given = ctx.step, ctx.saved_tensors[:-2]
        totals = [step.total(at, x) for at, x in enumerate(given[:_ROLES])]
        step.take(step.backward(gradient))
        found = [total.to(x.dtype) for total, x in zip(totals, given, strict=False)]
        return None, *found, *(None for _ in given[_ROLES:])


def rehearsed_call(
    sizes: Extent, take: Take, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any
) -> Tensor:
    """Stand for ``scaled_dot_product_attention``, on meta tensors."""
    on_gpu, width = not sizes.threads, v.shape[-1]
    if mask is not None:
        if mask.requires_grad:  # PyTorch takes stages of its own
            return scaled_dot_product_attention(q, k, v, mask, **how)
        if on_gpu:  # laid out in blocks of 16
            mask = q.new_empty(2, *mask.shape)
        elif mask.dtype == torch.bool:
            mask = q.new_empty(mask.shape)  # as numbers that are added
    if on_gpu and sizes.itemsize == 2:
        q, k, v = (pad(x, (0, -x.shape[-1] % _LAID_OUT_IN)) if x.shape[-1] % _LAID_OUT_IN else x for x in (q, k, v))
    if not on_gpu and exceeds_a_slice(q, k):
        return _in_slices(sizes, take, q, k, v, mask)[..., :width]
    call = replace(FusedCall.of(sizes, q.shape[-1]), kv_heads=k.shape[1], queries=q.shape[2], keys=k.shape[2])

    def context(q: Tensor, v: Tensor) -> Tensor:
        return q.new_empty((*q.shape[:3], v.shape[-1])) if on_gpu else torch.empty_like(q)

    def backward(gradient: Tensor) -> int:
        laid_out = 0 if on_gpu or by_token(gradient) else gradient.nbytes
        return call.backward_workspace() + laid_out

    def total(at: int, x: Tensor) -> Tensor:
        return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)

    sums = torch.promote_types(q.dtype, torch.float32)
    found, _ = Opaque(take, call.workspace(), backward, context, sums, total)(q, k, v, mask)
    return found[..., :width]


def _in_slices(sizes: Extent, take: Take, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Stand for ``attend_in_slices``, one slice of which is worked in at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    of_q, of_k, rows = largest_slice(q, k)
    heads, kv_heads = of_q.stop - of_q.start, of_k.stop - of_k.start
    call = FusedCall(
        q.shape[0],
        heads,
        heads,
        rows.stop - rows.start,
        k.shape[2],
        q.shape[3],
        sizes.itemsize,
        sizes.half,
        sizes.threads,
    )
    keys = 2 * call.batch * heads * call.keys * call.width * call.itemsize
    paired = keys if heads > kv_heads > 1 else 0

    def backward(gradient: Tensor) -> int:
        copied = 0 if by_token(gradient[:, of_q, rows]) else call.context
        summed = keys // 2 * (heads > kv_heads) // max(heads // kv_heads, 1)
        return int(paired + call.context + keys + max(call.backward_workspace() + copied, summed))

    def total(at: int, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=wide if at else x.dtype)

    def context(q: Tensor, v: Tensor) -> Tensor:
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)

    forward = paired + call.context + call.lse + call.workspace()
    return Opaque(take, forward, backward, context, wide, total)(q, k, v, mask)[0]


def by_token(x: Tensor) -> bool:
    """Return True if the heads of a token lie side by side."""
    return x.transpose(1, 2).is_contiguous()
