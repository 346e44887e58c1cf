"""How compiled code and its callers share memory: where what is in it, and how much there must be."""

from typing import Final

from attention_contract.tensors import MAX_RANK

MOST: Final = 32
"""Lists of one text, and numbers that are left to Python, that are told."""

# What is told of a list, in this order, then its sizes.
START, END, FIRST, INTEGRAL, RANK, SIZES = range(6)
ENTRIES: Final = SIZES + MAX_RANK

LATER_ENTRIES: Final = 3
"""What is told of a number that is left to Python: its place in the text, its end, and its place among the numbers."""

STATE: Final = 6
"""What is counted from list to list."""

WINDOW: Final = 2**14
"""Bytes whose commas and closing brackets are found at a time."""
SPARE: Final = 8
"""Places that are written before it is known whether there is something to write."""

MOST_CHARACTERS: Final = 20
"""Of a number that is written, and a comma."""
SLACK: Final = 32
"""Bytes that may be written to behind the text."""
AT_ONCE: Final = 256
"""Numbers that are converted before they are written."""
