"""Attention by blocks of queries: exact, in memory that grows with the length alone, skipping what the masks forbid."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product as pairs_of
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention_contract.spec import AttentionSpec
from attention_service.core.blocks import some_of
from attention_service.core.dropout import dropped
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, Kernel, KernelWork, Needs
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.query_blocks import (
    Cut,
    QueryBlock,
    query_blocks,
    rehearsed_blocks,
    sequences_at_once,
)
from attention_service.core.masks.key_spans import add_to_spans
from attention_service.core.masks.visibility import without_padding
from attention_service.core.normalizers import has_lse
from attention_service.core.problem import Problem
from attention_service.core.pullback import pullback_where_used
from attention_service.core.stages import Parts, kept_weights, parts_of, stages
from attention_service.core.tensors import heads_read_by, pick, product, product_backward

CUT = Cut(rows=64, scores=2**20)
"""Larger tensors than 4 MB do not stay in the processor's caches."""
_LEAST_ROWS = 32
"""Queries of a part at least: products of fewer take twice as long for each pair."""


@KERNELS.register(
    "blocked",
    formula="softmax(cap(q·k · scale) + mask) · v, for 64 queries at a time and the keys that the masks leave them",
    gradient="each block computed again and differentiated; not twice differentiable",
    cost="O(n·w·d) time if the masks leave w adjacent keys a query, O(n·d) memory",
    source="Rabe & Staats 2021; Chen et al. 2016, section 4 (gradients by recomputation)",
)
@dataclass(frozen=True)
class Blocked(Kernel):
    """Skips keys that the spec's masks forbid, and never keeps the weights: takes every spec."""

    keeps = frozenset({"lse"})
    holds = "tiles"
    recomputes = True
    automatic = True

    sizes: Extent | None = None
    """The sizes of a pass over meta tensors, in which a few blocks stand for all; None for a real pass."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute the context, and return q, k, v and the log-sum-exp if they are asked for."""
        known = {"q": problem.q, "k": problem.k, "v": problem.v}
        by_fused = cpu_blocks.takes(problem) if self.sizes is None else cpu_blocks.takes_sizes(self.sizes)
        if by_fused:
            context, lse = cpu_blocks.attend_in_blocks(problem, with_lse="lse" in taps, sizes=self.sizes)
        else:
            with_lse = "lse" in taps and has_lse(problem.spec.normalizer)
            nothing, learned = problem.q.new_empty(0), problem.learned
            added = problem.mask if problem.mask is not None and problem.mask.is_floating_point() else None
            # What is differentiated goes beside the problem, so that autograd frees it.
            frame = replace(
                problem, q=nothing, k=nothing, v=nothing, mask=None if added is not None else problem.mask,
                learned={}, global_qkv=None, finite=True,
            )  # fmt: skip
            context, lse = _Blocked.apply(  # type: ignore[no-untyped-call]
                frame, self.sizes, with_lse, (*learned,), *known.values(), added, *learned.values()
            )
            lse = lse if with_lse else None
        known |= {} if lse is None else {"lse": lse}
        return {"context": context} | {tap: x for tap, x in known.items() if tap in taps}

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield what needs the weights."""
        if needs.edits:
            yield "edits need every tap in memory, which the blocked kernel does not keep"
        if needs.taps_gradient:
            yield "scores and weights are wanted in memory, where the blocked kernel has one block of them at a time"
        if needs.double_backward:
            yield "gradients of the blocked kernel cannot be differentiated again"

    def executed(self, sizes: Extent) -> KernelWork:
        """Count the pairs that the masks leave, in whole cells, and the parts that are started from Python."""
        fused, pairs, parts = cpu_blocks.takes_sizes(sizes), Fraction(0), Fraction(0)
        chosen = cpu_blocks.CUT if fused else CUT
        at_once = sequences_at_once(sizes, chosen)
        for _, queries, keys, times in rehearsed_blocks(sizes, chosen):
            width = sum(map(len, keys)) + sizes.added_keys
            pairs += times * len(queries) * width
            cut = 1 if fused else len(_cut(at_once, sizes.heads, sizes.kv_heads, len(queries), width))
            parts += times * cut / at_once
        return KernelWork(round(pairs), ceil(parts))

    def rehearsal(self, sizes: Extent) -> Kernel:
        """Return a kernel that computes a few blocks for all."""
        return Blocked(sizes)


class _Blocked(Function):
    """The context ``[B, H, Q, V]`` and the log-sum-exp ``[B, H, Q]``, which is empty where nobody asks for it."""

    @staticmethod
    def forward(
        ctx: Any, frame: Problem, sizes: Extent | None, with_lse: bool, names: tuple[str, ...],
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        problem = without_padding(_filled(frame, q, k, v, mask, dict(zip(names, learned, strict=True))))
        context = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3] if with_lse else 0, dtype=torch.promote_types(q.dtype, torch.float32))
        results = {"context": context} | ({"lse": lse} if with_lse else {})
        for block in _parts(problem, sizes):
            parts = _exact(parts_of(block.problem, block.selection))
            for tap, x in stages(block.problem, results, (), block.selection, parts):
                _rows(results[tap], block).copy_(x)
                del x  # before the next block
            del parts
        ctx.frame, ctx.sizes, ctx.names = frame, sizes, names
        ctx.save_for_backward(q, k, v, mask, *learned)
        ctx.mark_non_differentiable(lse)
        return context, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each block again, and add its gradients to those of the others, half types in float32."""
        given = dict(zip(("q", "k", "v", "mask", *ctx.names), ctx.saved_tensors, strict=True))
        wanted = dict(zip(given, ctx.needs_input_grad[4:], strict=True))
        learned = {name: given[name].detach().requires_grad_(wanted[name]) for name in ctx.names}
        problem = without_padding(_filled(ctx.frame, given["q"], given["k"], given["v"], given["mask"], learned))
        totals = {name: _zeros(x) for name, x in given.items() if wanted[name]}
        for block in _parts(problem, ctx.sizes):
            _differentiate(block, _rows(upstream, block), totals)
        gradients = (totals[name].to(x.dtype) if name in totals else None for name, x in given.items())
        return None, None, None, None, *gradients


def _filled(
    frame: Problem, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, learned: dict[str, Tensor]
) -> Problem:
    return replace(frame, q=q, k=k, v=v, mask=frame.mask if mask is None else mask, learned=learned)


def _parts(problem: Problem, sizes: Extent | None) -> Iterator[QueryBlock]:
    """Every block, in parts of no more scores than are held at a time."""
    for block in query_blocks(problem, CUT, sizes):
        batch, kv_heads = block.problem.k.shape[:2]
        cut = _cut(batch, len(block.heads), kv_heads, len(block.queries), block.width)
        for heads, rows in some_of(problem.q, cut):
            yield replace(block, heads=heads, queries=block.queries[rows.start : rows.stop])


def _cut(batch: int, heads: int, kv_heads: int, queries: int, keys: int) -> list[tuple[range, range]]:
    """Cut a block along its heads, then along its queries. Heads of a part read one key/value head, or whole groups."""
    fitting = max(_LEAST_ROWS, CUT.scores // max(1, batch * keys))  # rows of scores
    rows, group = min(queries, fitting), heads // kv_heads
    at_once = min(heads, fitting // rows)
    at_once = at_once // group * group if at_once >= group else gcd(at_once, group)
    return [
        (range(head, min(head + at_once, heads)), range(row, min(row + rows, queries)))
        for head, row in pairs_of(range(0, heads, at_once), range(0, queries, rows))
    ]


def _differentiate(block: QueryBlock, upstream: Tensor, totals: dict[str, Tensor]) -> None:
    """Compute the weights of a part again, and add its gradients to the totals that are wanted."""
    problem = block.problem
    with torch.enable_grad():
        leaves = _leaves(_exact(parts_of(problem, block.selection)), totals)
        ((_, weights),) = stages(problem, {"weights"}, (), block.selection, leaves)
    keep = None if problem.dropout is None else kept_weights(problem, block.selection)
    upstream = upstream.to(leaves.v.dtype)
    if "v" in totals:
        shares = _dropped(weights.detach(), problem, keep).to(upstream.dtype)
        _add(totals["v"], "v", product_backward(shares, upstream, leaves.v.shape[1]), block)
        del shares
    if not weights.requires_grad:
        return
    of_weights = _dropped(product(upstream, leaves.v.mT), problem, keep)
    at = {name: x for name, x in {**vars(leaves), **problem.learned}.items() if name in totals and name != "v"}
    gradients = pullback_where_used([weights], [*at.values()], [of_weights.to(weights.dtype)])
    for name, gradient in zip(at, gradients, strict=True):
        if gradient is not None:
            _add(totals[name], name, gradient, block)


def _dropped(x: Tensor, problem: Problem, keep: Tensor | None) -> Tensor:
    return x if keep is None or problem.dropout is None else dropped(x, problem.dropout, keep)


def _exact(parts: Parts) -> Parts:
    """The parts, half types in float32: sums over weights and over blocks are as exact as a fused kernel's."""

    def exact(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x

    mask = None if parts.mask is None else exact(parts.mask)
    return replace(parts, q=exact(parts.q), k=exact(parts.k), v=exact(parts.v), mask=mask, padded=False)


def _leaves(parts: Parts, wanted: Collection[str]) -> Parts:
    """The parts detached, those that are wanted with a gradient."""

    def leaf(x: Tensor, name: str) -> Tensor:
        return x.detach().requires_grad_(name in wanted)

    mask = None if parts.mask is None else leaf(parts.mask, "mask")
    return replace(parts, q=leaf(parts.q, "q"), k=leaf(parts.k, "k"), v=parts.v.detach(), mask=mask)


def _zeros(x: Tensor) -> Tensor:
    """Half types are summed in float32: a key's gradient is a sum over all blocks of queries."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _rows(x: Tensor, block: QueryBlock) -> Tensor:
    """The part ``[B, H, Q, ...]`` of a tensor over all sequences, heads and queries."""
    return pick(pick(x[block.sequences], 1, block.heads), 2, block.queries)


def _add(total: Tensor, name: str, gradient: Tensor, block: QueryBlock) -> None:
    """Add the gradient of a part to that of the whole tensor."""
    if name == "q":
        _rows(total, block).add_(gradient)
    elif name in {"k", "v"}:
        read = heads_read_by(block.heads, block.problem.q.shape[1], total.shape[1])
        add_to_spans(pick(total[block.sequences], 1, read), 2, block.all_keys, gradient)
    elif name == "mask":
        whole = total.view((1,) * (4 - total.ndim) + total.shape)
        sequences = range(block.sequences.start, block.sequences.stop)
        for dim, index in enumerate((sequences, block.heads, block.queries)):
            whole = whole if whole.shape[dim] == 1 else pick(whole, dim, index)
        if gradient.shape[-1] == whole.shape[-1] == 1:
            whole.add_(gradient)
        else:
            add_to_spans(whole, 3, block.keys, gradient)
    else:
        total.add_(gradient)
