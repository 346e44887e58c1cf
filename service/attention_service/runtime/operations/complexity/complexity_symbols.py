"""The meaning of the letters in asymptotic orders such as ``O(n²·d)``."""

import re
from collections.abc import Mapping
from typing import Final

LETTERS: Final[Mapping[str, str]] = {
    "n": "keys; also queries if both lengths vary",
    "m": "queries",
    "p": "past keys",
    "b": "sequences in the batch",
    "d": "width of all heads together",
    "h": "heads",
    "w": "adjacent keys that the masks leave a query",
    "g": "global tokens, or the prefix length",
    "r": "keys in a query's random blocks",
    "s": "distance between stripes or summaries, in keys",
    "c": "keys in a summary",
}
"""Letters of exact attention. A method can give a letter another meaning: see ``Approximation.letters``."""
_LETTER: Final = re.compile(r"(?<![a-zA-Z])[a-z](?![a-zA-Z])")


def explained(orders: str, own: Mapping[str, str]) -> dict[str, str]:
    """Explain each letter in some orders; ``own`` gives the letters that a method defines."""
    known = {**LETTERS, **own}
    return {letter: known[letter] for letter in dict.fromkeys(_LETTER.findall(orders))}
