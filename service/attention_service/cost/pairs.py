"""Which tensors over query-key pairs a request makes: its masks, and the dtypes of its scores and weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from attention_contract.spec import Mask
from attention_service.core.kernels.reach import plainly_causal, reach_of
from attention_service.core.memo import once
from attention_service.core.normalizers import NORMALIZERS, PairCost
from attention_service.core.scores import SCORES, ScoreCost
from attention_service.cost.workload import Workload

SCORE_TAPS = frozenset({"scores", "capped_scores", "masked_scores"})
PAIR_TAPS = SCORE_TAPS | {"weights", "lse"}
"""Taps for which every score of the selected heads and queries is needed."""
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Masks:
    """Elements of every mask of a request, once it is broadcast; none of them has been made."""

    together: int
    """Of all boolean ones together."""
    combined: int
    """Of all together, the bias included."""

    @property
    def any(self) -> bool:
        """Whether there is a mask at all."""
        return self.combined > 0


NO_MASKS = Masks(0, 0)


def masks_of(work: Workload, masks: Sequence[Mask] | None = None) -> Masks:
    """The masks of a request, of which those of positions may be replaced."""
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
    """The masks that the fused kernel is given.

    None where it can be told that they are plainly causal, and none of positions where they hide nothing, as from the
    last query of a decode.
    """
    if plainly_causal(work):
        return NO_MASKS
    reach = reach_of(work)
    if reach is not None and reach >= work.told_keys - 1:
        return masks_of(work, ())
    return masks_of(work)


def score_itemsize(work: Workload) -> int:
    """Bytes of a score: half types are scored in float32, or in what the normalizer runs in where that is wider."""
    return max(work.itemsize, softmax_itemsize(work), 4)


@once
def normalizer_cost(work: Workload) -> PairCost:
    """What the spec's normalizer says that each pair costs."""
    return NORMALIZERS.of(work.spec.normalizer).cost(work.keys)


@once
def score_cost(work: Workload) -> ScoreCost:
    """What the spec's score says that queries, keys and pairs cost."""
    return SCORES.of(work.spec.score).cost(work.widths)


def softmax_itemsize(work: Workload) -> int:
    """Bytes of one element inside the normalizer: a half type is taken as asked, another where it is the wider one."""
    asked = _ITEMSIZE[work.spec.normalizer.dtype]
    return asked if asked < 4 else max(asked, work.itemsize)


def request_mask(work: Workload) -> tuple[int, int, int]:
    """Batch, heads and queries of the request's mask: the largest product that its number of elements can stand for."""
    fits = [
        (work.request_mask_elements % (b * h * q * work.told_keys) == 0, b * h * q, (b, h, q))
        for b in {1, work.batch}
        for h in {1, work.heads}
        for q in {1, work.queries}
        if b * h * q <= work.request_mask_elements <= b * h * q * work.told_keys
    ]
    # All keys where that is possible; a mask that is shorter hides the rest, and is made as long.
    return max(fits)[2] if fits else (work.batch, work.heads, work.queries)


def _broadcast(shapes: Sequence[tuple[int, int, int]]) -> int:
    if not shapes:
        return 0
    return prod(max(sizes) for sizes in zip(*shapes, strict=True))
