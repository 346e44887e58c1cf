"""The tokens of one choice as text, as they come: whole characters, and never a part of a stop text."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

_CONTEXT = 8
"""Tokens of the prompt that are decoded with the answer, so that a first space is kept where one belongs."""


class GeneratedText:
    """The text of one choice."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        """``tokenizer``: one of transformers, backed by ``tokenizers``."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=list(prompt[-_CONTEXT:]), skip_special_tokens=True)
        self._held: list[int] = []
        """The last tokens, as long as they do not end a character."""
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self._given = 0
        self.stopped = False
        """True once a stop text came."""

    @property
    def given(self) -> int:
        """The number of characters that were given out."""
        return self._given

    def add(self, token: int) -> str:
        """The characters that are certain after another token."""
        before = len(self._text)
        if (piece := self._stream.step(self._tokenizer, token)) is None:
            self._held.append(token)
        else:
            self._held.clear()
            self._text += piece
        end = len(self._text)
        if self._stops and end > before:
            found = [at for stop in self._stops if (at := self._text.find(stop, max(0, before - self._longest))) >= 0]
            if found:
                self.stopped, end = True, min(found)
                self._text = self._text[:end]
            else:
                end -= self._begun()
        return self._give(end)

    def rest(self) -> str:
        """The characters that were held back, once no token comes any more; an incomplete one is U+FFFD."""
        if self._held and not self.stopped:
            self._text += self._tokenizer.decode(self._held, skip_special_tokens=True)
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _begun(self) -> int:
        """The length of the longest end of the text with which a stop text begins."""
        tail = self._text[-self._longest :]
        ends = (
            length
            for stop in self._stops
            for length in range(min(len(stop), len(tail)), 0, -1)
            if tail.endswith(stop[:length])
        )
        return max(ends, default=0)
