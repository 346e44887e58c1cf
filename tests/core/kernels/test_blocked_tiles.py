"""The tile that stands for all of the blocked kernel's lies where there are keys."""

import pytest

from attention_contract.spec import AnyOf, AttentionSpec, Documents, Entmax15, SlidingWindow, Strided
from attention_service.core.kernels.blocked_rehearsal import largest_tile
from attention_service.core.problem import added_keys
from attention_service.cost import Workload, touched

SPECS = {
    "strips beside a band": AttentionSpec(masks=[Strided(stride=3)]),
    "whole rows": AttentionSpec(masks=[Strided(stride=2, local=1)], normalizer=Entmax15()),
    "a band alone": AttentionSpec(masks=[SlidingWindow(left=3)], softcap=2.0),
    "documents": AttentionSpec(masks=[AnyOf(of=[Documents(lengths=[1, 5]), Strided(stride=2)])], softcap=2.0),
    "a key more": AttentionSpec(masks=[Strided(stride=2)], normalizer=Entmax15(), add_zero_attn=True),
}


@pytest.mark.parametrize("keys", [1, 40, 2**16, 2**17 + 37])
@pytest.mark.parametrize("name", SPECS)
def test_the_largest_tile_lies_within_the_keys(name, keys):
    """Every piece is where there are keys, and no tile has more keys than a block looks at."""
    spec = SPECS[name]
    work = Workload(1, 300, keys + added_keys(spec), 1, 1, 2, 5, 4, spec=spec)
    block, remembered = largest_tile(work)
    assert 0 <= block.start < block.stop <= work.queries
    assert remembered >= 0
    assert block.strips
    for strip in block.strips:
        starts, stops = zip(*strip.spans, strict=True)
        assert 0 <= min(starts) < max(stops) <= work.keys
        assert strip.width <= touched(work).widest
