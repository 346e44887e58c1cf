"""Keys and values of texts of alike lengths in one tensor a layer: a row a text, with places for the tokens to come.

Shapes: R rows of a slab, H heads, K keys, D width.
"""

from contextlib import suppress
from typing import Any, Final

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_LEAST: Final = 64
"""Tokens that the smallest slab has places for; each larger one has twice as many, up to ``_STEP``."""
_STEP: Final = 1024
"""Tokens by which longer slabs grow."""
ROWS_OF_TEXTS: Final = 1.5
"""The most rows that a slab has for each of its texts."""


def slab_places(tokens: int) -> int:
    """The places of the slab in which a text of so many tokens lies before its next one."""
    if tokens >= _STEP:
        return (tokens // _STEP + 1) * _STEP
    places = _LEAST
    while places <= tokens:
        places *= 2
    return places


class Slab:
    """The keys and values of texts that have fewer than ``places`` tokens."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.texts: list[DynamicCache] = []
        self.counts: list[int] = []
        """The tokens of each text."""
        self._tensors: dict[int, list[Tensor]] = {}
        """Keys and values ``[rows, H, places, D]`` by layer."""

    def add(self, text: DynamicCache, tokens: int) -> None:
        """Take over the keys and values of a text. If memory is missing, the text keeps them."""
        row = len(self.texts)
        held = {number: each for number, each in enumerate(text.layers) if isinstance(each, DynamicLayer)}
        pairs = {
            number: (x.keys, x.values) for number, x in held.items() if x.keys is not None and x.values is not None
        }
        for number, pair in pairs.items():
            own = self._tensors.setdefault(number, [])
            for at, x in enumerate(pair):
                if at == len(own):
                    own.append(x.new_zeros((1, x.shape[1], self.places, x.shape[3])))
                elif row >= len(own[at]):
                    own[at] = _rows(own[at], row, row + 1 + (row + 1) // 4)
        for number, pair in pairs.items():
            for place, x in zip(self._tensors[number], pair, strict=True):
                start = tokens - x.shape[2]
                place[row] = 0  # a masked key counts nothing, but for a NaN that an earlier text left
                place[row, :, start:tokens] = x[0]
            held[number].keys = held[number].values = pair[0].new_empty((1, pair[0].shape[1], 0, pair[0].shape[3]))
        self.texts.append(text)
        self.counts.append(tokens)

    def remove(self, text: DynamicCache, *, give_back: bool) -> None:
        """Let a text go; ``give_back``: with its keys and values, as it goes on elsewhere.

        Raises what the copy of them does, with the text gone.
        """
        row, last = self.texts.index(text), len(self.texts) - 1
        count = self.counts[row]
        try:
            for number, own in self._tensors.items() if give_back else ():
                layer: Any = text.layers[number]
                kept = count if not layer.is_sliding else min(count, layer.sliding_window - 1)
                layer.keys, layer.values = (x[row : row + 1, :, count - kept : count].clone() for x in own)
                if layer.is_sliding:
                    layer.cumulative_length = count
        finally:
            for own in self._tensors.values():
                for x in own if row != last else ():
                    x[row] = x[last]
            self.texts[row], self.counts[row] = self.texts[last], self.counts[last]
            self.texts.pop()
            self.counts.pop()
            if not self.texts:
                self._tensors.clear()
        for own in self._tensors.values():
            for at, x in enumerate(own):
                if len(x) > ROWS_OF_TEXTS * last:
                    with suppress(RuntimeError):  # without memory for fewer rows, it keeps these
                        own[at] = _rows(x, last, last + last // 4)

    def tensors(self, layer: int) -> list[Tensor]:
        """The keys and values of a layer, ``[rows, H, places, D]``."""
        return self._tensors[layer]


def _rows(given: Tensor, kept: int, count: int) -> Tensor:
    """A copy of the first rows, with so many in all."""
    found = given.new_zeros((count, *given.shape[1:]))
    found[:kept] = given[:kept]
    return found
