"""Global tokens of single sequences: the spec's masks, joined with positions that a request lists.

Source: Beltagy et al. 2020, section 3.1.
"""

from collections.abc import Iterator, Sequence

from attention_contract.spec import AllOf, AnyOf, GlobalTokens, Mask
from attention_service.core.masks.operation_count import leaves


def with_global_tokens(masks: Sequence[Mask], positions: Sequence[int]) -> list[Mask]:
    """Add positions to every ``global_tokens`` mask; if there is none, allow what the masks or the positions allow."""
    if not masks or not positions:
        return [*masks]
    if any(True for _ in listed(masks)):
        return [_added(mask, positions) for mask in masks]
    together = masks[0] if len(masks) == 1 else AllOf.model_construct(of=[*masks])
    return [AnyOf.model_construct(of=[together, GlobalTokens.model_construct(positions=[*positions])])]


def listed(masks: Sequence[Mask]) -> Iterator[GlobalTokens]:
    """Return all ``global_tokens`` masks, including nested ones."""
    return (mask for mask in leaves(masks) if isinstance(mask, GlobalTokens))


def _added(mask: Mask, positions: Sequence[int]) -> Mask:
    if isinstance(mask, GlobalTokens):
        return mask.model_copy(update={"positions": sorted({*mask.positions, *positions})})
    if isinstance(mask, AnyOf | AllOf):
        return mask.model_copy(update={"of": [_added(part, positions) for part in mask.of]})
    return mask
