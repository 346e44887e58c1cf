"""Keys and values of texts of alike lengths in one tensor a layer: a row a text, with places for the tokens to come.

A decoder's texts have those of an encoder too, in a slab beside it with the same rows, to which no token is added.
Shapes: R rows of a slab, H heads, K keys, D width.
"""

from contextlib import suppress
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from attention_service.models.costs.generation_memory import ROWS_OF_TEXTS


class TextSlab:
    """The keys and values of texts that have fewer than ``places`` tokens, or as many where none is added."""

    def __init__(self, places: int, encoded: int | None = None) -> None:
        """``encoded``: the places of the tokens that an encoder made of each text; None without one."""
        self.places = places
        self.encoded = None if encoded is None else TextSlab(encoded)
        """The keys and values of the cross-attentions, by the same rows."""
        self.encoded_places = encoded
        self.texts: list[DynamicCache] = []
        self.counts: list[int] = []
        """The tokens of each text."""
        self._tensors: dict[int, list[Tensor]] = {}
        """Keys and values ``[rows, H, places, D]`` by layer."""

    def add(self, text: DynamicCache, tokens: int, encoded: DynamicCache | None = None) -> None:
        """Take over the keys and values of a text, and those that its encoder made.

        If memory is missing, the text keeps them.
        """
        if self.encoded is not None and encoded is not None:
            self.encoded.add(encoded, encoded.get_seq_length())
            try:
                self._add(text, tokens)
            except RuntimeError:
                self.encoded.remove(encoded, give_back=True)
                raise
            return
        self._add(text, tokens)

    def _add(self, text: DynamicCache, tokens: int) -> None:
        row = len(self.texts)
        held = {number: layer for number, layer in enumerate(text.layers) if isinstance(layer, DynamicLayer)}
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
        row = self.texts.index(text)
        try:
            self._remove(row, give_back=give_back)
        finally:
            if self.encoded is not None:
                self.encoded._remove(row, give_back=give_back)

    def _remove(self, row: int, *, give_back: bool) -> None:
        text, last, count = self.texts[row], len(self.texts) - 1, self.counts[row]
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

    @property
    def layers(self) -> list[int]:
        """The numbers of the layers that have keys and values."""
        return sorted(self._tensors)

    def tensors(self, layer: int) -> list[Tensor]:
        """The keys and values of a layer, ``[rows, H, places, D]``."""
        return self._tensors[layer]


def _rows(given: Tensor, kept: int, count: int) -> Tensor:
    """A copy of the first rows, with so many in all."""
    rows = given.new_zeros((count, *given.shape[1:]))
    rows[:kept] = given[:kept]
    return rows
