"""Results of heads that devices have found apart, put together: those of one device that has them all."""

from itertools import permutations

import numpy as np
import pytest

from attention_service.core.edits import BoundEdit
from attention_service.models.passes.device_heads import DeviceHeads, DividedHeads

HEADS, DEVICES = 6, 3
WEIGHTS = np.random.default_rng(0).standard_normal((2, HEADS, 4, 5))
CHOSEN = [None, (0,), (5, 5), *[chosen for count in (2, 3) for chosen in permutations(range(HEADS), count)]]


def found(divided):
    """What a device finds of its heads, as an inspection does: statistics of all, and weights of some."""
    share, each = divided.share, divided.heads
    own = WEIGHTS[:, share.rank * each : (share.rank + 1) * each]
    picked = own if divided.own is None else own[:, divided.own]
    weights = picked.mean(1) if divided.averaged else picked
    return {
        "statistics": {"entropy": own.sum((2, 3)), "classes": {"queries": own[..., 0]}},
        "queries": np.array([4, 3]),
        "weights": weights,
        "top": {"keys": picked.argmax(-1), "weights": picked.max(-1)},
        "differences": {"statistics": {"entropy": own.sum((2, 3))}, "weights": weights},
        "whole": {"weights": own},
    }


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            same(one[name], other[name])
    else:
        np.testing.assert_allclose(one, other, rtol=1e-12)
        assert one.flags.c_contiguous


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("devices", [2, DEVICES])
def test_results_of_divided_heads_are_those_of_one_device(monkeypatch, devices, averaged):
    for chosen in CHOSEN:
        parts = [
            DividedHeads(DeviceHeads(rank, devices), HEADS // devices, chosen, averaged=averaged)
            for rank in range(devices)
        ]
        monkeypatch.setattr(DeviceHeads, "of_all", lambda _, x, parts=parts: [found(part) for part in parts])
        expected = found(DividedHeads(DeviceHeads(0, 1), HEADS, chosen, averaged=averaged))
        for part in parts:
            same(part.of_all(found(part)), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_edits_of_key_heads_go_to_the_device_that_has_them(kv_heads):
    for head in range(2 * kv_heads):
        owners = [
            (rank, own.heads)
            for rank in range(2)
            for own in DeviceHeads(rank, 2).own_edits([BoundEdit("k", heads=(head,), scale=0.5)], 4, kv_heads)
        ]
        assert owners == [(head // kv_heads, (head % kv_heads,))]
