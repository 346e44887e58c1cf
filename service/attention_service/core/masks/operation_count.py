"""The number of small operations that masks consist of, counted from their options alone."""

from collections.abc import Iterator, Sequence
from typing import Final

from attention_contract.spec import AllOf, AnyOf, Documents, GlobalTokens, Mask, RandomBlocks

_LEAF, _DRAWING, _DRAW, _LISTED = 4.0, 40.0, 3.0, 0.02
"""Operations of a mask; of a random mask, and for each of its draws; and for each listed position."""
CHEAP: Final = 64.0
"""Operations of masks that take no longer than the rest of planning."""


def leaves(masks: Sequence[Mask]) -> Iterator[Mask]:
    """All masks, the parts of a combination before the combination."""
    for mask in masks:
        if isinstance(mask, AnyOf | AllOf):
            yield from leaves(mask.of)
        yield mask


def mask_cost(masks: Sequence[Mask]) -> float:
    """About how many operations evaluate masks once, for any number of pairs or tiles."""
    return sum(map(_cost, leaves(masks))) if masks else 0.0


def _cost(mask: Mask) -> float:
    match mask:
        case AnyOf() | AllOf():
            return 0.0
        case RandomBlocks():
            return _DRAWING + _DRAW * mask.count
        case GlobalTokens():
            return _LEAF + _LISTED * len(mask.positions)
        case Documents():
            return _LEAF + _LISTED * len(mask.lengths)
    return _LEAF
