"""Tokenizers of each kind, made here, beside the text of their tokens by the definition of the kind."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END, UNKNOWN = "</s>", "<unk>"
LEAST = 16
"""Tokens of the smallest vocabulary: a model is tried with some when it is loaded."""
_LETTERS = bytes_to_unicode()
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_METASPACE = ["▁", "▁▁", "▁the", "the", "▁café", "s", "中", "!", "▁a▁b", "\N{REPLACEMENT CHARACTER}"]


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and the bytes that its tokens are."""

    tokenizer: Any
    names: list[str]
    """The tokens by their ids."""
    text: Any
    """Returns the bytes of tokens, by their names, without the special ones."""

    def bytes_of(self, ids):
        """The bytes of the text of tokens."""
        return self.text([self.names[each] for each in ids if self.names[each] not in {END, UNKNOWN}])


def _kind(names, decoder, text):
    names = [UNKNOWN, END, *names]
    names += [f"{names[3]}{at}" for at in range(LEAST - len(names))]
    spoken = Tokenizer(WordLevel({name: at for at, name in enumerate(names)}, unk_token=UNKNOWN))
    if decoder is not None:
        spoken.decoder = decoder
    spoken.add_special_tokens([AddedToken(END, special=True), AddedToken(UNKNOWN, special=True)])
    return Kind(PreTrainedTokenizerFast(tokenizer_object=spoken, eos_token=END, unk_token=UNKNOWN), names, text)


def _byte(name):
    return bytes.fromhex(name[3:5]) if name in _BYTES else name.replace("▁", " ").encode()


def _metaspace(names):
    first = [each.replace("▁", "") for each in names[:1]]
    return "".join([*first, *(each.replace("▁", " ") for each in names[1:])]).encode()


def _word_pieces(names):
    behind = (each[2:] if each.startswith("##") else f" {each}" for each in names[1:])
    return "".join([*names[:1], *behind]).encode()


def _byte_level(names):
    known = {letter: byte for byte, letter in _LETTERS.items()}
    return b"".join(bytes(known[letter] for letter in name) for name in names)


def _words_with_ends(names):
    return "".join(each.replace("</w>", " ") for each in names).removesuffix(" ").encode()


@cache
def kinds():
    """Return the kinds by name."""
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    pieces = [" the", b" the"[:2], "é", "🐈", "🐈"[:1].encode()[:3], "中".encode()[1:], b" a\xe4", "x"]
    levels = [each if isinstance(each, bytes) else each.encode() for each in pieces]
    levels += [bytes([each]) for each in {*"é🐈中".encode(), 0xFF}]
    lettered = list(dict.fromkeys("".join(_LETTERS[byte] for byte in each) for each in levels))
    python = ByT5Tokenizer()
    return {
        "byte-level": _kind(lettered, decoders.ByteLevel(), _byte_level),
        "Llama 2": _kind(
            [*_METASPACE, *_BYTES], decoders.Sequence([*fallback, decoders.Strip(" ", 1, 0)]),
            lambda names: b"".join(map(_byte, names)).removeprefix(b" "),
        ),
        "Gemma": _kind(
            [*_METASPACE, *_BYTES], decoders.Sequence(fallback), lambda names: b"".join(map(_byte, names))
        ),
        "T5": _kind(_METASPACE, decoders.Metaspace(), _metaspace),
        "without a first space": _kind(
            _METASPACE, decoders.Metaspace(prepend_scheme="never"),
            lambda names: "".join(names).replace("▁", " ").encode(),
        ),
        "WordPiece": _kind(["cat", "##s", "##ing", "on", "é", "##中"], decoders.WordPiece(), _word_pieces),
        "words with ends": _kind(
            ["the</w>", "ca", "t</w>", "é"], decoders.BPEDecoder(suffix="</w>"), _words_with_ends
        ),
        "words": _kind(["the", "cat", "é"], None, lambda names: " ".join(names).encode()),
        "Python": Kind(
            python, [*(python.convert_ids_to_tokens(each) for each in range(259))],
            lambda names: bytes(ord(each) for each in names if len(each) == 1).decode(errors="ignore").encode(),
        ),
    }  # fmt: skip
