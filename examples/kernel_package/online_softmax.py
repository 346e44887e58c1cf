"""A kernel of one's own: softmax attention over blocks of keys, with a running maximum and sum, in plain PyTorch.

Install it with ``pip install examples/kernel_package`` and start the service. A request names it
(``"kernel": "online_softmax"``), and ``attention compare online_softmax`` holds it against the exact numbers.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from attention_contract.spec import AttentionSpec, ScaledDot, Softmax
from attention_service.core.edits import BoundEdit
from attention_service.core.kernels import KERNELS, Kernel, Needs
from attention_service.core.masks.visibility import visibility, without_padding
from attention_service.core.problem import Problem

BLOCK = 64


@KERNELS.register(
    "online_softmax",
    formula="o ← o·exp(m − m') + exp(s − m')·v block by block, m' the running maximum; divided by the running sum",
    gradient="autograd's, through every block",
    cost="O(n²·d) time, O(n·d) memory forward",
    source="Milakov & Gimelshein 2018, algorithm 3",
)
class OnlineSoftmax(Kernel):
    """Scaled dot products with a softmax, and every mask."""

    def attend(self, problem: Problem, taps: Collection[str], edits: Sequence[BoundEdit]) -> dict[str, Tensor]:
        """Compute the context ``[B, H, Q, V]``."""
        clean, seen = without_padding(problem), visibility(problem)
        q, groups = clean.q, clean.q.shape[1] // clean.k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (clean.k, clean.v))
        score = problem.spec.score
        scale = score.scale if isinstance(score, ScaledDot) and score.scale is not None else q.shape[-1] ** -0.5
        highest = q.new_full((*q.shape[:3], 1), torch.finfo(q.dtype).min)
        total, context = torch.zeros_like(highest), q.new_zeros(*q.shape[:3], v.shape[3])
        for start in range(0, k.shape[2], BLOCK):
            at = slice(start, start + BLOCK)
            scores = q @ k[:, :, at].mT * scale  # [B, H, Q, block]
            if seen.bias is not None:
                scores = scores + seen.bias[..., at]
            if seen.allowed is not None:
                scores = scores.masked_fill(~seen.allowed[..., at], -torch.inf)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            rescale, weights = (highest - higher).exp(), (scores - higher).exp()
            total = total * rescale + weights.sum(-1, keepdim=True)
            context = context * rescale + weights @ v[:, :, at]
            highest = higher
        # A query that may look nowhere gets zeros.
        return {"context": context / torch.where(total == 0, 1, total)}

    def unsuitable(self, spec: AttentionSpec, dtype: torch.dtype, needs: Needs) -> Iterator[str]:
        """Yield what it does not do."""
        plain = AttentionSpec(score=spec.score, masks=spec.masks)
        if spec.score.name != "scaled_dot" or spec != plain or not isinstance(spec.normalizer, Softmax):
            yield "it computes a plain softmax over scaled dot products"
        if dtype.itemsize < 4:
            yield "it accumulates in the dtype of its inputs, and has no half types"
        if needs.edits or needs.dropout or needs.taps_gradient:
            yield "it keeps no scores and no weights"
