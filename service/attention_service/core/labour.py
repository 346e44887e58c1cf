"""How many operations masks consist of, told from their options alone."""

from collections.abc import Iterator, Sequence

from attention_contract.spec import AllOf, AnyOf, Documents, GlobalTokens, Mask, RandomBlocks

_LEAF, _DRAWING, _DRAW, _LISTED = 4.0, 40.0, 3.0, 0.02
"""Operations that a mask takes; one that draws, and for each draw; and for each position that is listed."""
_USUAL_DRAWS = 2


def leaves(masks: Sequence[Mask]) -> Iterator[Mask]:
    """All masks, those that others are made of before those."""
    for mask in masks:
        if isinstance(mask, AnyOf | AllOf):
            yield from leaves(mask.of)
        yield mask


def labour(masks: Sequence[Mask]) -> float:
    """About how many operations it takes to say what masks allow, of pairs or of tiles, however many there are."""
    return sum(map(_labour, leaves(masks)))


def effort(mask: Mask) -> float:
    """A mask's operations beside those that one of its name usually takes; those of which it is made do not count."""
    if isinstance(mask, AnyOf | AllOf):
        return 1.0
    usual = _DRAWING + _DRAW * _USUAL_DRAWS if isinstance(mask, RandomBlocks) else _LEAF
    return _labour(mask) / usual


def _labour(mask: Mask) -> float:
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
