"""Causal masks, told from sizes."""

from attention_service.core.bands import Band
from attention_service.core.kernels.base import Sizes
from attention_service.core.masks import pattern_of
from attention_service.core.memo import once


def plainly_causal(sizes: Sizes) -> bool:
    """Return True if j ≤ i is all that the masks say: the fused kernel then takes none."""
    return not sizes.request_mask_elements and not sizes.padded and not sizes.extra and reach_of(sizes) == 0


@once
def reach_of(sizes: Sizes) -> int | None:
    """Return the r for which the spec's masks say j ≤ i + r and nothing else; None if they say something else."""
    if not sizes.spec.masks or sizes.batched_offsets:
        return None
    band = pattern_of(sizes.spec.masks, sizes.queries, sizes.told_keys, sizes.past)
    if not isinstance(band, Band) or band.low is not None or band.high is None:
        return None
    return band.high + sizes.past
