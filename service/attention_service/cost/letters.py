"""What the letters in asymptotic orders stand for, as in ``O(n²·d)``: said here, and nowhere else."""

import re
from collections.abc import Mapping
from typing import Final

LETTERS: Final[Mapping[str, str]] = {
    "n": "keys, and queries where the length of both is varied",
    "m": "queries",
    "p": "past keys",
    "b": "sequences of the batch",
    "d": "width of all heads together",
    "h": "heads",
    "w": "keys side by side that the masks leave a query",
    "g": "global tokens, or the length of a prefix",
    "r": "keys in the blocks drawn at random for a query",
    "s": "keys from one stripe to the next, or to the next summary",
    "c": "keys of a summary",
}
"""Of exact attention, and of methods as far as they have no other: see ``Approximation.letters``."""
_LETTER: Final = re.compile(r"(?<![a-zA-Z])[a-z](?![a-zA-Z])")


def explained(orders: str, own: Mapping[str, str]) -> dict[str, str]:
    """Each letter of some orders, and what it stands for; ``own``: what a method calls by a letter of its own."""
    known = {**LETTERS, **own}
    return {letter: known[letter] for letter in dict.fromkeys(_LETTER.findall(orders))}
