"""The tokenizer of a checkpoint: its files as they are, or one that is made of a list of tokens."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizer, PreTrainedTokenizerFast

from attention_client.conversion.stored_tensors import ConversionError

_COPIED: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Files of tokenizers that transformers reads."""
_WHOLE: Final = ("tokenizer.json", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
"""Files of which one is enough."""
LIST: Final = "vocab.txt"
_ROLES: Final = {
    "unk_token": ("[UNK]", "<unk>"), "pad_token": ("[PAD]", "<pad>"), "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]", "<cls>", "<s>", "[BOS]"), "sep_token": ("[SEP]", "<sep>", "</s>", "<eos>", "[EOS]"),
}  # fmt: skip
"""The texts that stand for each special token."""
_PIECE: Final = "##"
_BRACKETS: Final = re.compile(r"\[[^\[\]\s]+\]")
_SPECIAL_NAME: Final = re.compile(r"\[[A-Za-z_]{2,}\d*\]|<[^<>\s]+>")
_MAX_TOKENS: Final = 10_000_000


def write_tokenizer(source: Path, target: Path, size: int | None) -> list[str]:
    """Write the tokenizer of a folder, and say how it came about. ``size``: the tokens of the model.

    Raises ConversionError for a list that is none.
    """
    if any((source / name).is_file() for name in _WHOLE):
        names = [name for name in _COPIED if (source / name).is_file()]
        for name in names:
            shutil.copyfile(source / name, target / name)
        return [f"copied: the tokenizer, {', '.join(names)}"]
    lists = [source / LIST, source.parent / LIST]
    file = next((vocabulary for vocabulary in lists if vocabulary.is_file()), None)
    if file is None:
        return ["left out: a tokenizer; the folder has no file of one, so the model takes tokens alone"]
    tokens = _tokens(file)
    roles = {role: text for role, texts in _ROLES.items() for text in texts if text in tokens}
    where = "" if file.parent == source else " in the folder above"
    said = [f"assumed: {LIST}{where} has a token a line, {len(tokens)} of them; the first has id 0"]
    if size is not None and len(tokens) > size:
        raise ConversionError(f"{LIST} has {len(tokens)} tokens, and the model has embeddings of {size}")
    pieces = any(token.startswith(_PIECE) for token in tokens)
    made, how = _wordpiece(tokens, roles, _lowers(source)) if pieces else _words(tokens, roles)
    made.save_pretrained(target)
    return [
        *said,
        how,
        f"assumed: special tokens {', '.join(f'{role} {text}' for role, text in roles.items()) or 'none'}",
    ]


def _tokens(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise ConversionError(f"{file.name} cannot be read as UTF-8: {type(fault).__name__}") from None
    while lines and not lines[-1]:
        lines.pop()
    tokens = {line: at for at, line in enumerate(lines)}
    if not 0 < len(lines) <= _MAX_TOKENS or len(tokens) < len(lines):
        twice = next((line for at, line in enumerate(lines) if tokens[line] != at), "")
        raise ConversionError(
            f"{file.name} is no list of tokens: {f'{twice!r} comes twice' if lines else 'it is empty'}"
        )
    return tokens


def _lowers(source: Path) -> bool | None:
    """The ``do_lower_case`` of tokenizer_config.json; None if it says nothing."""
    try:
        said = json.loads((source / "tokenizer_config.json").read_text("utf-8")).get("do_lower_case")
    except (OSError, ValueError, AttributeError):
        return None
    return said if isinstance(said, bool) else None


def _wordpiece(tokens: dict[str, int], roles: dict[str, str], said: bool | None) -> tuple[Any, str]:
    capitals = any(token != token.lower() for token in tokens if token not in roles.values())
    lowers = not capitals if said is None else said
    why = f"{'' if capitals else 'no '}token has a capital" if said is None else "tokenizer_config.json says so"
    case = f"{'lower case' if lowers else 'case is kept'}, for {why}"
    kind: Any = BertTokenizer
    return kind(
        vocab=tokens, do_lower_case=lowers, **roles
    ), f"assumed: WordPiece, for tokens begin with {_PIECE}; {case}"


def _words(tokens: dict[str, int], roles: dict[str, str]) -> tuple[Any, str]:
    """A tokenizer of whole tokens: characters, or the longest tokens that come one behind the other."""
    plain = [token for token in tokens if token not in roles.values()]
    words = [token for token in plain if len(token) > 1]
    letters = all(map(_is_special, words))
    made = Tokenizer(models.WordLevel(tokens, unk_token=roles.get("unk_token") or next(iter(tokens))))
    split: Any = pre_tokenizers.Split(Regex("." if letters else _longest(words)), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    begin, end = roles.get("cls_token"), roles.get("sep_token")
    if begin and end:
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1",
            special_tokens=[(begin, tokens[begin]), (end, tokens[end])],
        )  # fmt: skip
    how = "a character is a token" if letters else "a text is cut into the longest tokens from its begin on"
    more: dict[str, Any] = {"additional_special_tokens": words} if letters and words else {}
    named = f", and {', '.join(words)} are tokens of their own" if more else ""
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, **roles, **more), f"assumed: {how}{named}; spaces only part tokens"


def _longest(words: Sequence[str]) -> str:
    """The pattern of the longest of these words at a place, else of what is in brackets, else of a character."""
    bracketed = [r"\[[^\[\]\s]*\]"] if any(map(_BRACKETS.fullmatch, words)) else []
    return "|".join([*map(re.escape, sorted(words, key=len, reverse=True)), *bracketed, "."])


def _is_special(token: str) -> bool:
    """True for a token in brackets that names something, such as [HUMAN]."""
    return _SPECIAL_NAME.fullmatch(token) is not None
