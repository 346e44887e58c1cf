"""The tokens of one choice as text, as they come: whole characters, and never a part of a stop text."""

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are only a part of a character."""
_CONTEXT = 8
"""Tokens of the prompt that are decoded with the answer, so that a first space is kept where one belongs."""


class GeneratedText:
    """The text of one choice, up to the first stop text in it, however the tokens divide it.

    A character is given out once no stop text can begin at it or before it, whatever comes.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str], unstopped: int = 0) -> None:
        """``tokenizer``: one of transformers; ``unstopped``: the first tokens, in which no stop text ends the text."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = _DecodeStream(tokenizer if backend is None else backend, list(prompt[-_CONTEXT:]))
        self._stops, self._unstopped = stops, unstopped
        self._text = ""
        self.given = 0
        """The number of characters that were given out."""
        self.stopped = False
        """True once a stop text came."""

    def add(self, token: int) -> str:
        """The characters that are certain after another token."""
        self._text += self._stream.step(token)
        if self._unstopped > 0:
            self._unstopped -= 1
            piece, self.given = self._text[self.given :], len(self._text)
            return piece
        return self._give(self._certain())

    def rest(self) -> str:
        """The characters that were held back, once no token comes any more; an incomplete one is U+FFFD."""
        if not self.stopped:
            self._text += self._stream.rest()
        return self._give(len(self._text))

    def _certain(self) -> int:
        """The end of the text in which no stop text begins that is still to be completed."""
        text, places = self._text, range(self.given, len(self._text)) if self._stops else ()
        return next((at for at in places if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))

    def _give(self, end: int) -> str:
        """Give out the text before ``end``, or before the first stop text if that begins there or earlier."""
        found = [at for stop in self._stops if 0 <= (at := self._text.find(stop, self.given)) <= end]
        if found:
            self.stopped, end = True, min(found)
            self._text = self._text[:end]
        piece = self._text[self.given : end]
        self.given = end
        return piece


class _DecodeStream:
    """Text of tokens as they come. Unlike that of tokenizers, it takes texts that later tokens change.

    In a run of bytes that is no UTF-8, a tokenizer with byte fallback turns the good ones before into U+FFFD too.
    """

    def __init__(self, tokenizer: Any, ids: list[int]) -> None:
        self._tokenizer, self._ids = tokenizer, ids
        self._before = len(ids)
        """The number of ``ids`` whose text was given out; the last of these are decoded for the spaces behind them."""

    def step(self, token: int) -> str:
        """Return the text of the tokens since the last text; none as long as they do not end a character."""
        self._ids.append(token)
        text = self.rest()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._ids, self._before = self._ids[self._before :], len(self._ids) - self._before
        return text

    def rest(self) -> str:
        """Return the text of the tokens since the last text, whether they end a character or not."""
        known, text = (
            str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in (self._ids[: self._before], self._ids)
        )
        if not text.startswith(known):  # a character that the prompt begins belongs to the text
            known = known.rstrip(_INCOMPLETE)
        return text[len(known) :]
