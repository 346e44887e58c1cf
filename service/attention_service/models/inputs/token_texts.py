r"""Tokens as text: the bytes that each adds among its neighbours, and single tokens as people read them.

A token has no text of its own: ``▁the`` is ``the`` at the beginning of a text and `` the`` elsewhere, ``##ing`` has no
space before it, and some tokens are a part of a character. So each is decoded with the tokens before it.
"""

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
"""The text of bytes that are only a part of a character."""
_LETTERS: Final[Any] = bytes_to_unicode  # has no annotations
_BYTE_OF: Final[dict[str, int]] = {letter: byte for byte, letter in _LETTERS().items()}
"""The byte that each character of a byte-level token stands for."""
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte of sentencepiece."""
_CONTEXT: Final = 8
"""Tokens of a prompt that are decoded with what follows, so that a first space is kept where one belongs."""


class TokenDecoder:
    """The facts of a tokenizer about the text of its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer: Any = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend
        decoder = getattr(backend, "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        kinds = {step["type"] for step in state.get("decoders", [state]) if step}
        self._by_bytes = "ByteLevel" in json.dumps(state)
        self.by_bytes_alone = bool(kinds) and kinds <= {"ByteLevel", "Fuse"}
        """True if every token stands for the same bytes everywhere."""
        self.has_byte_tokens = "ByteFallback" in kinds
        """True if bytes that belong to no token are tokens such as ``<0xE2>``."""
        self._word_pieces = "WordPiece" in kinds
        self._names = frozenset() if tokenizer is None else frozenset(tokenizer.all_special_tokens)
        self._special = frozenset() if tokenizer is None else self._special_ids()
        self._readable: dict[int, str] = {}  # of the vocabulary at most

    def _special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self._tokenizer.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def name(self, token: int) -> str | None:
        """The token as the vocabulary has it; None of one that it does not have."""
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token)
        return None if name is None else str(name)

    def is_special(self, token: int) -> bool:
        """True for a token that a text leaves out."""
        return token in self._special

    def raw(self, token: int) -> bytes | None:
        """The bytes of a token that are the same whatever stands beside it; None if they depend on that."""
        name = self.name(token) if self.by_bytes_alone or self.has_byte_tokens else None
        if name is None:
            return None
        if self.by_bytes_alone:
            return bytes(map(_BYTE_OF.__getitem__, name)) if _BYTE_OF.keys() >= {*name} else name.encode()
        byte = _BYTE.fullmatch(name)
        return bytes.fromhex(byte[1]) if byte else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens, without the special ones; spaces stay as they are."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=True))
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def written(self, ids: Sequence[int]) -> str:
        """The text of some tokens, with the names of special ones; the ids of a model without a tokenizer."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        texts = TokenTexts(self)
        parts = [
            (self.name(token_id) or "").encode() if self.is_special(token_id) else texts.add(token_id)
            for token_id in ids
        ]
        return b"".join([*parts, texts.rest()]).decode(errors="replace")

    # ── single tokens, for reading ───────────────────────────────────────────────────────────────────────────────────

    def readable(self, ids: Sequence[int]) -> list[str]:
        r"""Each token without the marks of the tokenizer, and bytes as the text that they are; ids if it has none.

        Bytes that are part of a character are written as ``\xe2``, so that different tokens look different.
        """
        if self._tokenizer is None:
            return [str(token_id) for token_id in ids]
        if new := [token for token in dict.fromkeys(ids) if token not in self._readable]:
            for token, name in zip(new, self._tokenizer.convert_ids_to_tokens(new), strict=True):
                self._readable[token] = str(token) if name is None else self._clean(str(name))
        return [self._readable[token] for token in ids]

    def _clean(self, name: str) -> str:
        if name in self._names:
            return name
        if self._by_bytes:
            return shown(bytes(map(_BYTE_OF.__getitem__, name))) if _BYTE_OF.keys() >= {*name} else name
        if self._word_pieces:
            return name.removeprefix("##")
        if byte := _BYTE.fullmatch(name):
            return shown(bytes.fromhex(byte[1]))
        return name.replace("▁", " ")


class TokenTexts:
    """The bytes that tokens add to a text, one behind the other: joined, they are the text.

    A character that several tokens make is divided where the tokenizer names bytes, and else comes with its last token.
    """

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int] = ()) -> None:
        """``prompt``: the tokens before, whose text is not told."""
        self._decoder = decoder
        self._window: list[int] = []
        """The tokens with which the next one is decoded: the last with a text, and all behind it."""
        self._known = ""
        """The text of these that was told."""
        context = [token_id for token_id in prompt if not decoder.is_special(token_id)][-_CONTEXT:]
        self.begun = _unfinished(b"".join(map(self.add, context)))
        """The bytes of a character that the prompt begins and does not end."""

    def peek(self, token: int) -> bytes:
        """The bytes of a token, if it came next; none of a special one, or of a part that a later token tells."""
        decoder = self._decoder
        if decoder.is_special(token):
            return b""
        raw = decoder.raw(token)
        if raw is None or (
            raw == b" " and not (self._window or decoder.by_bytes_alone)
        ):  # a first space may be no text
            return self._new(token)
        return raw

    def add(self, token: int) -> bytes:
        """The bytes of the next token."""
        written = self.peek(token)
        if self._decoder.by_bytes_alone or self._decoder.is_special(token):
            return written
        self._window.append(token)
        if written:
            self._window = [token]
            self._known = self._decoder.decode(self._window)
        return written

    def rest(self) -> bytes:
        """The bytes that were left to a later token, once none comes any more."""
        if self._decoder.has_byte_tokens or not self._window:
            return b""
        text = self._decoder.decode(self._window)
        rest = text.removeprefix(self._known) if text.startswith(self._known) else ""
        self._window, self._known = [], ""
        return rest.encode()

    def _new(self, token: int) -> bytes:
        text, known = self._decoder.decode([*self._window, token]), self._known
        if not text.startswith(known):  # bytes that were no character before are a part of one now, or of none
            known = known.rstrip(INCOMPLETE)
        new = text[len(known) :]
        if new.endswith(INCOMPLETE) and not self._decoder.has_byte_tokens:
            is_part = not (self._decoder.name(token) or "").endswith(INCOMPLETE)
            return b"" if is_part else new.encode()
        return new.encode()


def shown(raw: bytes) -> str:
    r"""Bytes as text; those of no character as ``\xe2``."""
    return raw.decode(errors="backslashreplace")


def _unfinished(raw: bytes) -> bytes:
    """The bytes at the end that begin a character."""
    reader = codecs.getincrementaldecoder("utf-8")("replace")
    reader.decode(raw)
    return reader.getstate()[0]
