"""The tokens of one choice as text, as they come: whole characters, and never a part of a stop text."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from attention_service.models.inputs.token_texts import TokenDecoder, TokenTexts


class PlacedToken(NamedTuple):
    """A token in a text."""

    raw: bytes
    """The bytes that it adds to the text."""
    begin: int
    """The first character of the text that it is, or is a part of; of a token without text, the next one."""
    end: int
    """The character behind its last."""


class Characters:
    """A text that comes in bytes. Those that are no UTF-8 become U+FFFD."""

    def __init__(self, begun: bytes = b"") -> None:
        """``begun``: the first bytes of a character, before the text."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(begun)
        self._count = 0

    def add(self, raw: bytes) -> tuple[PlacedToken, str]:
        """Take the bytes of a token. Returns its place, and the characters that are whole with it."""
        first, is_within = self._decode(raw[:1])
        begin = self._count + len(first) - (1 if raw and not is_within else 0)
        others, is_within = self._decode(raw[1:])
        self._count += len(first) + len(others)
        return PlacedToken(raw, begin, self._count + (1 if raw and is_within else 0)), first + others

    def rest(self) -> str:
        """Return the character that has not ended, as U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _decode(self, raw: bytes) -> tuple[str, bool]:
        """The characters that end in the next bytes, and True if another begins in them."""
        text, (pending, _) = self._utf8.decode(raw), self._utf8.getstate()
        if b"\xed\xa0" <= pending < b"\xee":  # half a surrogate, which this decoder refuses at its third byte only
            return text + self._utf8.decode(b"", final=True), False
        return text, bool(pending)


class GeneratedText:
    """The text of one choice, up to the first stop text in it, however the tokens divide it.

    A character is given out once no stop text can begin at it or before it, whatever comes. The bytes of its tokens,
    joined, are the text; where a stop text ends it they go on with that.
    """

    def __init__(
        self, decoder: TokenDecoder, prompt: Sequence[int], stops: Sequence[str], unstopped: int = 0,
        *, echoed: bool = False,
    ) -> None:  # fmt: skip
        """``unstopped``: the first tokens, in which no stop text ends the text; ``echoed``: the prompt is told too.

        A character that the prompt begins belongs to the text, and to its first token unless the prompt is told.
        """
        self._tokens = TokenTexts(decoder, prompt)
        self._owed = b"" if echoed else self._tokens.begun
        self._characters = Characters(self._tokens.begun if echoed else b"")
        self._stops, self._unstopped = stops, unstopped
        self._text = ""
        self.last = PlacedToken(b"", 0, 0)
        """The last token."""
        self.given = 0
        """The number of characters that were given out."""
        self.stopped = False
        """True once a stop text came."""

    def peek(self, token: int) -> bytes:
        """The bytes of a token, if it came next."""
        return self._with_owed(self._tokens.peek(token))

    def add(self, token: int) -> str:
        """The characters that are certain after another token."""
        raw = self._with_owed(self._tokens.add(token))
        if raw:
            self._owed = b""
        self.last, new = self._characters.add(raw)
        self._text += new
        if self._unstopped > 0:
            self._unstopped -= 1
            piece, self.given = self._text[self.given :], len(self._text)
            return piece
        return self._give(self._certain() if self._stops else len(self._text))

    def pass_over(self) -> str:
        """Take a token that adds nothing to the text, and return that."""
        self.last = PlacedToken(b"", len(self._text), len(self._text))
        return ""

    def rest(self) -> str:
        """The characters that were held back, once no token comes any more; an incomplete one is U+FFFD."""
        if not self.stopped:
            raw = self._tokens.rest()
            more, new = self._characters.add(raw)
            self.last = self.last._replace(raw=self.last.raw + raw, end=max(self.last.end, more.end))
            self._text += new + self._characters.rest()
        return self._give(len(self._text))

    def _with_owed(self, raw: bytes) -> bytes:
        """The bytes of the next token, behind those of the character that it goes on with."""
        goes_on = bool(raw) and raw[0] & 0xC0 == 0x80
        return self._owed + raw if goes_on else raw

    def _certain(self) -> int:
        """The end of the text in which no stop text begins that is still to be completed."""
        text, places = self._text, range(self.given, len(self._text))
        return next((at for at in places if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))

    def _give(self, end: int) -> str:
        """Give out the text before ``end``, or before the first stop text if that begins there or earlier."""
        for stop in self._stops:
            if 0 <= (at := self._text.find(stop, self.given)) <= end:
                self.stopped, end = True, at
        if self.stopped:
            self._text = self._text[:end]
        piece = self._text[self.given : end]
        self.given = end
        return piece
