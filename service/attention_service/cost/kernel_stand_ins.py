"""Kernels on meta tensors: they make and keep what the real ones do, and take as much at a time as the largest tile."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, Kernel, Needs
from attention_service.core.kernels.blocked import Blocked
from attention_service.core.kernels.fused import Fused
from attention_service.core.kernels.one_width import same_width
from attention_service.core.scores import SCORES, Product
from attention_service.core.types import Problem
from attention_service.cost.fused_blocks_memory import block_backward_bytes, block_bytes
from attention_service.cost.fused_memory import fused_backward_workspace, fused_workspace, lse_of
from attention_service.cost.rehearsal import Account
from attention_service.cost.tile_stand_ins import LargestTiles
from attention_service.cost.tiles import by_fused, counted_as
from attention_service.cost.workload import Workload

_LAID_OUT_IN = 8
"""Elements of a half type by which a GPU takes its arguments."""
_ROLES = 3
"""Queries, keys and values; what comes next is the mask."""


def stand_in(work: Workload, kernel: str, account: Account) -> str | Kernel:
    """What holds as much as this kernel; the name of one that consists of plain operations."""
    kernel = counted_as(kernel)
    if kernel == "fused":
        return Fused("cpu" if work.threads else "cuda", partial(_call, work, account))
    return _Blocked(work, account) if kernel == "blocked" else kernel


@dataclass(frozen=True)
class _Way:
    """What a kernel makes and takes beside its arguments and its answer."""

    account: Account
    forward: int
    """Bytes that it works in."""
    backward: Callable[[Tensor], int]
    """The same on the way back, for a gradient of the context."""
    context: Callable[[Tensor, Tensor], Tensor]
    """For queries and values."""
    sums: torch.dtype
    """Of the logarithm of each query's sum."""
    total: Callable[[int, Tensor], Tensor]
    """In what the gradient of queries, keys or values, 0 to 2, is found."""


class _Kernel(Function):
    """The context ``[B, H, Q, V]`` of queries, keys, values and what else is given, as one step; and the sums."""

    @staticmethod
    def forward(ctx: Any, way: _Way, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
        context = way.context(q, v)
        sums = context.new_empty(context.shape[:3], dtype=way.sums)
        way.account.take(way.forward)
        ctx.way = way
        ctx.save_for_backward(q, k, v, *more, context, sums)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return context, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        way, given = ctx.way, ctx.saved_tensors[:-2]
        totals = [way.total(at, x) for at, x in enumerate(given[:_ROLES])]
        way.account.take(way.backward(gradient))
        found = [total.to(x.dtype) for total, x in zip(totals, given, strict=False)]
        return None, *found, *(None for _ in given[_ROLES:])


def _call(work: Workload, account: Account, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
    """In place of PyTorch's fused attention."""
    on_gpu, width = not work.threads, v.shape[-1]
    if mask is not None:
        if mask.requires_grad:  # PyTorch takes stages of its own
            return scaled_dot_product_attention(q, k, v, mask, **how)
        if on_gpu:  # laid out in blocks of 16
            mask = q.new_empty(2, *mask.shape)
        elif mask.dtype == torch.bool:
            mask = q.new_empty(mask.shape)  # as numbers that are added
    if on_gpu and work.itemsize == 2:
        q, k, v = (pad(x, (0, -x.shape[-1] % _LAID_OUT_IN)) if x.shape[-1] % _LAID_OUT_IN else x for x in (q, k, v))

    def context(q: Tensor, v: Tensor) -> Tensor:
        return q.new_empty((*q.shape[:3], v.shape[-1])) if on_gpu else torch.empty_like(q)

    def backward(gradient: Tensor) -> int:
        laid_out = 0 if on_gpu or _by_token(gradient) else gradient.nbytes
        return fused_backward_workspace(work) + laid_out

    def total(at: int, x: Tensor) -> Tensor:
        return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)

    way = _Way(
        account,
        forward=fused_workspace(work) - lse_of(work),
        backward=backward,
        context=context,
        sums=torch.promote_types(q.dtype, torch.float32),
        total=total,
    )
    found, _ = _Kernel.apply(way, q, k, v, mask)  # type: ignore[no-untyped-call]
    return found[..., :width]  # type: ignore[no-any-return]


class _Blocked:
    """In place of the blocked kernel."""

    def __init__(self, work: Workload, account: Account) -> None:
        self._work, self._account = work, account

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """The context, with q, k, v and the log-sum-exp, which are there anyway."""
        if not by_fused(self._work):
            return Blocked(LargestTiles(self._work)).attend(problem, taps, edits)
        context, sums = self._by_fused(problem)
        known = {"q": problem.q, "k": problem.k, "v": problem.v, "lse": sums}
        return {"context": context} | {tap: x for tap, x in known.items() if tap in taps}

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """As the real one, which is asked."""
        yield from KERNELS["blocked"].make().unsuitable(spec, dtype, needs)

    def _by_fused(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Blocks of PyTorch's fused kernel."""
        score = SCORES.of(problem.spec.score)
        if not isinstance(score, Product):
            raise ValueError(f"the fused kernel has no score {problem.spec.score.name}")
        q, k, _ = score.factors(problem.q, problem.k, problem.learned)
        q, k, v = same_width(q, k, problem.v)
        wide = torch.promote_types(q.dtype, torch.float32)

        def backward(gradient: Tensor) -> int:
            with _disable_current_modes():  # tiles are found by real numbers
                return block_backward_bytes(self._work, partial(_by_token_in_part, gradient))

        with _disable_current_modes():
            working = block_bytes(self._work)
        way = _Way(
            self._account,
            forward=working,
            backward=backward,
            context=lambda q, v: torch.empty_like(q),
            sums=wide,
            total=lambda at, x: torch.empty_like(x, dtype=wide if at else x.dtype),
        )
        context, sums = _Kernel.apply(way, q, k, v)  # type: ignore[no-untyped-call]
        return context[..., : problem.v.shape[-1]], sums


def _by_token(x: Tensor) -> bool:
    """Whether the heads of a token lie side by side."""
    return x.transpose(1, 2).is_contiguous()


def _by_token_in_part(x: Tensor, sequences: int, queries: int) -> bool:
    return _by_token(x[:sequences, :, :queries])
