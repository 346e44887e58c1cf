"""Float32 arrays as JSON: read again they are the same, bit for bit; and they are written as orjson writes them."""

import json

import numpy as np
import orjson
import pytest

pytest.importorskip("numba")

from attention_contract import lists


@pytest.fixture(autouse=True, scope="module")
def loaded():
    lists.load()


def of_orjson(array):
    return orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)


def drawn(rng, low, high, count):
    """Normal numbers whose exponents are drawn evenly."""
    exponents = rng.integers(low, high, count).astype(np.uint32)
    bits = exponents << 23 | rng.integers(0, 2**23, count, np.uint32) | rng.integers(0, 2, count, np.uint32) << 31
    return bits.view(np.float32)


def test_any_number_is_read_again_as_it_was(rng):
    numbers = drawn(rng, 1, 255, 400_000)
    text = lists.write(numbers)
    again = np.array(orjson.loads(bytes(text))).astype(np.float32)
    np.testing.assert_array_equal(again.view(np.uint32), numbers.view(np.uint32))


def test_every_power_of_two_and_its_neighbors_are_read_again_as_they_were():
    powers = (np.arange(1, 255, dtype=np.uint32) << 23)[:, None] + np.arange(-2, 3).astype(np.uint32)
    numbers = powers.reshape(-1)
    numbers = numbers[(numbers >= 2**23) & (numbers < 255 << 23)].view(np.float32)
    again = np.array(orjson.loads(bytes(lists.write(numbers)))).astype(np.float32)
    np.testing.assert_array_equal(again, numbers)


@pytest.mark.parametrize(("low", "high"), [(1, 100), (100, 151), (120, 130)])
def test_the_text_is_that_of_orjson(rng, low, high):
    # Up to 2^24: beyond, what lies halfway between two numbers may be written with a digit more.
    numbers = drawn(rng, low, high, 200_000)
    numbers = numbers[numbers.view(np.uint32) & 0x7FFFFF != 0]
    assert bytes(lists.write(numbers)) == of_orjson(numbers)


def test_of_two_texts_equally_near_one_is_taken(rng):
    halves = (rng.integers(10**6, 2**23, 1000) + 0.5).astype(np.float32)  # with eight digits there would be no choice
    again = np.array(orjson.loads(bytes(lists.write(halves)))).astype(np.float32)
    np.testing.assert_array_equal(again, halves)


def test_large_numbers_take_a_digit_more_at_most(rng):
    numbers = drawn(rng, 151, 255, 50_000)
    mine, other = (bytes(text)[1:-1].split(b",") for text in (lists.write(numbers), of_orjson(numbers)))
    assert all(len(one) <= len(another) + 1 for one, another in zip(mine, other, strict=True))


@pytest.mark.parametrize("digits", range(1, 8))
def test_few_digits_stay_few(rng, digits):
    numbers = (rng.integers(1, 10**digits, 5000) / 10.0 ** rng.integers(0, 9, 5000)).astype(np.float32)
    assert bytes(lists.write(numbers)) == of_orjson(numbers)


def test_what_everybody_would_look_at():
    numbers = np.array([0, -0.0, 1, -1, 0.5, 0.1, 10, 100, 1e-6, 9.9e-7, 1e7, 1e8, 1.5e9, 1e12, 1e13, 3e38], np.float32)
    expected = "[0.0,-0.0,1.0,-1.0,0.5,0.1,10.0,100.0,0.000001,9.9e-7,10000000.0,100000000.0,1500000000.0,"
    assert bytes(lists.write(numbers)).decode() == expected + "1000000000000.0,1e+13,3e+38]"


@pytest.mark.parametrize(
    "shape",
    [(1,), (5,), (1, 1), (2, 3), (300, 1), (1, 300), (3, 1, 2), (2, 2, 2, 2), (7, 33, 5), (1, 1, 1, 1, 1, 1, 1, 2)],
)
def test_lists_are_nested_as_the_array_is(rng, shape):
    array = rng.standard_normal(shape).astype(np.float32)
    assert bytes(lists.write(array)) == of_orjson(array)
    assert bytes(lists.write(np.asfortranarray(array))) == of_orjson(array)
    assert bytes(lists.write(np.repeat(array, 2, -1)[..., ::2])) == of_orjson(array)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, np.float32(1e-40), -np.float32(1.4e-45)])
@pytest.mark.parametrize("place", [0, 256, 999])
def test_what_it_does_not_write_is_left_to_others(odd, place):
    array = np.ones(1000, np.float32)
    array[place] = odd
    assert lists.write(array) is None


@pytest.mark.parametrize("array", [np.zeros(0, np.float32), np.zeros((2, 0), np.float32), np.float32(1), np.ones(3)])
def test_so_are_empty_arrays_and_other_dtypes(array):
    assert lists.write(np.asarray(array)) is None


def test_the_longest_texts_fit(rng):
    longest = np.full((50, 1, 1, 1, 1, 1, 1, 1), -1.2345679e-38, np.float32)
    again = np.array(json.loads(bytes(lists.write(longest)))).astype(np.float32)
    np.testing.assert_array_equal(again, longest)
    wide = np.full(1000, -0.0000012345679, np.float32)
    assert bytes(lists.write(wide)) == of_orjson(wide)
