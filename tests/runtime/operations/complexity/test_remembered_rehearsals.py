"""Sizes from which larger ones are extrapolated are rehearsed once for a report."""

from collections import Counter

import pytest
import torch
from tests.cost.workloads import raw

from attention_contract.spec import AttentionSpec, Strided
from attention_service.cost import Rates, Roofline
from attention_service.runtime.device.torch_device import Device
from attention_service.runtime.operations.complexity.capacity import limits
from attention_service.runtime.operations.complexity.subjects import OUTPUT, DeviceMemory, Subject
from attention_service.runtime.planning import rehearsals

RATES = Rates(flops_per_s=1e12, bytes_per_s=1e11, overhead_s=1e-5)


@pytest.mark.slow
def test_a_search_for_the_longest_sequence_rehearses_no_size_twice(monkeypatch):
    sizes, once = Counter(), rehearsals._once

    def counted(bound, **options):
        sizes[options["kernel"], options["first"], bound.batch, bound.queries, bound.new_keys] += 1
        return once(bound, **options)

    monkeypatch.setattr(rehearsals, "_once", counted)
    free = 2**32
    place = DeviceMemory(Device(torch.device("cpu"), "a cpu", free, Roofline(RATES)), free, free)
    bound = raw(AttentionSpec(masks=[Strided(stride=3)]), queries=64, new_keys=64)
    found = limits(Subject("request", bound, OUTPUT, None, place))
    assert found.forward.longest.size > 2**17
    longest = {key: times for key, times in sizes.items() if key[3] >= 2**15}
    assert longest
    assert set(longest.values()) == {1}, longest
