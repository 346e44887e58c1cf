"""The tiles that stand for all of the blocked kernel's lie where there are keys."""

import pytest

from attention_contract.spec import AnyOf, AttentionSpec, Documents, Entmax15, SlidingWindow, Strided
from attention_service.core.kernels.largest_tiles import MOST_CELLS, largest_tiles
from attention_service.core.kernels.tiling import Tiling
from attention_service.core.types import added_keys
from attention_service.cost import Workload

SPECS = {
    "strips beside a band": AttentionSpec(masks=[Strided(stride=3)]),
    "whole rows": AttentionSpec(masks=[Strided(stride=2, local=1)], normalizer=Entmax15()),
    "a band alone": AttentionSpec(masks=[SlidingWindow(left=3)], softcap=2.0),
    "documents": AttentionSpec(masks=[AnyOf(of=[Documents(lengths=[1, 5]), Strided(stride=2)])], softcap=2.0),
    "a key more": AttentionSpec(masks=[Strided(stride=2)], normalizer=Entmax15(), add_zero_attn=True),
}
CELLS = MOST_CELLS * Tiling.cell


@pytest.mark.parametrize("keys", [CELLS, CELLS + 1, 2 * CELLS + 37])
@pytest.mark.parametrize("name", SPECS)
def test_the_largest_tiles_lie_within_the_keys(name, keys):
    """Also where there are too many to go through, so that one is told as large as any can be."""
    spec = SPECS[name]
    work = Workload(1, 300, keys + added_keys(spec), 1, 1, 2, 5, 4, spec=spec)
    _, found = largest_tiles(work)
    assert found
    for tile, _, block in found:
        for strip in block.strips:
            starts, stops = zip(*strip.spans, strict=True)
            assert 0 <= min(starts) < max(stops) <= work.keys
            assert len(strip.spans) <= tile.spans
            assert strip.width <= tile.keys
