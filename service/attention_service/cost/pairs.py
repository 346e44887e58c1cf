"""Tensors over query-key pairs: a request's masks, and the dtypes of its scores and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from attention_contract.spec import Mask
from attention_service.core.normalizers import NORMALIZERS, PairCost
from attention_service.core.scores import SCORES, ScoreCost
from attention_service.cost.workload import Workload

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})
PAIR_TAPS = SCORE_TAPS | {"weights", "lse"}
"""Taps for which every score of the selected heads and queries is needed."""
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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


def masks_of(work: Workload, masks: Sequence[Mask] | None = None) -> Masks:
    """Count the masks of a request; ``masks`` replaces the positional ones."""
    masks = work.spec.masks if masks is None else masks
    if not masks and not work.request_mask_elements and not work.padded:
        return NO_MASKS
    shapes: list[tuple[int, int, int]] = []  # batch, heads, queries; the keys are always all
    if masks:
        shapes.append((work.batch if work.batched_offsets else 1, 1, work.queries))
    if work.padded:
        shapes.append((work.batch, 1, 1))
    own = request_mask(work) if work.request_mask_elements else None
    if own is not None and work.bool_mask:
        shapes.append(own)
    together = _broadcast(shapes) * work.keys
    combined = _broadcast([*shapes, own] if own is not None else shapes) * work.keys
    return Masks(together, combined)


def fused_masks(work: Workload) -> Masks:
    """Count the masks that the fused kernel takes.

    There is none if the masks are known to be causal, and no positional one that hides nothing, such as for the last
    query of a decode.
    """
    if work.plainly_causal:
        return NO_MASKS
    if work.reach is not None and work.reach >= work.sequence_keys - 1:
        return masks_of(work, ())
    return masks_of(work)


def score_itemsize(work: Workload) -> int:
    """Bytes of a score: half types are scored in float32, or in the normalizer's dtype if that is wider."""
    return max(work.itemsize, softmax_itemsize(work), 4)


@lru_cache(maxsize=1024)
def normalizer_cost(work: Workload) -> PairCost:
    """Return the cost per pair that the spec's normalizer states."""
    return NORMALIZERS.of(work.spec.normalizer).cost(work.keys)


@lru_cache(maxsize=1024)
def score_cost(work: Workload) -> ScoreCost:
    """Return the cost of queries, keys and pairs that the spec's score states."""
    return SCORES.of(work.spec.score).cost(work.widths)


def softmax_itemsize(work: Workload) -> int:
    """Bytes of one element inside the normalizer: a requested half type as it is, otherwise the wider dtype."""
    asked = _ITEMSIZE[work.spec.normalizer.dtype]
    return asked if asked < 4 else max(asked, work.itemsize)


def request_mask(work: Workload) -> tuple[int, int, int]:
    """Batch, heads and queries of the request's mask: the largest product that matches its number of elements."""
    fits = [
        (work.request_mask_elements % (b * h * q * work.sequence_keys) == 0, b * h * q, (b, h, q))
        for b in {1, work.batch}
        for h in {1, work.heads}
        for q in {1, work.queries}
        if b * h * q <= work.request_mask_elements <= b * h * q * work.sequence_keys
    ]
    # All keys where that is possible; a mask that is shorter hides the rest, and is made as long.
    return max(fits)[2] if fits else (work.batch, work.heads, work.queries)


def _broadcast(shapes: Sequence[tuple[int, int, int]]) -> int:
    if not shapes:
        return 0
    return prod(max(sizes) for sizes in zip(*shapes, strict=True))
