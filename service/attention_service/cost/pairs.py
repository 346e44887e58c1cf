"""Tensors over query-key pairs: a request's masks, and the dtypes of its scores and weights."""

from collections.abc import Sequence
from math import prod

from attention_contract.spec import Mask
from attention_service.core.kernels.fused.kernel import band_of_sizes
from attention_service.core.normalizers import NORMALIZERS, PairCost
from attention_service.core.scores import SCORES, ScoreCost
from attention_service.cost.attention import SizedAttention

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})
PAIR_TAPS = SCORE_TAPS | {"weights", "lse"}
"""Taps for which every score of the selected heads and queries is needed."""


def mask_elements(x: SizedAttention, masks: Sequence[Mask] | None = None) -> int:
    """Elements of all masks of a request combined, after broadcasting; 0 without a mask. No mask is allocated.

    ``masks`` replaces the positional ones.
    """
    shapes: list[tuple[int, ...]] = []  # batch, heads, queries; the keys are always all
    if x.spec.masks if masks is None else masks:
        shapes.append((x.batch if x.batched_offsets else 1, 1, x.queries))
    if x.padded:
        shapes.append((x.batch, 1, 1))
    if x.mask_shape:
        shapes.append(x.mask_shape[:3])
    return prod(map(max, zip(*shapes, strict=True))) * x.keys if shapes else 0


def fused_mask_elements(x: SizedAttention) -> int:
    """Elements of the mask that the fused kernel takes.

    There is none if the masks are known to be causal, and no positional one that hides nothing, such as for the last
    query of a decode. On a GPU none is laid out for a band that its kernels know.
    """
    if x.plainly_causal or (not x.threads and band_of_sizes(x) is not None):
        return 0
    if x.reach is not None and x.reach >= x.sequence_keys - 1:
        return mask_elements(x, ())
    return mask_elements(x)


def normalizer_cost(x: SizedAttention) -> PairCost:
    """Return the cost per pair that the spec's normalizer states."""
    return NORMALIZERS.of(x.spec.normalizer).cost(x.keys)


def score_cost(x: SizedAttention) -> ScoreCost:
    """Return the cost of queries, keys and pairs that the spec's score states."""
    return SCORES.of(x.spec.score).cost(x.widths)
