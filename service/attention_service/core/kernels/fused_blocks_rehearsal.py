"""The blocked kernel on meta tensors where PyTorch's fused kernel computes its blocks: one block at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from attention_service.core.extent import Extent
from attention_service.core.kernels.fused_call import FusedCall
from attention_service.core.kernels.fused_rehearsal import Opaque, Take, by_token
from attention_service.core.kernels.largest_tiles import Tile, largest_tiles
from attention_service.core.kernels.one_width import same_width
from attention_service.core.kernels.tiles import scored_in
from attention_service.core.masks import pattern_of
from attention_service.core.patterns import making
from attention_service.core.scores import SCORES, Product
from attention_service.core.types import Problem


def rehearsed_blocks(problem: Problem, sizes: Extent, take: Take) -> tuple[Tensor, Tensor]:
    """The context ``[B, H, Q, V]`` and the log-sum-exp ``[B, H, Q]``."""
    score = SCORES.of(problem.spec.score)
    if not isinstance(score, Product):
        raise ValueError(f"the fused kernel has no score {problem.spec.score.name}")
    q, k, _ = score.factors(problem.q, problem.k, problem.learned)
    q, k, v = same_width(q, k, problem.v)
    wide = torch.promote_types(q.dtype, torch.float32)
    memory = _Memory(sizes, q.shape[-1], scored_in(problem).itemsize)
    with _disable_current_modes():  # tiles are found by real numbers
        working = memory.forward()

    def backward(gradient: Tensor) -> int:
        with _disable_current_modes():
            return memory.backward(gradient)

    step = Opaque(
        take,
        forward=working,
        backward=backward,
        context=lambda q, v: torch.empty_like(q),
        sums=wide,
        total=lambda at, x: torch.empty_like(x, dtype=wide if at else x.dtype),
    )
    context, sums = step(q, k, v)
    return context[..., : problem.v.shape[-1]], sums


@dataclass(frozen=True)
class _Memory:
    """The most that is worked in while a block is computed."""

    sizes: Extent
    width: int
    """Width of queries, keys and values."""
    score: int
    """Bytes of a score."""

    def forward(self) -> int:
        """Bytes of a forward pass."""
        return max(
            (max(made, working + call.lse + call.workspace() + call.context) for call, made, working in self._blocks()),
            default=0,
        )

    def backward(self, gradient: Tensor) -> int:
        """Bytes of a backward pass, for this gradient of the context."""
        wide, most, itemsize = max(self.sizes.itemsize, 4), 0, self.sizes.itemsize
        kv_heads = self.sizes.kv_heads
        for call, made, working in self._blocks():
            found = call.batch * call.heads * (call.queries + 2 * call.keys) * self.width * itemsize
            copied = 0 if by_token(gradient[: call.batch, :, : call.queries]) else call.context
            one = call.batch * kv_heads * call.keys * self.width
            summed = one * itemsize if call.heads != kv_heads else 0
            widened = one * wide if wide > itemsize else 0
            most = max(most, made, working + found + max(call.backward_workspace() + copied, summed + widened))
        return most

    def _blocks(self) -> Iterator[tuple[FusedCall, int, int]]:
        """Each block that may hold most; the bytes while its mask is made, and of what is put together for it."""
        sizes = self.sizes
        together, found = largest_tiles(sizes)
        for tile, _, _ in found:
            # Each head of queries has keys of its own.
            shape = together, sizes.heads, sizes.heads, tile.queries, tile.keys
            call = FusedCall(*shape, self.width, sizes.itemsize, sizes.half, sizes.threads)
            yield call, *self._working(together, tile)

    def _working(self, together: int, tile: Tile) -> tuple[int, int]:
        """The mask of a block as it is made; and made, beside keys put together or repeated for the heads."""
        sizes, c = self.sizes, self.score
        each = 2 * together * self.width * sizes.itemsize
        copied = each * sizes.kv_heads * tile.keys if tile.spans > 1 else 0
        repeated = each * sizes.heads * tile.keys if sizes.heads != sizes.kv_heads else 0
        pattern = pattern_of(sizes.spec.masks, sizes.queries, sizes.told_keys, sizes.past)
        mask = tile.queries * tile.keys * tile.masked + (tile.limits if pattern.laid_out else 0)
        # What is not remembered is gone once the mask is made, after the keys; keys and then values that were put
        # together, once they are repeated.
        laid_out = (tile.passing * c if pattern.laid_out else 0) + making(pattern, tile.fresh, tile.queries)
        part = repeated or copied
        return part + max(mask * c + laid_out, copied // 2 if repeated else 0), mask * c + part
