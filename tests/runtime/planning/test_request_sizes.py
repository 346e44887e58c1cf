"""Buckets of sizes: they cover every size, and what a rehearsal tells apart stays apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_service.runtime.planning.request_sizes import (
    COARSE,
    FINE,
    bucket_lower,
    bucket_upper,
)

SIZE = st.integers(0, 2**40)
drawn = settings(deadline=None, derandomize=True, database=None)


@drawn
@given(SIZE, st.sampled_from([COARSE, FINE]))
def test_every_size_lies_in_one_bucket(size, steps):
    low, high = bucket_lower(size, steps), bucket_upper(size, steps)
    assert low <= size <= high
    assert {bucket_upper(low, steps), bucket_upper(high, steps)} == {high}
    assert {bucket_lower(low, steps), bucket_lower(high, steps)} == {low}
    assert high <= size * (1 + 2**-steps)


@pytest.mark.parametrize("steps", [COARSE, FINE])
def test_an_octave_has_as_many_buckets_as_it_should(steps):
    assert len({bucket_upper(size, steps) for size in range(1025, 2049)}) == 2**steps
    assert all(bucket_upper(size, steps) == size for size in range(2 ** (steps + 1) + 1))
