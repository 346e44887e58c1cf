"""Float32 arrays as nested lists of JSON: of each number the fewest digits that are read as the same float32.

All of it is arithmetic of doubles, which hold nine digits and what lies between them exactly enough, without branches,
so that several numbers are converted at once. Of the shortest texts the nearest one is taken, as by Adams, "Ryū: Fast
Float-to-String Conversion", PLDI 2018; in a tie of more than seven digits there may be one digit more.
"""

from typing import Final

import numpy as np

from attention_contract.lists.layout import AT_ONCE
from attention_contract.lists.words import Int, Word, as_double, compiled, leading_zeros, store

_POWER_BY: Final = 78_913
"""log10(2) · 2^18: by it the power of ten at or below a power of two is found."""
_TENS = np.array([float(f"1e{8 - ((exponent - 127) * _POWER_BY >> 18)}") for exponent in range(256)])
"""By the exponent of a float32: what it is multiplied with to have nine digits before the point, or ten."""
_ROUNDING: Final = 1.5 * 2.0**52
"""Added and taken away again, it leaves the nearest integer."""
_MARGIN: Final = (1 - 1e-7) * 2.0**-24
"""Half a unit in the last place, and somewhat less, since what is compared with it has been rounded."""

_FIXED_FROM, _FIXED_TO = -6, 12
"""Powers of ten that are written without an exponent, as orjson does."""
_COMMA, _MINUS, _POINT, _ZERO, _OPEN, _CLOSE, _PLUS, _EXPONENT = map(ord, ",-.0[]+e")
_ZEROS: Final = int.from_bytes(b"0.000000", "little")
_TEXT: Final = int.from_bytes(b"00000000", "little")


@compiled
def write(
    bits: np.ndarray,
    sizes: np.ndarray,
    scales: np.ndarray,
    first: np.ndarray,
    others: np.ndarray,
    powers: np.ndarray,
    text: np.ndarray,
) -> int:
    """Write numbers, given by their bits, as nested lists of these sizes, none of which is 0; how long the text is.

    ``scales`` to ``powers`` are for its use. -1 where a number is not finite, or below the smallest normal one and not
    0. ``text`` has room for MOST_CHARACTERS a number, two brackets for each list, a comma for each row, and SLACK.
    """
    width = sizes[-1]
    at = Int(0)
    row, left = Int(0), Int(0)
    for begin in range(0, bits.size, AT_ONCE):
        block = bits[begin : begin + AT_ONCE]
        _convert(block, scales, first, others, powers)
        for place in range(Word(block.size)):
            if left == 0:
                for _ in range(_ends(row, sizes) if row else sizes.size):
                    text[Word(at)] = _OPEN
                    at += 1
                left = width
            left -= 1
            at = _print(block[place], first[place], others[place], powers[place], text, at)
            if at < 0:
                return -1
            if left == 0:
                at -= 1
                row += 1
                for _ in range(_ends(row, sizes)):
                    text[Word(at)] = _CLOSE
                    at += 1
                text[Word(at)] = _COMMA
                at += 1
    return at - 1


@compiled
def _ends(row: int, sizes: np.ndarray) -> int:
    """How many lists end with the row before this one, and as many begin with it, but at the end of all."""
    count = Int(1)
    for level in range(sizes.size - 2, -1, -1):
        if row % sizes[level]:
            break
        row //= sizes[level]
        count += 1
    return count


@compiled
def _convert(bits: np.ndarray, scales: np.ndarray, first: np.ndarray, others: np.ndarray, powers: np.ndarray) -> None:
    """The first digit of each number, the eight after it (each a byte, the first the lowest), the first one's power."""
    for place in range(Word(bits.size)):  # by itself: several at once would take longer
        scales[place] = _TENS[(bits[place] >> Word(23)) & Word(0xFF)]
    for place in range(Word(bits.size)):
        size = Word(bits[place]) & Word(0x7FFFFFFF)
        fraction = size & Word(0x7FFFFF)
        exponent = size >> Word(23)
        unit = as_double((exponent + Word(1023 - 127)) << Word(52))
        value = np.float64(Int(fraction | Word(0x800000))) * 2.0**-23 * unit
        power = ((Int(exponent) - Int(127)) * Int(_POWER_BY)) >> Int(18)
        scale = scales[place]
        exact = value * scale
        over = exact >= 1e9
        power += Int(over)
        scale = scale * (0.1 if over else 1.0)
        exact = exact * (0.1 if over else 1.0)  # from 1e8 to 1e9
        # Half a unit in the last place; a power of two is half as far from the number below it.
        near = unit * scale * (_MARGIN / 2 if fraction == Word(0) else _MARGIN)

        nearest = (exact + _ROUNDING) - _ROUNDING
        for fewer in (10.0, 100.0, 1000.0):  # those of five digits and fewer are among the last ones
            shorter = ((exact * (1.0 / fewer) + _ROUNDING) - _ROUNDING) * fewer
            nearest = shorter if abs(shorter - exact) < near else nearest
        over = nearest >= 1e9
        nearest = 1e8 if over else nearest
        powers[place] = power + Int(over)

        leading = Int((nearest + 0.5) * 1e-8)
        rest = nearest - np.float64(leading) * 1e8
        four = Word(Int((rest + 0.5) * 1e-4)) & Word(0x3FFF)
        lower = (Word(Int(rest)) - four * Word(10_000)) & Word(0x3FFF)
        # Four digits, pairs, digits: the quotient by 100 and by 10 in the lower half, the remainder in the upper one.
        high, low = (four * Word(10_486)) >> Word(20), (lower * Word(10_486)) >> Word(20)
        pairs = high | (four - high * Word(100)) << Word(16) | low << Word(32) | (lower - low * Word(100)) << Word(48)
        tens = ((pairs * Word(103)) >> Word(10)) & Word(0x000F000F000F000F)
        first[place] = leading
        others[place] = tens | (pairs - tens * Word(10)) << Word(8)


@compiled
def _print(bits: int, first: int, others: int, power: int, text: np.ndarray, at: int) -> int:
    """Write one number and a comma; the place behind them, or -1 where it is none that ``write`` writes."""
    size = Word(bits) & Word(0x7FFFFFFF)
    text[Word(at)] = _MINUS
    at += Int(Word(bits) >> Word(31))
    if size - Word(0x800000) >= Word(0x7F000000):  # not from the smallest normal one to the largest
        if size != Word(0):
            return -1
        store(text, at, Word(_ZEROS))
        text[Word(at + 3)] = _COMMA
        return at + 4
    count = 9 - Int(leading_zeros(others) >> Word(3))
    characters = others | Word(_TEXT)
    if Word(power - _FIXED_FROM) > Word(7 - _FIXED_FROM):
        return _print_far(first, characters, count, power, text, at)
    # Below 1: "0.", zeros, digits. Else: digits, of which those behind the point are written once more. Which it is
    # cannot be foreseen, so that both are computed, and chosen by masks.
    small = power >> Int(63)
    whole = power & ~small
    zeros = (Int(1) - power) & small
    start = at + zeros
    store(text, at, Word(_ZEROS))
    text[Word(start)] = Int(_ZERO) + first
    store(text, start + 1, characters)
    store(text, start + 2 + whole + small, characters >> Word(8 * whole))
    text[Word(at + 1 + whole)] = _POINT
    at += ((zeros + count) & small) | ((max(count, power + 2) + Int(1)) & ~small)
    text[Word(at)] = _COMMA
    return at + 1


@compiled
def _print_far(first: int, characters: int, count: int, power: int, text: np.ndarray, at: int) -> int:
    """As ``_print``, of a number that is 1e8 or more, or below 1e-6."""
    text[Word(at)] = Int(_ZERO) + first
    if _FIXED_FROM <= power <= _FIXED_TO:
        store(text, at + 1, characters)
        store(text, at + 9, Word(_TEXT))
        at += power + 1
        text[Word(at)] = _POINT
        text[Word(at + 1)] = _ZERO
        text[Word(at + 2)] = _COMMA
        return at + 3
    if count > 1:
        text[Word(at + 1)] = _POINT
        store(text, at + 2, characters)
        at += 1
    at += count
    text[Word(at)] = _EXPONENT
    if power > 0:
        text[Word(at + 1)] = _PLUS
    else:
        text[Word(at + 1)] = _MINUS
    at += 2
    size = abs(power)
    if size > 9:
        text[Word(at)] = _ZERO + size // 10
        at += 1
    text[Word(at)] = _ZERO + size % 10
    text[Word(at + 1)] = _COMMA
    return at + 2
