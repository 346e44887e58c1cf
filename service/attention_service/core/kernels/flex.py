"""PyTorch's FlexAttention: the masks compiled into a fused kernel that skips the blocks which they forbid."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attention_contract.spec import AttentionSpec
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels.base import KERNELS, Needs
from attention_service.core.kernels.blocked import Blocked
from attention_service.core.kernels.query_blocks import Cut, Layout
from attention_service.core.masks.bands import Keys, Queries
from attention_service.core.masks.random_blocks import Drawn
from attention_service.core.masks.rules import MAX_POSITION, pattern_of
from attention_service.core.masks.tilings import Segments
from attention_service.core.masks.visibility import fit, real_keys, without_padding
from attention_service.core.normalizers import NORMALIZERS, Softmax
from attention_service.core.positions import POSITIONS
from attention_service.core.problem import Problem
from attention_service.core.scores import SCORES, Product

BLOCK = 128
_LOOKED_UP = (Queries, Keys, Segments, Drawn)
Call = Callable[..., Any]
Mod = Callable[..., Tensor]


@KERNELS.register(
    "flex",
    formula="softmax(mod(q·k · scale)) · v over the blocks that the masks allow, compiled",
    cost="O(n·w·d) time if the masks leave w adjacent keys a query, O(n·d) memory and (n/128)² blocks",
    gradient="as fused, compiled",
    source="Dong et al. 2024",
)
class Flex(Blocked):
    """On a CUDA device, where a request asks for it: dot-product scores, a softcap, a softmax, masks by arithmetic."""

    # It skips the tiles that the blocked kernel skips and is never slower, so that its costs are bounded by that one's.
    automatic = False
    compiled = True

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute the context, and the log-sum-exp if it is asked for."""
        return flexed(problem, taps, _compiled())

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield what needs another device, the weights, or another formula."""
        normalizer = NORMALIZERS.of(spec.normalizer)
        if needs.device != "cuda":
            yield "the flex kernel is compiled for CUDA devices"
        if dtype == torch.float64:
            yield "the flex kernel has no float64"
        score = SCORES.of(spec.score)
        if not isinstance(score, Product):
            yield f"the flex kernel has no score {spec.score.name}"
        elif not score.plain and dtype.itemsize == 2:
            yield f"the flex kernel would round what a {spec.score.name} score makes of queries and keys"
        if POSITIONS.of(spec.position).biased:
            yield f"the flex kernel takes no bias for each head and pair, as {spec.position.name} has"
        if any(isinstance(part, _LOOKED_UP) for part in pattern_of(spec.masks, 1, 1).parts()):
            yield "the flex kernel compiles masks that are arithmetic, and no lists of positions, documents or draws"
        if spec.add_bias_kv or spec.add_zero_attn:
            yield "the flex kernel masks every key, those that the spec adds among them"
        if not isinstance(normalizer, Softmax) or normalizer.options.sinks:
            yield "the flex kernel has a softmax alone, without sinks"
        elif normalizer.runs_in(dtype) != torch.promote_types(dtype, torch.float32):
            yield f"the flex kernel normalizes in float32, not in {spec.normalizer.dtype} as the spec asks"
        if needs.dropout:
            yield "the flex kernel has no dropout"
        if needs.edits or needs.taps_gradient:
            yield "edits, and gradients of scores and weights, need them in memory, where the flex kernel has none"
        if needs.double_backward:
            yield "gradients of the flex kernel cannot be differentiated again"


def flexed(problem: Problem, taps: Collection[str], call: Call) -> dict[str, Tensor]:
    """One call of FlexAttention, compiled or not."""
    spec, score = problem.spec, SCORES.of(problem.spec.score)
    if not isinstance(score, Product):
        raise ValueError("the flex kernel computes scaled dot products; ask `unsuitable` first")
    clean = without_padding(problem)
    q, k, scale = score.factors(clean.q, clean.k, problem.learned)
    mask = None
    if problem.mask is not None:
        mask = fit(problem.mask, problem.keys).expand(*q.shape[:3], problem.keys)
    context, aux = call(
        q,
        k,
        clean.v,
        score_mod=_score_mod(spec, mask),
        block_mask=_block_mask(problem, mask),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return {"context": context} | ({"lse": aux.lse} if "lse" in taps else {})


@cache
def _compiled() -> Call:
    compiled: Call = torch.compile(flex_attention, dynamic=True)
    return compiled


def _score_mod(spec: AttentionSpec, mask: Tensor | None) -> Mod | None:
    """The softcap, the request's mask where it is added, and the temperature; None where there is none of them."""
    softcap, temperature = spec.softcap, spec.normalizer.temperature
    added = mask if mask is not None and mask.dtype != torch.bool else None
    if softcap is None and temperature == 1 and added is None:
        return None

    def modified(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        x = x if added is None else x + added[b, h, i, j]
        return x / temperature

    return modified


def _block_mask(problem: Problem, mask: Tensor | None) -> BlockMask | None:
    """The blocks in which a query may look somewhere, told from positions, and which pairs of them are allowed."""
    real, device = real_keys(problem), problem.q.device
    batch, heads, queries, keys = *problem.q.shape[:3], problem.k.shape[2]
    if not problem.spec.masks and real is None and mask is None:
        return None
    pattern = pattern_of(problem.spec.masks, queries, keys, problem.past)
    first = torch.full((batch,), problem.past, device=device)
    if problem.offsets is not None:
        first = problem.offsets.long().clamp(-MAX_POSITION, MAX_POSITION).expand(batch).contiguous()

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = pattern.allows(i + first[b], j)
        seen = seen if real is None else seen & real[b, j]
        if mask is None:
            return seen
        told = mask[b, h, i, j]
        return seen & (told if mask.dtype == torch.bool else told != -torch.inf)

    cut, starts = Cut(BLOCK, 0, cell=BLOCK), range(0, queries, BLOCK)
    kinds = [Layout(pattern, start, queries, keys).kinds(cut, starts) for start in first.tolist()]
    touched = torch.from_numpy(np.stack(kinds))[:, None].to(device)  # [B, 1, query blocks, key blocks]
    whole = touched == 2 if real is None and mask is None else torch.zeros_like(touched, dtype=torch.bool)
    some = (touched > 0) & ~whole
    heads = heads if mask is not None else 1
    return BlockMask.from_kv_blocks(
        *_listed(some, heads), *_listed(whole, heads), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(queries, keys)
    )


def _listed(blocks: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Count the blocks of keys that each block of queries looks at, and list them first."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    count = blocks.sum(-1)
    batch, _, rows, columns = blocks.shape
    return count.to(torch.int32).expand(batch, heads, rows).contiguous(), order.to(torch.int32).expand(
        batch, heads, rows, columns
    ).contiguous()
