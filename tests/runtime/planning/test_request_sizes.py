"""Buckets of sizes: they cover every size, and what a rehearsal tells apart stays apart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_service.runtime.planning.request_sizes import (
    COARSE,
    FINE,
    RequestSizes,
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


@drawn
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 5000), st.sampled_from([COARSE, FINE]))
def test_as_many_queries_as_keys_stay_as_many_and_others_do_not(queries, keys, past, steps):
    for end in (RequestSizes(1, queries, keys, past).upper(steps), RequestSizes(1, queries, keys, past).lower(steps)):
        assert (end.queries == end.new_keys) == (queries == keys)
        assert (end.queries > end.new_keys) == (queries > keys) or abs(end.queries - end.new_keys) > 0


@drawn
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300))
def test_a_mask_keeps_its_broadcast_dimensions(batch, keys, past):
    all_keys = past + keys
    for mask in ((1, 1, 1, all_keys), (batch, 2, 30, all_keys), (batch, 1, 30, 1), (1, 2, 30, max(all_keys - 1, 1))):
        end = RequestSizes(batch, 30, keys, past, mask).upper(COARSE)
        assert end.mask[:3] == (end.batch if mask[0] > 1 else 1, mask[1], end.queries if mask[2] > 1 else 1)
        whole = end.past + end.new_keys
        assert (end.mask[3] == whole) == (mask[3] == all_keys)
        assert (end.mask[3] == 1) == (mask[3] == 1) or whole <= 2


@drawn
@given(st.integers(1, 40), st.integers(0, 3000), st.data())
def test_offsets_keep_their_extremes_and_their_distance_from_the_past(batch, past, data):
    behind = data.draw(st.lists(st.integers(-3000, 3000), min_size=batch, max_size=batch))
    sizes = RequestSizes(batch, 5, 5, past, offsets=tuple(past + each for each in behind))
    end = sizes.upper(COARSE)
    assert len(end.offsets) == end.batch
    assert max(end.offsets) - end.past >= max(behind)
    assert (len({*end.offsets}) > 1) <= (len({*behind}) > 1)
    moved = RequestSizes(batch, 5, 5, end.past, offsets=tuple(end.past + each for each in behind))
    assert moved.upper(COARSE).offsets == end.offsets
