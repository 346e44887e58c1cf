"""The lists of numbers that are members of an object in JSON text: where they are, their shapes and their numbers."""

from typing import Final

import numpy as np

from attention_contract.lists.numerals import (
    BROKEN,
    DECIMAL,
    EXACT,
    INTEGER,
    LATER,
    POWERS,
    TENS,
    is_space,
    number_in,
    scaled,
)
from attention_contract.lists.words import (
    Byte,
    Int,
    Word,
    compiled,
    digits,
    is_decimal,
    load,
    number_of,
    ones,
    places,
    trailing_zeros,
)
from attention_contract.tensors import MAX_RANK

MOST: Final = 32
"""Lists of one text, and numbers that are left to Python, that are told."""

# What is told of a list, in this order, then its sizes.
START, END, FIRST, INTEGRAL, RANK, SIZES = range(6)
ENTRIES: Final = SIZES + MAX_RANK

_WINDOW: Final = 2**14
"""Bytes whose commas and closing brackets are found at a time."""
_BLOCK: Final = 64
_LONGEST: Final = 24
"""Digits behind the point of what is read by eight characters at a time."""
_NOT_NUMBERS, _GIVEN_UP = -1, -2

_SPACE, _QUOTE, _COMMA, _MINUS, _POINT, _ZERO, _OPEN, _ESCAPE, _CLOSE, _OPEN_OBJECT, _CLOSE_OBJECT = map(
    ord, ' ",-.0[\\]{}'
)


def _masks() -> np.ndarray:
    """Of the last 24 bytes before the end of ``size`` digits, the bytes that are theirs: a word for each eight."""
    masks = np.zeros((3, 25), np.uint64)
    for word in range(3):
        for size in range(25):
            bits = 8 * min(max(size - 8 * word, 0), 8)
            masks[word, size] = (2**64 - 1) ^ (2 ** (64 - bits) - 1)
    return masks


_LAST, _MIDDLE, _FIRST = _masks()


@compiled
def scan(text: np.ndarray, numbers: np.ndarray, lists: np.ndarray, later: np.ndarray) -> int:
    """Put the numbers of all lists into ``numbers``, and what is told of each list into ``lists``; how many there are.

    ``later``: for each number that is left to Python its place in the text, its end, and that in ``numbers``; the entry
    behind the last one begins with 0. -1 where something doesn't fit, or an integer is too large for a double.
    Whether the text is JSON is not asked, but of the lists that are found.
    """
    found = np.empty(_WINDOW + 8, np.int64)
    counts = np.empty(MAX_RANK, np.int64)
    state = np.zeros(6, np.int64)
    count = vain = depth = at = Int(0)
    later[0, 0] = 0
    while at < text.size:
        character = text[at]
        if character == _QUOTE:
            at += 1
            while at < text.size and text[at] != _QUOTE:
                at += 2 if text[at] == _ESCAPE else 1
        elif character == _OPEN:
            if depth == 1:
                if count + vain == lists.shape[0]:  # each may have been read to the end of the text
                    return -1
                entry = lists[count]
                entry[FIRST], left = state[_FILLED], state[_LEFT]
                end = _list(text, at, numbers, later, state, found, counts, entry)
                if end == _GIVEN_UP:
                    return -1
                if end != _NOT_NUMBERS:
                    entry[START], entry[END] = at, end
                    count += 1
                    at = end
                    continue
                state[_FILLED], state[_LEFT] = entry[FIRST], left
                later[left, 0] = 0
                vain += 1
            depth += 1
        elif character == _OPEN_OBJECT:
            depth += 1
        elif character in (_CLOSE, _CLOSE_OBJECT):
            depth -= 1
        at += 1
    return count


# What is counted from list to list: the numbers there are, those left to Python; and within one: up to where delimiters
# were found, the next of them, how many were found at once, whether all numbers are integers.
_FILLED, _LEFT, _AHEAD, _NEXT, _KNOWN, _INTEGRAL = range(6)


@compiled
def _list(
    text: np.ndarray,
    at: int,
    numbers: np.ndarray,
    later: np.ndarray,
    state: np.ndarray,
    found: np.ndarray,
    counts: np.ndarray,
    entry: np.ndarray,
) -> int:
    """Read one list, which opens at ``at``: where it ends, or why not. ``counts`` are for its use."""
    state[_AHEAD], state[_NEXT], state[_KNOWN], state[_INTEGRAL] = at, 0, 0, 1
    sizes = entry[SIZES:]
    sizes[:] = -1
    depth = leaf = Int(0)
    while True:
        at = _skip(text, at)
        if at < text.size and text[at] == _OPEN and depth < MAX_RANK and (leaf == 0 or depth < leaf):
            counts[depth] = 0
            depth += 1
            at += 1
            continue
        leaf = depth if leaf == 0 else leaf
        if depth != leaf or at == text.size or not (text[at] == _MINUS or _ZERO <= text[at] <= _ZERO + 9):
            return _NOT_NUMBERS
        before = state[_FILLED]
        at = _row(text, at, numbers, later, state, found)
        if at < 0:
            return at
        counts[depth - 1] = state[_FILLED] - before
        depth, at = _closed(text, at, depth, sizes, counts)
        if at < 0:
            return at
        if depth == 0:
            entry[INTEGRAL], entry[RANK] = state[_INTEGRAL], leaf
            return at


@compiled
def _closed(text: np.ndarray, at: int, depth: int, sizes: np.ndarray, counts: np.ndarray) -> tuple[int, int]:
    """Behind the bracket that closes a list: how many are still open, and where the next one begins, or all ended."""
    while True:
        depth -= 1
        if sizes[depth] == -1:
            sizes[depth] = counts[depth]
        if sizes[depth] != counts[depth]:
            return depth, _NOT_NUMBERS
        if depth == 0:
            return depth, at
        counts[depth - 1] += 1
        at = _skip(text, at)
        if at == text.size or (text[at] != _COMMA and text[at] != _CLOSE):
            return depth, _NOT_NUMBERS
        at += 1
        if text[at - 1] == _COMMA:
            return depth, at


@compiled
def _row(  # noqa: PLR0912, PLR0915
    text: np.ndarray, at: int, numbers: np.ndarray, later: np.ndarray, state: np.ndarray, found: np.ndarray
) -> int:
    """Read the numbers from ``at`` up to the bracket that closes their list: the place behind it, or why not.

    What is done with every number is here: to call a function takes as long as to read one.
    """
    filled, left = state[_FILLED], state[_LEFT]
    next_, known, integral = state[_NEXT], state[_KNOWN], state[_INTEGRAL]
    while next_ < known and found[next_] < at:  # commas and brackets between rows
        next_ += 1
    while True:
        if next_ == known:
            begin = max(state[_AHEAD], at)
            if begin >= text.size:
                return _NOT_NUMBERS
            known, next_ = _delimiters(text, begin, found), Int(0)
            state[_AHEAD], state[_KNOWN] = begin + _WINDOW, known
            continue
        end = found[Word(next_)]
        next_ += 1
        start = at + Int(text[Word(at)] == _SPACE)
        negative = text[Word(start)] == _MINUS
        start += Int(negative)
        decimals = end - start - 2
        first = Word(text[Word(start)]) ^ Word(_ZERO)
        # A digit, the point, and some more: by eight characters at a time.
        simple = Word(decimals - 1) < Word(_LONGEST) and first < Word(10) and end >= _LONGEST
        simple = simple and text[Word(start + 1)] == _POINT
        number = Word(0)
        if simple:
            last = digits(load(text, end - 8)) & _LAST[Word(decimals)]
            middle = digits(load(text, end - 16)) & _MIDDLE[Word(decimals)]
            simple = is_decimal(last) & is_decimal(middle)
            number = number_of(middle) * Word(10**8) + number_of(last)
            if decimals > 16:
                upper = digits(load(text, end - 24)) & _FIRST[Word(decimals)]
                first = first * POWERS[Word(decimals - 16)] + number_of(upper)
                simple = simple & is_decimal(upper) & (first < Word(1844))  # 2^64 is 1844 · 10^16 and more
                number += first * Word(10**16)
            else:
                number += first * POWERS[Word(decimals)]
        if simple:
            if number < Word(EXACT) and decimals < TENS.size:
                value = np.float64(Int(number)) / TENS[Word(decimals)]
            else:
                value = scaled(number, -decimals)
            value = -value if negative else value
            kind = DECIMAL
        else:
            value, kind = number_in(text, at, end)
            if kind == BROKEN:
                return _NOT_NUMBERS
            if kind == LATER or (kind == INTEGER and abs(value) >= EXACT):
                if kind == INTEGER or left + 1 >= later.shape[0]:
                    return _GIVEN_UP
                later[left, 0], later[left, 1], later[left, 2] = at, end, filled
                left += 1
                later[left, 0] = 0
        integral &= Int(kind == INTEGER)
        numbers[Word(filled)] = value
        filled += 1
        at = end + 1
        if text[Word(end)] != _COMMA:
            state[_FILLED], state[_LEFT], state[_NEXT], state[_INTEGRAL] = filled, left, next_, integral
            return at


@compiled
def _skip(text: np.ndarray, at: int) -> int:
    """The next place that isn't white space."""
    while at < text.size and is_space(text[at]):
        at += 1
    return at


@compiled
def _delimiters(text: np.ndarray, begin: int, found: np.ndarray) -> int:
    """Find the commas and closing brackets of a window; how many there are."""
    count = Int(0)
    end = min(begin + _WINDOW, text.size)
    whole = begin + (end - begin) // _BLOCK * _BLOCK
    for at in range(begin, whole, _BLOCK):
        here = places(text, at, Byte(_COMMA), Byte(_CLOSE))
        more = count + Int(ones(here))
        for place in range(8):  # as many as there mostly are; those too many are overwritten
            found[Word(count + place)] = at + Int(trailing_zeros(here))
            here &= here - Word(1)
        for place in range(count + 8, more):
            found[Word(place)] = at + Int(trailing_zeros(here))
            here &= here - Word(1)
        count = more
    for at in range(whole, end):
        if text[at] == _COMMA or text[at] == _CLOSE:
            found[count] = at
            count += 1
    return count
