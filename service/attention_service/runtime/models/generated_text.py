"""The tokens of one choice as text, as they come: whole characters, and never a part of a stop text."""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are only a part of a character."""
_CONTEXT = 8
"""Tokens of the prompt that are decoded with the answer, so that a first space is kept where one belongs."""


class GeneratedText:
    """The text of one choice."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str]) -> None:
        """``tokenizer``: one of transformers."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokenizer = tokenizer if backend is None else backend
        self._stream = _DecodeStream(self._tokenizer, list(prompt[-_CONTEXT:]))
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
        if (piece := self._stream.step(token)) is None:
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


class _DecodeStream:
    """Text of tokens as they come. Unlike that of tokenizers, it takes texts that later tokens change.

    In a run of bytes that is no UTF-8, a tokenizer with byte fallback turns the good ones before into U+FFFD too.
    """

    def __init__(self, tokenizer: Any, ids: list[int]) -> None:
        self._tokenizer, self._ids = tokenizer, ids
        self._before = len(ids)
        """The number of ``ids`` whose text was given out; the last of these are decoded for the spaces behind them."""

    def step(self, token: int) -> str | None:
        """Return the text of the tokens since the last text; None if they do not end a character."""
        self._ids.append(token)
        known, text = (
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._ids[: self._before], self._ids)
        )
        known = known.rstrip(_INCOMPLETE)  # a character that the prompt begins belongs to the text
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return None
        self._ids, self._before = self._ids[self._before :], len(self._ids) - self._before
        return str(text[len(known) :])
