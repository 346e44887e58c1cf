"""Counts of the rehearsed passes against those of the hand-kept mirrors."""

import numpy as np
import pytest
from tests.core import test_cost_traffic as walk

from attention_service.core.kernels import unsuitable
from attention_service.cost import traffic_mirror
from attention_service.cost.operation_counter import Traffic
from attention_service.cost.traffic import gradient_traffic, traffic

CASES = [
    *((work, kernel) for work in walk.WORKLOADS.values() for kernel in walk.KERNEL_NAMES if not work.batched_offsets),
    *((work, "blocked") for work in walk.MANY_TILES.values()),
    *(walk._some(np.random.default_rng(seed)) for seed in range(40)),
    *((walk._approximation(np.random.default_rng(seed)), "materialized") for seed in range(40)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_rehearsal_counts_what_the_mirrors_count(case):
    work, kernel = CASES[case]
    if unsuitable(kernel, work.spec, walk.DTYPES[work.itemsize], dropout=work.dropped) is not None:
        pytest.skip("the kernel does not take it")
    for rehearsed, mirrored in (
        (traffic(work, kernel), traffic_mirror.traffic(work, kernel)),
        (gradient_traffic(work, kernel), traffic_mirror.gradient_traffic(work, kernel)),
    ):
        counts = mirrored.read, mirrored.written, mirrored.transcendentals, mirrored.operations
        assert rehearsed == Traffic(*counts)
