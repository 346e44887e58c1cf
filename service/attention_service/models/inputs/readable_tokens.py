"""Tokens as people read them."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_LETTERS: Final[Any] = bytes_to_unicode  # has no annotations
_BYTES: Final[dict[str, int]] = {letter: byte for byte, letter in _LETTERS().items()}
"""The byte that each character of a byte-level token stands for."""
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A byte of sentencepiece."""


class ReadableTokens:
    r"""Writes tokens for reading: without the marks of the tokenizer, and bytes as the text that they are.

    Bytes that are part of a character are written as ``\xe2``, so that different tokens look different.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._special: frozenset[str] = frozenset() if tokenizer is None else frozenset(tokenizer.all_special_tokens)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None else json.dumps(json.loads(backend.to_str()).get("decoder"))
        self._by_bytes = "ByteLevel" in decoder
        self._word_pieces = "WordPiece" in decoder

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens of these ids; the ids themselves without a tokenizer."""
        if self._tokenizer is None:
            return [str(each) for each in ids]
        found = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [str(each) if token is None else self._clean(str(token)) for each, token in zip(ids, found, strict=True)]

    def _clean(self, token: str) -> str:
        if token in self._special:
            return token
        if self._by_bytes:
            return _as_text(bytes(map(_BYTES.__getitem__, token))) if _BYTES.keys() >= {*token} else token
        if self._word_pieces:
            return token.removeprefix("##")
        if byte := _BYTE.fullmatch(token):
            return _as_text(bytes.fromhex(byte[1]))
        return token.replace("▁", " ")


def _as_text(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")
