"""Attention tile by tile: exact, in memory that grows with the length alone, skipping what the masks forbid."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from attention_contract.spec import AttentionSpec
from attention_service.core.cancellation import checkpoint
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import tiling
from attention_service.core.kernels.base import KERNELS, Executed, Kernel, Needs
from attention_service.core.kernels.blocked_rehearsal import LargestTile
from attention_service.core.kernels.extent import Extent
from attention_service.core.kernels.fused import cpu_blocks
from attention_service.core.kernels.tile_kinds import OneOfEach
from attention_service.core.kernels.tiles import Group, Through, groups, scored_in
from attention_service.core.kernels.tiling import Block
from attention_service.core.kernels.totals import Totals
from attention_service.core.kernels.touched import by_fused, touched
from attention_service.core.kernels.ways import Streamed, upstreams, way
from attention_service.core.normalizers import NORMALIZERS, Exponential
from attention_service.core.problem import Problem


@KERNELS.register(
    "blocked",
    formula="o ← o·exp(m − m') + exp(s − m')·v tile by tile, m' the running maximum; divided by the running sum",
    gradient="recomputed tile by tile, w = exp(s − lse), ∂s = w (∂o·v − ∂o·o); not twice differentiable",
    cost="O(n·w·d) time if the masks leave w adjacent keys a query, O(n·d) memory",
    source="Milakov & Gimelshein 2018, algorithm 3; Rabe & Staats 2021; Dao et al. 2022, algorithm 4 (backward)",
)
class Blocked(Kernel):
    """Skips tiles that the spec's masks forbid, and never keeps the weights: takes every spec."""

    keeps = frozenset({"lse"})
    holds = "tiles"
    recomputes = True
    traffic = 2 / 3
    timed_as = "tiles"
    automatic = True

    def __init__(self, through: Through | None = None, *, in_blocks: bool | None = None) -> None:
        """Create the kernel.

        through: the blocks to compute; None for all. ``in_blocks``: PyTorch's fused kernel computes the blocks; None
        asks each problem.
        """
        self._through, self._in_blocks = through, in_blocks

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute the context, and return q, k, v and the log-sum-exp if they are asked for."""
        q, k, v, mask = problem.q, problem.k, problem.v, problem.mask
        if cpu_blocks.takes(problem) if self._in_blocks is None else self._in_blocks:
            context, lse = cpu_blocks.attend_in_blocks(problem, with_lse="lse" in taps, through=self._through)
            known = {"q": q, "k": k, "v": v, "lse": lse}
            return {"context": context} | {tap: x for tap, x in known.items() if tap in taps and x is not None}
        added = mask if mask is not None and mask.is_floating_point() else None
        nothing = q.new_empty(0)
        # What is differentiated goes beside the problem, and nothing is held twice.
        told = None if added is not None else mask
        frame = replace(problem, q=nothing, k=nothing, v=nothing, mask=told, learned={}, global_qkv=None)
        context, lse = _Blocked.apply(  # type: ignore[no-untyped-call]
            frame, self._through or _blocks, tuple(problem.learned), q, k, v, added, *problem.learned.values()
        )
        known = {"q": q, "k": k, "v": v}
        normalizer = NORMALIZERS.of(problem.spec.normalizer)
        if isinstance(normalizer, Exponential):
            known["lse"] = lse.to(normalizer.runs_in(scored_in(problem)))
        return {"context": context} | {tap: x for tap, x in known.items() if tap in taps}

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield what needs the weights."""
        if needs.edits:
            yield "edits need every tap in memory, which the blocked kernel does not keep"
        if needs.taps_gradient:
            yield "scores and weights are wanted in memory, where the blocked kernel has one tile of them at a time"
        if needs.double_backward:
            yield "gradients of the blocked kernel cannot be differentiated again"

    def executed(self, sizes: Extent) -> Executed:
        """Count the tiles that the masks leave."""
        found = touched(sizes)
        return Executed(found.pairs, found.blocks, found.strips)

    def rehearsal(self, sizes: Extent) -> "Blocked":
        """Return a kernel that computes the largest tile alone."""
        return Blocked(LargestTile(sizes), in_blocks=by_fused(sizes))

    def counted(self, sizes: Extent) -> "Blocked":
        """Return a kernel that computes one tile of each kind."""
        return Blocked(OneOfEach(sizes), in_blocks=by_fused(sizes))


class _Blocked(Function):
    """The context ``[B, H, Q, V]`` and the log-sum-exp ``[B, H, Q]``, which is empty where there is none."""

    @staticmethod
    def forward(
        ctx: Any,
        frame: Problem,
        through: Through,
        names: tuple[str, ...],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        problem = _filled(frame, q, k, v, mask, dict(zip(names, learned, strict=True)))
        steps = way(problem)
        summed_in, streamed = torch.promote_types(scored_in(problem), torch.float32), isinstance(steps, Streamed)
        lse = q.new_empty(q.shape[:3] if streamed else 0, dtype=summed_in)
        # Half types keep it in float32 for the gradient, where Σ context·∂context is taken from products as large.
        exact = streamed and any(ctx.needs_input_grad)
        kept_in = torch.promote_types(q.dtype, torch.float32) if exact else q.dtype
        context = q.new_empty(*q.shape[:3], v.shape[3], dtype=kept_in)
        for group, block in through(problem, whole_rows=steps.whole_rows):
            at = group.sequences, slice(None), slice(block.start, block.stop)
            context[at], of_block = steps.forward(group, block)
            if of_block is not None:
                lse[at] = of_block
        ctx.frame, ctx.through, ctx.names = frame, through, names
        ctx.save_for_backward(q, k, v, mask, context, lse, *learned)
        ctx.mark_non_differentiable(lse)
        return context.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Tile by tile again: the gradient of its scores, and by it those of what they are made of."""
        q, k, v, mask, context, lse, *values = ctx.saved_tensors
        wanted = dict(zip(("q", "k", "v", "mask", *ctx.names), ctx.needs_input_grad[3:], strict=True))
        learned = {name: x.detach().requires_grad_(wanted[name]) for name, x in zip(ctx.names, values, strict=True)}
        problem = _filled(ctx.frame, q, k, v, mask, learned)
        totals = Totals(problem, wanted, torch.promote_types(scored_in(problem), torch.float32))
        steps = way(problem)
        for group, block in ctx.through(problem, whole_rows=steps.whole_rows):
            upstream = upstreams(gradient, context, lse, group, block)
            for strip in block.strips:
                totals.add(group, block, strip, steps, upstream)
            if isinstance(steps, Streamed) and wanted.get("sinks"):
                totals.add_learned("sinks", steps.of_sinks(group, upstream))
        return None, None, None, *totals.gradients()


def _filled(
    frame: Problem, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, learned: dict[str, Tensor]
) -> Problem:
    return replace(frame, q=q, k=k, v=v, mask=frame.mask if mask is None else mask, learned=learned)


def _blocks(problem: Problem, *, whole_rows: bool) -> Iterator[tuple[Group, Block]]:
    """Every block of queries of every group of sequences."""
    _, heads, queries, _ = problem.q.shape
    fitted = tiling.TILING.fitted(heads, queries, problem.k.shape[2])
    for group in groups(problem, fitted):
        for block in group.blocks(fitted, whole_rows=whole_rows):
            checkpoint()
            yield group, block
