"""Global tokens of single sequences: the spec's masks, joined with positions that a request lists.

Source: Beltagy et al. 2020, section 3.1.
"""

from collections.abc import Iterator, Sequence

from attention_contract.spec import AllOf, AnyOf, GlobalTokens, Mask


def with_global_tokens(masks: Sequence[Mask], positions: Sequence[int]) -> list[Mask]:
    """Add positions to every ``global_tokens`` mask; if there is none, allow what the masks or the positions allow."""
    if not masks or not positions:
        return [*masks]
    if any(True for _ in listed(masks)):
        return [_added(mask, positions) for mask in masks]
    together = masks[0] if len(masks) == 1 else AllOf.model_construct(of=[*masks])
    return [AnyOf.model_construct(of=[together, GlobalTokens.model_construct(positions=[*positions])])]


def listed(masks: Sequence[Mask]) -> Iterator[GlobalTokens]:
    """Yield all ``global_tokens`` masks, including nested ones."""
    for mask in masks:
        if isinstance(mask, GlobalTokens):
            yield mask
        elif isinstance(mask, AnyOf | AllOf):
            yield from listed(mask.of)


def _added(mask: Mask, positions: Sequence[int]) -> Mask:
    if isinstance(mask, GlobalTokens):
        return mask.model_copy(update={"positions": sorted({*mask.positions, *positions})})
    if isinstance(mask, AnyOf | AllOf):
        return mask.model_copy(update={"of": [_added(each, positions) for each in mask.of]})
    return mask
