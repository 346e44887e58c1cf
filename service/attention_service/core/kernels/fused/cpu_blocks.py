"""PyTorch's fused kernel of the CPU over each block of queries and the keys that the masks of positions leave it.

One operation does what the stages do in steps: products, exponentials and sums of a few hundred pairs at a time, in the
caches of the processor, forward and backward.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention_contract.spec import AttentionSpec
from attention_service.core.blocks import some_of
from attention_service.core.kernels.base import Needs
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.fused import cpu_flash
from attention_service.core.kernels.fused.cpu_flash import Three, same_width
from attention_service.core.kernels.fused.kernel import Fused
from attention_service.core.kernels.query_blocks import Cut, QueryBlock, query_blocks
from attention_service.core.masks.bands import Band
from attention_service.core.masks.combinations import AllOf
from attention_service.core.masks.key_spans import add_to_spans, pick_spans
from attention_service.core.masks.pattern import Pattern
from attention_service.core.masks.rules import pattern_of
from attention_service.core.masks.visibility import visibility
from attention_service.core.normalizers import NORMALIZERS, Softmax
from attention_service.core.problem import Problem, Selection
from attention_service.core.scores import SCORES, Product
from attention_service.core.tensors import by_kv_head, one_for_each_query_head

CUT = Cut(rows=256, scores=2**21, shared=True)
"""From 192 queries on, the kernel takes 64 at a time, which two or four threads share evenly.

Of larger blocks, a window leaves each query a smaller share of the keys.
"""
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _takes_spec(spec: AttentionSpec, dtype: torch.dtype, queries: int, keys: int, past: int) -> bool:
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
    return _takes_spec(spec, problem.q.dtype, problem.q.shape[2], problem.keys, problem.past)


@lru_cache(maxsize=1024)
def takes_sizes(sizes: Extent) -> bool:
    """Return the same from the sizes of a problem."""
    if sizes.threads == 0 or sizes.mask_shape or sizes.padded or sizes.dropped:
        return False
    return _takes_spec(sizes.spec, _DTYPES[sizes.itemsize], sizes.queries, sizes.sequence_keys, sizes.past)


def _widest(pattern: Pattern) -> int:
    """The most keys of which a mask of one block holds; no limit where they are in a narrow band."""
    rows = CUT.scores // CUT.rows
    bands = [*_bands(pattern)]
    lows = [band.low for band in bands if band.low is not None]
    highs = [band.high for band in bands if band.high is not None]
    if lows and highs:
        beside = CUT.rows + 2 * CUT.cell
        return 2**62 if min(highs) - max(lows) + 1 + beside <= rows else rows
    return rows


def _bands(pattern: Pattern) -> Iterator[Band]:
    """Return the bands that contain all allowed pairs."""
    if isinstance(pattern, Band):
        yield pattern
    elif isinstance(pattern, AllOf):
        for part in pattern.of:
            yield from _bands(part)


def attend_in_blocks(problem: Problem, *, with_lse: bool, sizes: Extent | None = None) -> tuple[Tensor, Tensor | None]:
    """The context ``[B, H, Q, V]`` and, where it is asked for, the log-sum-exp ``[B, H, Q]``.

    sizes: those of a pass over meta tensors, in which a few blocks stand for all.
    """
    score, normalizer = SCORES.of(problem.spec.score), NORMALIZERS.of(problem.spec.normalizer)
    if not isinstance(score, Product) or not isinstance(normalizer, Softmax):
        raise ValueError("a plain softmax over dot products is computed in blocks; ask `takes` first")
    q, k, factor = score.factors(problem.q, problem.k, problem.learned)
    q, k, v = same_width(q, k, problem.v)
    nothing = q.new_empty(0)
    frame = replace(problem, q=nothing, k=nothing, v=nothing, learned={}, global_qkv=None)
    scale = factor / normalizer.options.temperature
    context, lse = _Blocks.apply(frame, sizes, scale, with_lse, q, k, v)  # type: ignore[no-untyped-call]
    return context[..., : problem.v.shape[-1]], lse if with_lse else None


class _Blocks(Function):
    """The context as wide as q, k and v, and the log-sum-exp, which is empty where nobody asks for it."""

    @staticmethod
    def forward(
        ctx: Any, frame: Problem, sizes: Extent | None, scale: float, with_lse: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        problem = replace(frame, q=q, k=k, v=v)
        exact, summed_in = any(ctx.needs_input_grad), torch.promote_types(q.dtype, torch.float32)
        context = torch.empty_like(q, dtype=summed_in if exact else q.dtype)
        sums = q.new_empty(q.shape[:3], dtype=summed_in)
        lse = torch.empty_like(sums) if with_lse else sums.new_empty(0)
        for block, mask in _blocks(problem, sizes):
            at = _rows(block)
            _attend(block, mask, scale, (context[at], sums[at], lse[at] if with_lse else None))
        ctx.frame, ctx.sizes, ctx.scale = frame, sizes, scale
        ctx.save_for_backward(q, k, v, context, sums)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return context.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        """Block by block again; keys are summed over the blocks that look at them, half types in float32."""
        if gradient is None:  # nothing was made of the context
            return (None,) * 7
        q, k, v, context, sums = ctx.saved_tensors
        of_q = torch.zeros_like(q)  # of queries that look nowhere, too
        of_k, of_v = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
        for block, mask in _blocks(replace(ctx.frame, q=q, k=k, v=v), ctx.sizes):
            if block.width:
                at, sequences = _rows(block), block.sequences
                its_own = gradient[at], context[at], sums[at]
                _differentiate(block, mask, ctx.scale, its_own, (of_q[at], of_k[sequences], of_v[sequences]))
        return None, None, None, None, of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _attend(block: QueryBlock, mask: Tensor | None, scale: float, into: tuple[Tensor, Tensor, Tensor | None]) -> None:
    """Put the context of a block, its sums and, if it is wanted, its log-sum-exp where they belong."""
    context, sums, lse = into
    if not block.width:
        context.zero_()
        sums.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    part = _part(block)
    context_and_sums = cpu_flash.attend(*part, mask, scale, causal=False, exact=context.dtype != part[0].dtype)
    context.copy_(context_and_sums[0])
    sums.copy_(context_and_sums[1])
    if lse is not None:
        lse.copy_(sums if mask is None else sums.masked_fill(_blind(mask), -torch.inf))


def _differentiate(block: QueryBlock, mask: Tensor | None, scale: float, kept: Three, into: Three) -> None:
    """Put the gradient of a block's queries where it belongs, and add those of its keys and values to the others'."""
    gradient, context, sums = kept
    of_q, of_k, of_v = into
    gradients = cpu_flash.differentiate(gradient, _part(block), context, sums, mask, scale, causal=False)
    of_q.copy_(gradients[0])
    for total, of_kind in zip((of_k, of_v), gradients[1:], strict=True):
        add_to_spans(total, 2, block.all_keys, by_kv_head(of_kind, total.shape[1]))


def _blocks(problem: Problem, sizes: Extent | None) -> Iterator[tuple[QueryBlock, Tensor | None]]:
    """Every block with its mask, those that look at many keys in parts.

    The mask of the block before serves again where bands moved on with the queries.
    """
    moving = problem.sequence_masks is None and all(
        isinstance(part, Band) for part in pattern_of(problem.spec.masks, 1, 1).parts()
    )
    before, mask = None, None
    for block in query_blocks(problem, CUT, sizes):
        rows = max(1, CUT.scores // max(1, block.width))
        parts = [block.queries[at : at + rows] for at in range(0, len(block.queries), rows)]
        for queries in some_of(problem.q, parts):
            part = replace(block, queries=queries)
            spans = tuple((span.start - queries.start, len(span), span.masked) for span in block.keys)
            if not moving or before != (before := (block.first, len(queries), spans)):
                mask = _mask(part)
            yield part, mask


def _rows(block: QueryBlock) -> tuple[slice, slice, slice]:
    return block.sequences, slice(None), slice(block.queries.start, block.queries.stop)


def _part(block: QueryBlock) -> Three:
    """The queries of a block, and a head of its keys and values for each of theirs."""
    problem = block.problem
    q = problem.q[:, :, block.queries.start : block.queries.stop]
    k, v = (pick_spans(x, 2, block.all_keys) for x in (problem.k, problem.v))
    if k.shape[1] != q.shape[1]:
        k, v = (one_for_each_query_head(x, q.shape[1]) for x in (k, v))
    return q, k, v


def _mask(block: QueryBlock) -> Tensor | None:
    """Return the mask of a block, ``[1, 1, q, k]``, that is added to its scores: −∞ for forbidden pairs, else 0."""
    seen = visibility(block.problem, Selection(None, block.queries, block.keys)).allowed
    if seen is None:
        return None
    look = torch.zeros((), dtype=torch.promote_types(block.problem.q.dtype, torch.float32), device=seen.device)
    return torch.where(seen, look, -torch.inf)


def _blind(mask: Tensor) -> Tensor:
    """Bool ``[1, 1, q]``: queries that look nowhere."""
    return mask.amax(-1) == -torch.inf
