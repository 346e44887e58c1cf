"""PyTorch's fused kernel of the CPU over each block of queries and the keys that the masks of positions leave it.

One operation does what ``ways.Streamed`` does in steps for each tile: products, exponentials and sums of a few hundred
pairs at a time, in the caches of the processor, forward and backward.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention_contract.spec import AttentionSpec
from attention_service.core.cancellation import checkpoint
from attention_service.core.kernels import tiling
from attention_service.core.kernels.base import Needs
from attention_service.core.kernels.fused import cpu_flash
from attention_service.core.kernels.fused.cpu_flash import Three
from attention_service.core.kernels.fused.kernel import Fused
from attention_service.core.kernels.fused.pad_to_same_width import same_width
from attention_service.core.kernels.tiles import Group, Through, gather, groups, scatter_add
from attention_service.core.kernels.tiling import Block
from attention_service.core.masks.bands import Band
from attention_service.core.masks.combinations import AllOf
from attention_service.core.masks.pattern import Pattern
from attention_service.core.masks.rules import pattern_of
from attention_service.core.normalizers import NORMALIZERS, Softmax
from attention_service.core.problem import Problem
from attention_service.core.scores import SCORES, Product
from attention_service.core.tensors import by_kv_head, one_for_each_query_head


def takes_spec(spec: AttentionSpec, dtype: torch.dtype, queries: int, keys: int, past: int) -> bool:
    """Return True if the fused kernel computes this spec and its masks leave each block of queries few enough keys.

    keys: without those that the spec adds, the past included.
    """
    if not spec.masks or keys > _widest(pattern_of(spec.masks, queries, keys, past)):
        return False
    return next(Fused().unsuitable(spec, dtype, Needs()), None) is None


def takes(problem: Problem) -> bool:
    """Return True on a CPU without a mask, padding or dropout of the request's own."""
    own = (problem.mask, problem.key_mask, problem.key_lengths, problem.dropout)
    on_cpu = problem.q.device.type == "cpu"
    if not on_cpu or any(x is not None for x in own):
        return False
    spec = problem.spec
    if problem.sequence_masks is not None:
        spec = spec.model_copy(update={"masks": problem.sequence_masks[0]})
    return takes_spec(spec, problem.q.dtype, problem.q.shape[2], problem.keys, problem.past)


def _widest(pattern: Pattern) -> int:
    """The most keys of which a mask of one block has room for all; no limit where they are in a narrow band."""
    room = tiling.WHOLE.scores // tiling.WHOLE.queries
    bands = [*_bands(pattern)]
    lows = [band.low for band in bands if band.low is not None]
    highs = [band.high for band in bands if band.high is not None]
    if lows and highs:
        beside = tiling.WHOLE.queries + 2 * tiling.WHOLE.cell
        return 2**62 if min(highs) - max(lows) + 1 + beside <= room else room
    return room


def _bands(pattern: Pattern) -> Iterator[Band]:
    """Return the bands that contain all allowed pairs."""
    if isinstance(pattern, Band):
        yield pattern
    elif isinstance(pattern, AllOf):
        for each in pattern.of:
            yield from _bands(each)


def attend_in_blocks(
    problem: Problem, *, with_lse: bool, through: Through | None = None
) -> tuple[Tensor, Tensor | None]:
    """The context ``[B, H, Q, V]`` and, where it is asked for, the log-sum-exp ``[B, H, Q]``.

    through: the blocks to go through; None for all there are.
    """
    score, normalizer = SCORES.of(problem.spec.score), NORMALIZERS.of(problem.spec.normalizer)
    if not isinstance(score, Product) or not isinstance(normalizer, Softmax):
        raise ValueError("a plain softmax over dot products is computed in blocks; ask `takes` first")
    q, k, factor = score.factors(problem.q, problem.k, problem.learned)
    q, k, v = same_width(q, k, problem.v)
    nothing = q.new_empty(0)
    frame = replace(problem, q=nothing, k=nothing, v=nothing, learned={}, global_qkv=None)
    scale = factor / normalizer.options.temperature
    context, lse = _Blocks.apply(frame, through or every_block, scale, with_lse, q, k, v)  # type: ignore[no-untyped-call]
    return context[..., : problem.v.shape[-1]], lse if with_lse else None


class _Blocks(Function):
    """The context as wide as q, k and v, and the log-sum-exp, which is empty where nobody asks for it."""

    @staticmethod
    def forward(
        ctx: Any, frame: Problem, through: Through, scale: float, with_lse: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        problem = replace(frame, q=q, k=k, v=v)
        exact, summed_in = any(ctx.needs_input_grad), torch.promote_types(q.dtype, torch.float32)
        context = torch.empty_like(q, dtype=summed_in if exact else q.dtype)
        sums = q.new_empty(q.shape[:3], dtype=summed_in)
        told = torch.empty_like(sums) if with_lse else sums.new_empty(0)
        for group, block in through(problem, whole_rows=True):
            at = _rows(group, block)
            _attend(group, block, scale, (context[at], sums[at], told[at] if with_lse else None))
        ctx.frame, ctx.through, ctx.scale = frame, through, scale
        ctx.save_for_backward(q, k, v, context, sums)
        ctx.mark_non_differentiable(told)
        ctx.set_materialize_grads(False)
        return context.to(q.dtype), told

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Block by block again; keys are summed over the blocks that look at them, half types in float32."""
        if gradient is None:  # nothing was made of the context
            return (None,) * 7
        q, k, v, context, sums = ctx.saved_tensors
        of_q = torch.zeros_like(q)  # of queries that look nowhere, too
        of_k, of_v = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
        problem = replace(ctx.frame, q=q, k=k, v=v)
        _differentiate_all(problem, ctx.through, ctx.scale, (gradient, context, sums), (of_q, of_k, of_v))
        return None, None, None, None, of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _attend(group: Group, block: Block, scale: float, into: tuple[Tensor, Tensor, Tensor | None]) -> None:
    """Put the context of a block, its sums and, where it is told, its log-sum-exp where they belong."""
    context, sums, told = into
    if not block.strips:
        context.zero_()
        sums.zero_()
        if told is not None:
            told.fill_(-torch.inf)
        return
    part, mask = _part(group, block), _mask(group, block)
    found = cpu_flash.attend(*part, mask, scale, causal=False, exact=context.dtype != part[0].dtype)
    context.copy_(found[0])
    sums.copy_(found[1])
    if told is not None:
        told.copy_(sums if mask is None else sums.masked_fill(_blind(mask), -torch.inf))


def _differentiate_all(problem: Problem, through: Through, scale: float, kept: Three, into: Three) -> None:
    """Block by block; what is remembered of masks is gone afterwards."""
    of_q, of_k, of_v = into
    for group, block in through(problem, whole_rows=True):
        if block.strips:
            at, sequences = _rows(group, block), group.sequences
            its_own = kept[0][at], kept[1][at], kept[2][at]
            _differentiate(group, block, scale, its_own, (of_q[at], of_k[sequences], of_v[sequences]))


def _differentiate(group: Group, block: Block, scale: float, kept: Three, into: Three) -> None:
    """Put the gradient of a block's queries where it belongs, and add those of its keys and values to the others'."""
    gradient, context, sums = kept
    of_q, of_k, of_v = into
    part, mask = _part(group, block), _mask(group, block)
    found = cpu_flash.differentiate(gradient, part, context, sums, mask, scale, causal=False)
    of_q.copy_(found[0])
    for total, each in zip((of_k, of_v), found[1:], strict=True):
        scatter_add(total, by_kv_head(each, total.shape[1]), block.strips[0])


def every_block(problem: Problem, *, whole_rows: bool) -> Iterator[tuple[Group, Block]]:
    """Every block of queries of every group of sequences."""
    cut = tiling.WHOLE.whole(problem.q.shape[2])
    for group in groups(problem, cut):
        for block in group.blocks(cut, whole_rows=whole_rows):
            checkpoint()
            yield group, block


def _rows(group: Group, block: Block) -> tuple[slice, slice, slice]:
    return group.sequences, slice(None), slice(block.start, block.stop)


def _part(group: Group, block: Block) -> Three:
    """The queries of a block, and a head of its keys and values for each of theirs."""
    (strip,) = block.strips
    q = group.problem.q
    k, v = (
        x if x.shape[1] == q.shape[1] else one_for_each_query_head(x, q.shape[1])
        for x in (gather(each, 2, strip) for each in (group.problem.k, group.problem.v))
    )
    return q[:, :, block.start : block.stop], k, v


def _mask(group: Group, block: Block) -> Tensor | None:
    """Return the mask of a block, ``[1, 1, q, k]``, that is added to its scores: −∞ for forbidden pairs, else 0."""
    (strip,) = block.strips
    if not any(piece.masked for piece in strip.pieces):
        return None
    return group.added(block, strip)


def _blind(mask: Tensor) -> Tensor:
    """Bool ``[1, 1, q]``: queries that look nowhere."""
    return mask.amax(-1) == -torch.inf
