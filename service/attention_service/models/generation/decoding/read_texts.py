"""Pasts of texts that were read, for prompts that begin as these texts do.

A conversation sends all of itself again with each turn. What was read of it before is kept until others need its
place, so that only what is new is read. Keys and values of every token serve any prompt that shares some of them. A
window that has moved on, and a recurrent state, are those of one place: they serve prompts that begin with all tokens
before it. That place is the end of a text, or of its prompt, if its answer was read otherwise than a prompt is.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from attention_service.models.generation.decoding.joined_prompts import watches_prompt
from attention_service.models.generation.decoding.pasts.copied_pasts import alone, bytes_of, copied, cut, is_cuttable
from attention_service.models.generation.decoding.running_text import RunningText
from attention_service.models.passes.module_states import Held

LEAST: Final = 64
"""Tokens that a prompt must share with a text, so that they are worth a pass of its own over the rest."""


@dataclass(eq=False)
class _ReadText:
    reader: str
    adapter: object
    """The mark of the adapter by which it was read; None for the base."""
    edits: Hashable
    """The mark of the edits with which it was read; None for none."""
    ids: npt.NDArray[np.int64]
    past_name: str
    """The argument of the model that has its past."""
    past: Any
    held: Held
    """The states of it that modules of the model keep."""
    is_cuttable: bool
    """True if its past serves prompts that share some of its tokens; else those that begin with all of them."""
    bytes: int

    def usable(self, ids: npt.NDArray[np.int64]) -> int:
        """The number of the first tokens of a prompt that need not be read again."""
        shared = _shared(self.ids, ids)
        return shared if self.is_cuttable or shared == len(self.ids) else 0


class ReadTexts:
    """The texts of a model that were read last, as many as fit into some bytes."""

    def __init__(self, limit: int = 0) -> None:
        self.bytes = 0
        self._limit = limit
        self._texts: list[_ReadText] = []
        """The texts, the one that was used last at the end."""

    def can_take(self, text: RunningText, tokens: int) -> bool:
        """True if the past of a text, which has so many tokens or is to get them, is of these tokens alone."""
        if tokens < LEAST or not self._limit or text.alone or watches_prompt(text):
            return False
        return text.reads_tokens_alone

    def keep(self, reader: str, text: RunningText, *, ended: bool) -> None:
        """Keep the past of a text, which is whole. ``reader``: who may read on from it; ``ended``: nobody else does.

        One that goes on has read its prompt, and no edit that begins later.
        """
        past, held, tokens = text.past, text.held, text.seen
        size = bytes_of((past, held))
        if past is None or size > self._limit:
            return
        edits, ids = None if text.edits.begin_later else text.edits.key, np.asarray(text.ids[:tokens])
        for old in [read for read in self._texts if _made_as(read) == (reader, _mark(text), edits)]:
            if len(old.ids) <= len(ids) and _shared(old.ids, ids) == len(old.ids):
                self._drop(old)  # the conversation goes on from the new one
        while self.bytes + size > self._limit:
            self._drop(self._texts[0])
        cuttable = not held and is_cuttable(past, tokens)
        past, held = copied((past, held), alone if ended else torch.clone)
        self._texts.append(_ReadText(reader, _mark(text), edits, ids, text.past_name, past, held, cuttable, size))
        self.bytes += size

    def read(self, reader: str, text: RunningText, price: int = 1, left: int = 1) -> int:
        """Give a text whose prompt is unread what was read of its first tokens. Returns their number.

        The last ``left`` tokens are always read, since the logits behind them choose the next one. ``price``: that of
        a token behind those that were read, beside that of a token when all are read.
        """
        prompt, longest, best = np.asarray(text.ids[:-left]), None, 0
        edits = None if text.edits.begin_later else text.edits.key
        for read in self._texts:
            same = _made_as(read) == (reader, _mark(text), edits)
            if same and (usable := read.usable(prompt)) >= max(LEAST, best):
                longest, best = read, usable
        if longest is None or best < price * (len(prompt) - best):
            return 0
        if longest.is_cuttable:
            text.state[longest.past_name] = cut(longest.past, best, len(longest.ids))
        else:  # passes write to states in place
            text.state[longest.past_name], text.held = copied((longest.past, longest.held), torch.clone)
        text.seen = best
        self._texts.remove(longest)
        self._texts.append(longest)
        return best

    def _drop(self, text: _ReadText) -> None:
        self._texts.remove(text)
        self.bytes -= text.bytes


def _made_as(text: _ReadText) -> tuple[str, object, Hashable]:
    """Equal for texts of which one may read on from the other."""
    return text.reader, text.adapter, text.edits


def _mark(text: RunningText) -> object:
    return None if text.adapter is None else text.adapter.mark


def _shared(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """The number of tokens with which both begin."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
