"""Each number that compiled code reads is the double that Python reads, bit for bit; each that is none is told."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from attention_contract.lists import numerals

NUMBER = re.compile(r"[ \t\n\r]*-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?[ \t\n\r]*")


def read(text):
    data = np.frombuffer(text.encode(), np.uint8)
    return numerals.number_in(data, 0, data.size)


def bits(value):
    return np.float64(value).tobytes()


def check(text):
    """Held against Python's float, and against json's word on what is a number, and which are integers."""
    value, kind = read(text)
    if not NUMBER.fullmatch(text):
        assert kind == numerals.BROKEN, text
    elif kind != numerals.LATER:
        number = json.loads(text)
        assert kind == (numerals.INTEGER if isinstance(number, int) else numerals.DECIMAL), text
        assert bits(value) == bits(float(number)), text
    return kind


@settings(max_examples=3000, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_double_is_read_as_python_reads_it(number):
    kinds = {check(form) for form in (repr(number), f"{number:.17e}", f"{number:.9g}", f"{number:.16E}")}
    if number == 0 or 1e-290 < abs(number) < 1e290:
        assert numerals.LATER not in kinds


@settings(max_examples=3000, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(-345, 330))
def test_any_digits_with_any_power_are_read_as_python_reads_them(number, power):
    check(f"{number}e{power}")
    digits = str(number)
    check(f"{digits[0]}.{digits[1:] or '0'}E{power:+}")


def test_numbers_halfway_between_two_doubles_go_to_the_even_one():
    # Those and their neighbors are what rounding may get wrong: 2^53 + 1 and the like, and with powers of ten.
    for exponent in range(53, 64):
        step = 2 ** (exponent - 53)
        for odd in (1, 3, 5, 2**20 + 1):
            for near in (-1, 0, 1):
                number = 2**exponent + step * odd // (2 if step > 1 else 1) + near
                for text in (f"{number}.0", f"{number}e0", f"{number}e-1"):
                    check(text)
    for number in (9007199254740993, 9007199254740995, 4503599627370497, 4503599627370499):
        for power in range(-25, 25):
            check(f"{number}e{power}")
            check(f"{number}5e{power}")


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "-", "+1", "01", "-01", "1.", ".5", "-.5", "1e", "1e+", "1e-", "1.e5", "0x10", "1_0", "1 2", "NaN",
        "Infinity", "true", "1.5.2", "1e5e5", "--1", "1-", "0 .5", "1,", "٣", "1\x0b",
    ],
)  # fmt: skip
def test_what_is_no_number_is_told(text):
    assert read(text)[1] == numerals.BROKEN


@settings(max_examples=3000, deadline=None)
@given(st.text("0123456789.eE+- \t", max_size=24))
def test_what_is_a_number_is_what_json_says(text):
    check(text)


@pytest.mark.parametrize("text", ["0", "-0", "0.0", "-0.0", "0e5", "-0e-5", "0.000", "-0.0e300", " 7 ", "\t7\r\n"])
def test_zeros_and_white_space(text):
    assert check(text) != numerals.LATER


@pytest.mark.parametrize("text", ["1e-310", "4.9e-324", "1e309", "1" * 20 + ".5", "0." + "1" * 25, "1e99999"])
def test_what_takes_more_is_left_to_python(text):
    assert read(text)[1] == numerals.LATER
