"""Tensors over query-key pairs: a request's masks, and the dtypes of its scores and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from attention_contract.spec import Mask
from attention_service.core.kernels.fused.kernel import band_of_sizes
from attention_service.core.normalizers import NORMALIZERS, PairCost
from attention_service.core.scores import SCORES, ScoreCost
from attention_service.cost.attention import Attention

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})
PAIR_TAPS = SCORE_TAPS | {"weights", "lse"}
"""Taps for which every score of the selected heads and queries is needed."""


@dataclass(frozen=True)
class Masks:
    """Elements of every mask of a request after broadcasting; no mask is allocated."""

    together: int
    """Elements of all boolean masks combined."""
    combined: int
    """Elements of all masks combined, with the bias."""

    @property
    def any(self) -> bool:
        """True if there is a mask."""
        return self.combined > 0


NO_MASKS = Masks(0, 0)


def masks_of(x: Attention, masks: Sequence[Mask] | None = None) -> Masks:
    """Count the masks of a request; ``masks`` replaces the positional ones."""
    masks = x.spec.masks if masks is None else masks
    if not masks and not x.mask_shape and not x.padded:
        return NO_MASKS
    shapes: list[tuple[int, int, int]] = []  # batch, heads, queries; the keys are always all
    if masks:
        shapes.append((x.batch if x.batched_offsets else 1, 1, x.queries))
    if x.padded:
        shapes.append((x.batch, 1, 1))
    own = [(x.mask_shape[0], x.mask_shape[1], x.mask_shape[2])] if x.mask_shape else []
    if x.bool_mask:
        shapes += own
    together = _broadcast(shapes) * x.keys
    combined = _broadcast([*shapes, *own]) * x.keys
    return Masks(together, combined)


def fused_masks(x: Attention) -> Masks:
    """Count the masks that the fused kernel takes.

    There is none if the masks are known to be causal, and no positional one that hides nothing, such as for the last
    query of a decode. On a GPU none is laid out for a band that its kernels know.
    """
    if x.plainly_causal or (not x.threads and band_of_sizes(x) is not None):
        return NO_MASKS
    if x.reach is not None and x.reach >= x.sequence_keys - 1:
        return masks_of(x, ())
    return masks_of(x)


def normalizer_cost(x: Attention) -> PairCost:
    """Return the cost per pair that the spec's normalizer states."""
    return NORMALIZERS.of(x.spec.normalizer).cost(x.keys)


def score_cost(x: Attention) -> ScoreCost:
    """Return the cost of queries, keys and pairs that the spec's score states."""
    return SCORES.of(x.spec.score).cost(x.widths)


def _broadcast(shapes: Sequence[tuple[int, int, int]]) -> int:
    if not shapes:
        return 0
    return prod(max(sizes) for sizes in zip(*shapes, strict=True))
