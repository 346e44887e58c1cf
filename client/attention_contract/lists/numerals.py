"""One number of a JSON text as the double nearest to it, as Python and orjson read it."""

from typing import Final

import numpy as np

from attention_contract.lists.words import (
    Byte,
    Int,
    Word,
    as_double,
    compiled,
    digits,
    high_product,
    is_decimal,
    leading_zeros,
    load,
    number_of,
)

BROKEN: Final = 0
"""Not a number."""
INTEGER: Final = 1
DECIMAL: Final = 2
LATER: Final = 3
"""A number that is left to Python: it has more than 19 digits, or is very large or very small."""
EXACT: Final = 2**53
"""Up to which a double tells integers apart."""

_MINUS, _PLUS, _POINT, _ZERO, _EXPONENT = map(ord, "-+.0e")
_SMALLEST, _LARGEST = -325, 308
_EXACT_TENS: Final = 22
"""Up to which a double holds powers of ten."""
_EXACT_FIVES: Final = 27
"""Up to which a power of five fits into 64 bits: a number divided by it may lie halfway between two doubles."""


def _fives() -> np.ndarray:
    """128 bits of each power of five from the smallest to the largest, the first of them set; two words each.

    Those of reciprocals are rounded up where a product with them may be exact, so that it is not less than that.
    """
    words = []
    for power in range(_SMALLEST, _LARGEST + 1):
        five = 5 ** abs(power)
        if power < 0:
            bits = five.bit_length()
            five = 2 ** (bits + 127 if -power <= _EXACT_FIVES else 2 * bits + 128) // five + 1
        bits = five.bit_length()
        five = five >> (bits - 128) if bits > 128 else five << (128 - bits)
        words.append((five >> 64, five % 2**64))
    return np.array(words, np.uint64)


_FIVES = _fives()
TENS = np.array([10.0**power for power in range(_EXACT_TENS + 1)])


@compiled
def scaled(number: int, power: int) -> float:
    """``number`` · 10^``power``, number < 2^64; NaN where it is to be left to Python."""
    if number < Word(EXACT) and -_EXACT_TENS <= power <= _EXACT_TENS:  # both are exact, so that it is rounded once
        if power < 0:
            return np.float64(number) / TENS[Word(-power)]
        return np.float64(number) * TENS[Word(power)]
    if power < _SMALLEST or power > _LARGEST:
        return np.nan
    return nearest(number, power)


@compiled
def nearest(number: int, power: int) -> float:
    """As ``scaled``, of a number that isn't 0, by 128 bits of the power.

    After Lemire, "Number Parsing at a Gigabyte per Second", 2021 (arXiv:2101.11408), algorithm 1; that they are enough
    showed Mushtak and Lemire, "Fast Number Parsing Without Fallback", 2022 (arXiv:2212.06644).
    """
    shift = leading_zeros(number)
    number = number << shift
    place = Int(power) - Int(_SMALLEST)
    high, low = high_product(number, _FIVES[place, 0]), number * _FIVES[place, 0]
    if high & Word(0x1FF) == Word(0x1FF):
        more = high_product(number, _FIVES[place, 1])
        low = low + more
        if low < more:
            high = high + Word(1)
    top = high >> Word(63)
    dropped = top + Word(9)
    mantissa = high >> dropped  # 53 bits, and one to round by
    # The exponent of 10^power is that of 5^power and power: log2(10) as 217706 / 2^16.
    exponent = ((Int(217_706) * Int(power)) >> Int(16)) + Int(1086) + Int(top) - Int(shift)
    if exponent <= 0:
        return np.nan
    halfway = low <= Word(1) and -4 <= power <= 23 and mantissa & Word(3) == Word(1)
    if halfway and mantissa << dropped == high:  # to the even one
        mantissa = mantissa & ~Word(1)
    mantissa = (mantissa + (mantissa & Word(1))) >> Word(1)
    if mantissa >= Word(2**53):
        mantissa = Word(2**52)
        exponent += 1
    if exponent >= 2047:
        return np.nan
    bits = (mantissa & Word(2**52 - 1)) | (Word(exponent) << Word(52))
    return as_double(bits)


@compiled
def number_in(text: np.ndarray, start: int, end: int) -> tuple[float, int]:
    """The number that the bytes from ``start`` to ``end`` are, beside white space, and what kind it is (see above).

    By the grammar of RFC 8259, section 6.
    """
    while start < end and is_space(text[start]):
        start += 1
    while start < end and is_space(text[end - 1]):
        end -= 1
    negative = start < end and text[start] == _MINUS
    number, power, kind = _parsed(text, start + Int(negative), end)
    value = 0.0
    if number != Word(0) and kind in (INTEGER, DECIMAL):
        value = scaled(number, power)
        if np.isnan(value):
            return 0.0, LATER
    if negative and (value or kind == DECIMAL):
        value = -value
    return value, kind


@compiled
def _parsed(text: np.ndarray, start: int, end: int) -> tuple[int, int, int]:
    """All digits of a number without a sign as one, the power of ten it is to be multiplied with, and the kind."""
    number, at, full = _digits(text, start, end, Word(0))
    power, kind = Int(0), INTEGER
    broken = at == start or (text[start] == _ZERO and at > start + 1)
    if at < end and text[at] == _POINT:
        kind = DECIMAL
        begin = at + 1
        number, at, more = _digits(text, begin, end, number)
        broken |= at == begin
        full |= more
        power = begin - at
    if at < end and text[at] | 32 == _EXPONENT:
        kind = DECIMAL
        sign = text[at + 1] if at + 1 < end else Byte(0)
        begin = at + 1 + Int(sign in (_PLUS, _MINUS))
        exponent, at, more = _digits(text, begin, end, Word(0))
        broken |= at == begin
        full |= more or exponent > Word(9999)
        if not full:
            power += -Int(exponent) if sign == _MINUS else Int(exponent)
    if broken or at != end:
        kind = BROKEN
    elif full:
        kind = LATER
    return number, power, kind


@compiled
def _digits(text: np.ndarray, at: int, end: int, number: int) -> tuple[int, int, bool]:
    """A number with the digits after it that begin at ``at``: the number, where they end, and if it is too large."""
    while at + 8 <= end and number < Word(10**11):
        word = digits(load(text, at))
        if not is_decimal(word):
            break
        number = number * Word(10**8) + number_of(word)
        at += 8
    full = False
    while at < end:
        digit = Word(text[at]) - Word(_ZERO)
        if digit > Word(9):
            break
        full |= number >= Word(10**18)
        number = number * Word(10) + digit
        at += 1
    return number, at, full


@compiled
def is_space(character: int) -> bool:
    """Whether a character is white space in JSON."""
    return character in (0x20, 0x0A, 0x0D, 0x09)
