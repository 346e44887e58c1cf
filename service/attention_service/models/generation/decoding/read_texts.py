"""Keys and values of texts that were generated before, for prompts that begin as these texts do.

A conversation sends all of itself again with each turn. What was read of it before is kept until others need its
place, so that only what is new is read.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from transformers.cache_utils import DynamicCache

from attention_service.models.generation.decoding.joined_prompts import cut, is_cuttable, watches_prompt
from attention_service.models.generation.decoding.running_text import RunningText

LEAST: Final = 64
"""Tokens that a prompt must share with a text, so that they are worth a pass of its own over the rest."""


@dataclass(eq=False)
class _Read:
    reader: str
    adapter: object
    """The mark of the adapter by which it was read; None for the base."""
    edits: Hashable
    """The mark of the edits with which it was read; None for none."""
    ids: npt.NDArray[np.int64]
    past: DynamicCache
    bytes: int


class ReadTexts:
    """The texts of a model that were read last, as many as fit into some bytes."""

    def __init__(self, limit: int = 0) -> None:
        self.bytes = 0
        self._limit = limit
        self._texts: list[_Read] = []
        """The texts, the one that was used last at the end."""

    def can_take(self, text: RunningText, tokens: int) -> bool:
        """True if the past of a text holds the keys and values of so many tokens, and of nothing else."""
        past = text.past
        if tokens < LEAST or not self._limit or text.alone or watches_prompt(text) or not text.reads_tokens_alone:
            return False
        return isinstance(past, DynamicCache) and all(is_cuttable(each, tokens) for each in past.layers)

    def keep(self, reader: str, text: RunningText) -> None:
        """Keep the past of a text that has ended, which is whole again. ``reader``: who may read on from it."""
        if text.edits.begin_later:
            return  # its next turn reads the answer as a part of the prompt, without the edits
        past = text.past
        size = sum(x.nbytes for layer in past.layers for x in (layer.keys, layer.values))
        if size > self._limit:
            return
        new = _Read(reader, _mark(text), text.edits.key, np.asarray(text.ids[: text.seen]), past, size)
        for old in [each for each in self._texts if _made_as(each) == _made_as(new)]:
            if len(old.ids) <= len(new.ids) and _shared(old.ids, new.ids) == len(old.ids):
                self._drop(old)  # the new one says all that it does
        while self.bytes + size > self._limit:
            self._drop(self._texts[0])
        self._texts.append(new)
        self.bytes += size

    def read(self, reader: str, text: RunningText) -> int:
        """Give a text whose prompt is unread the keys and values of its first tokens. Returns their number.

        The last token is always left, since its logits choose the next one.
        """
        prompt, found, best = np.asarray(text.ids[:-1]), None, 0
        edits = None if text.edits.begin_later else text.edits.key
        for each in self._texts:
            same = _made_as(each) == (reader, _mark(text), edits)
            if same and (shared := _shared(each.ids, prompt)) >= max(LEAST, best):
                found, best = each, shared
        if found is None or 2 * best < len(prompt):
            return 0
        for own, whole in zip(text.past.layers, found.past.layers, strict=True):
            cut(own, whole, 0, best)
        text.seen = best
        self._texts.remove(found)
        self._texts.append(found)
        return best

    def _drop(self, text: _Read) -> None:
        self._texts.remove(text)
        self.bytes -= text.bytes


def _made_as(text: _Read) -> Hashable:
    """Equal for texts of which one may read on from the other."""
    return text.reader, text.adapter, text.edits


def _mark(text: RunningText) -> object:
    return None if text.adapter is None else text.adapter.mark


def _shared(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """The number of tokens with which both begin."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
