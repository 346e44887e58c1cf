"""The lists of numbers that are members of an object in JSON text: where they are, their shapes and their numbers."""

from typing import Final

import numpy as np

from attention_contract.lists.layout import END, FIRST, INTEGRAL, RANK, SIZES, SPARE, START, STATE, WINDOW
from attention_contract.lists.numerals import (
    BROKEN,
    DECIMAL,
    EXACT,
    INTEGER,
    LATER,
    TENS,
    is_space,
    nearest,
    number_in,
)
from attention_contract.lists.words import (
    Byte,
    Int,
    Word,
    as_double,
    as_word,
    compiled,
    numbers_before,
    ones,
    places,
    trailing_zeros,
)
from attention_contract.tensors import MAX_RANK

_BLOCK: Final = 64
_LONGEST: Final = 24
"""Digits behind the point of what is read at once."""
_NOT_NUMBERS, _GIVEN_UP = -1, -2

_SPACE, _QUOTE, _COMMA, _MINUS, _POINT, _ZERO, _OPEN, _ESCAPE, _CLOSE, _OPEN_OBJECT, _CLOSE_OBJECT = map(
    ord, ' ",-.0[\\]{}'
)

_ROOM: Final = 32
"""Characters that are looked at before the end of a number."""
_MASKS = np.array([[255 * (place >= _ROOM - size) for place in range(_ROOM)] for size in range(_LONGEST + 1)], np.uint8)
"""Of that many characters before the end of so many digits, those that are theirs."""
_UPPER: Final = 16
"""Digits that are the lower ones of a number."""
_TOPS = np.array([10 ** max(size - _UPPER, 0) * (size >= _UPPER) for size in range(_LONGEST + 1)], np.uint64)
_POWERS = np.array([10**size % 2**64 for size in range(_LONGEST + 1)], np.uint64)
"""What a digit before so many is worth: without the lower ones, and in all, but for what is beyond 64 bits."""
_SPACES, _MINUSES = ((np.arange(256) == character).astype(np.uint8) for character in (_SPACE, _MINUS))
"""Whether a character is one."""
_SURELY_EXACT: Final = 15
"""With fewer decimals than these, and a digit before them, a number is below 2^53."""


@compiled
def scan(
    text: np.ndarray,
    numbers: np.ndarray,
    lists: np.ndarray,
    later: np.ndarray,
    state: np.ndarray,
    counts: np.ndarray,
    found: np.ndarray,
) -> int:
    """Put the numbers of all lists into ``numbers``, and what is told of each list into ``lists``; how many there are.

    ``later``: for each number that is left to Python its place in the text, its end, and that in ``numbers``; the entry
    behind the last one begins with 0. The other arrays are for its use. -1 where something doesn't fit, or an integer
    is too large for a double. Whether the text is JSON is not asked, but of the lists that are found.
    """
    state[:] = 0
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
_FILLED, _LEFT, _AHEAD, _NEXT, _KNOWN, _INTEGRAL = range(STATE)


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
def _row(  # noqa: PLR0912
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
            state[_AHEAD], state[_KNOWN] = begin + WINDOW, known
            continue
        end = found[Word(next_)]
        next_ += 1
        # What is looked up is not compared: that would write the lowest byte of a register, and so wait for the number
        # before, which left the others there.
        start = at + Int(_SPACES[Word(text[Word(at)])])
        negative = Word(_MINUSES[Word(text[Word(start)])])
        start += Int(negative)
        decimals = end - start - 2
        first = Word(text[Word(start)]) ^ Word(_ZERO)
        # A digit, the point, and some more: all at once.
        simple = Word(decimals - 1) < Word(_LONGEST) and first < Word(10) and end >= _ROOM
        simple = simple and text[Word(start + 1)] == _POINT
        number = Word(0)
        if simple:
            upper, middle, last, decimal = numbers_before(text, end, _MASKS, decimals)
            # 2^64 is 1844 · 10^16 and more
            simple = decimal != Word(0) and first * _TOPS[Word(decimals)] + upper < Word(1844)
            number = first * _POWERS[Word(decimals)] + upper * Word(10**16) + middle * Word(10**8) + last
        if simple:
            # By their number, not by what they are, since that could not be foreseen.
            if decimals < _SURELY_EXACT:
                value = np.float64(Int(number)) / TENS[Word(decimals)]
            elif number == Word(0):
                value = 0.0
            else:
                value = nearest(number, -decimals)
            value = as_double(as_word(value) ^ (negative << Word(63)))
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
    end = min(begin + WINDOW, text.size)
    whole = begin + (end - begin) // _BLOCK * _BLOCK
    for at in range(begin, whole, _BLOCK):
        here = places(text, at, Byte(_COMMA), Byte(_CLOSE))
        more = count + Int(ones(here))
        for place in range(SPARE):  # as many as there mostly are; those too many are overwritten
            found[Word(count + place)] = at + Int(trailing_zeros(here))
            here &= here - Word(1)
        for place in range(count + SPARE, more):
            found[Word(place)] = at + Int(trailing_zeros(here))
            here &= here - Word(1)
        count = more
    for at in range(whole, end):
        if text[at] == _COMMA or text[at] == _CLOSE:
            found[count] = at
            count += 1
    return count
