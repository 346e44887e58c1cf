"""The files from which a checkpoint's tokenizer is read: those of the class by which transformers reads it.

Without these files, transformers makes most classes with an empty vocabulary, in which all texts have the same tokens.
"""

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from attention_service.modules.store_files import read_regular

TEKKEN: Final = "tekken.json"
"""A tokenizer of Mistral AI's, beside or in the place of one of transformers."""
TEMPLATES: Final = "chat_template.jinja", "chat_template.json"
"""Names of the files of a chat template."""
WHOLE: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_PIECES: Final = "tokenizer.model"
_TIKTOKEN: Final = "tiktoken.model"
_PLAIN_CLASS: Final = "TokenizersBackend"
_GENERAL: Final = frozenset({_PLAIN_CLASS, "PythonBackend", "PreTrainedTokenizer", "MistralCommonBackend"})
"""Classes of no type of models."""


class TokenizerClass(NamedTuple):
    """The files that a class of transformers reads."""

    files: tuple[str, ...]
    """The files of a vocabulary; none of a class that reads ``tokenizer.json`` alone, or that needs no file."""
    whole: bool = True
    """True if it reads a ``tokenizer.json`` instead, if there is one."""
    built_in: bool = False
    """True if it is right without any file: its tokens are bytes or characters, or a list of its own."""
    package: str | None = None
    """The package without which transformers makes none."""
    reads: str | None = None
    """The input that it reads if it reads no plain text."""


_LIBRARY: Final[dict[tuple[str, ...], str]] = {
    (): "Esmc XGLM",
    ("vocab.txt",): """Bert ConvBert DPRContextEncoder DPRQuestionEncoder DPRReader DistilBert Electra Funnel LayoutLM
        LayoutLMv2 Lxmert MPNet MobileBert RoFormer Splinter SqueezeBert""",
    ("vocab.json", "merges.txt"): """Bart Blenderbot CLIP CodeGen Cohere Deberta GPT2 GPTNeoX Herbert LED LayoutLMv3
        Longformer Luke MarkupLM Mvp Nougat OpenAIGPT Qwen2 Roberta Whisper""",
    ("spiece.model",): "Albert BigBird FNet Lasr Pegasus Reformer T5 Udop VideoPrism XLNet",
    ("sentencepiece.bpe.model",): "Barthez Camembert LayoutXLM MBart50 MBart MLuke Nllb SeamlessM4T XLMRoberta",
    ("sentencepiece.model",): "RemBert",
    ("spm.model",): "DebertaV2",
    (_PIECES,): "CodeLlama Gemma Llama Parakeet Qwen3_5 Siglip2 Tipsv2",
}
"""The names of classes of the package tokenizers, by the files of a vocabulary. Each reads ``tokenizer.json`` too."""
_OWN: Final[dict[tuple[str, ...], str]] = {
    (): "ByT5 Canine Dia Perceiver",
    ("vocab.txt",): "BertJapanese CpmAnt Esm Tapas",
    ("vocab.txt", "bpe.codes"): "Bertweet Phobert",
    ("vocab.txt", "emoji.json"): "GPTNeoXJapanese",
    ("vocab.txt", "word_shape.json", "word_pronunciation.json"): "RoCBert",
    ("vocab.json",): "FastSpeech2Conformer Mgpstr Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC",
    ("vocab.json", "merges.txt"): "BioGpt BlenderbotSmall CTRL Clvp Flaubert XLM",
    ("vocab-src.json", "vocab-tgt.json", "merges.txt"): "FSMT",
    ("byte_maps.json",): "MyT5",
    ("prophetnet.tokenizer",): "ProphetNet",
    ("spiece.model",): "BertGeneration Cpm GPTSw3 Siglip",
    ("spm_char.model",): "SpeechT5",
    ("sentencepiece.bpe.model",): "PLBart",
    ("sentencepiece.bpe.model", "dict.txt"): "Bartpho",
    ("vocab.json", "sentencepiece.bpe.model"): "M2M100 Speech2Text",
    ("vocab.json", "source.spm", "target.spm"): "Marian",
}
"""Names of classes that are written in Python, likewise; they read no ``tokenizer.json``."""
_BUILT_IN: Final = frozenset({"ByT5", "Canine", "Dia", "Perceiver", "Esmc"})
"""Classes that are right without any file."""
_BOXES: Final = "words with their places on a page"
_READS: Final = {
    **dict.fromkeys(("LayoutLMv2", "LayoutLMv3", "LayoutXLM", "Udop"), _BOXES),
    "Tapas": "tables", "Rag": "two vocabularies",
}  # fmt: skip
"""The inputs of classes that read no plain texts."""
_NEEDED: Final = {
    **dict.fromkeys(("BioGpt", "FSMT", "Flaubert", "XLM"), "sacremoses"),
    **dict.fromkeys(("CpmAnt", "RoFormer"), "rjieba"),
    "FastSpeech2Conformer": "g2p_en", "Wav2Vec2PhonemeCTC": "phonemizer",
}  # fmt: skip
"""The packages that classes import."""
CLASSES: Final = {
    f"{name}Tokenizer": TokenizerClass(files, whole, name in _BUILT_IN, _NEEDED.get(name), _READS.get(name))
    for table, whole in ((_LIBRARY, True), (_OWN, False))
    for files, names in table.items()
    for name in names.split()
} | {_PLAIN_CLASS: TokenizerClass((_PIECES,)), "RagTokenizer": TokenizerClass((), whole=False, reads=_READS["Rag"])}
"""Classes of transformers by their names."""
_PACKAGES: Final = {_TIKTOKEN: "tiktoken", ".model": "sentencepiece", ".spm": "sentencepiece"}
"""The package without which transformers reads no file whose name ends so."""
_TAKEN: Final = re.compile(r"tekken\.json|tokenizer\.model|tiktoken\.model")
"""Parts of names that transformers takes for a vocabulary, whatever the class, if there is no ``tokenizer.json``."""
VOCABULARIES: Final = (
    WHOLE, TEKKEN, _TIKTOKEN, *dict.fromkeys(name for kind in CLASSES.values() for name in kind.files),
)  # fmt: skip
"""Files of which a vocabulary is one or several."""
TEXT_FILES: Final = (
    *VOCABULARIES, _CONFIG, "special_tokens_map.json", "added_tokens.json", "normalizer.json", "entity_vocab.json",
    *TEMPLATES,
)  # fmt: skip
"""Files that say how texts become tokens."""
_MAX_CONFIG_BYTES: Final = 2**22
"""Bytes of a config of a tokenizer that is looked into."""
_ROW: Final = re.compile(r'\(\s*"([\w.-]+)",\s*"(\w+)"(?:\s+if is_(\w+)_available\(\))?')
"""A row of the table of transformers, from a model type to a class, and the package that the class needs."""
_WRONG: Final = re.compile(r"MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS[^{]*\{([^}]*)\}")
"""The set in which transformers has them."""


class Vocabulary(NamedTuple):
    """The vocabulary of a folder."""

    files: tuple[str, ...]
    """The files that it is read from; none if it is built in, or if there is none."""
    missing: str | None
    """The reason for which there is no tokenizer; empty if the folder has no file of one. None if there is one."""

    @property
    def is_there(self) -> bool:
        """True if texts can be read."""
        return self.missing is None


def vocabulary_of(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Find the vocabulary of a checkpoint by its config.json and the names of its files."""
    names = {file.name for file in folder.iterdir()}
    here = [name for name in TEXT_FILES if name in names and (folder / name).exists()]
    full = {name for name in here if (folder / name).stat().st_size}
    if TEKKEN in full and WHOLE not in names:
        return Vocabulary((TEKKEN,), None)
    name = _class_of(folder, config)
    files, missing = _files(name, names, full)
    package = None if _named(folder, config) else _types().lacking.get(str(config.get("model_type")))
    if missing is None and package is not None:
        missing = f"transformers makes {name} with {package}, which this server lacks"
    if missing is None:
        return Vocabulary(files, None)
    empty = sorted({*here} - full)
    return Vocabulary((), (missing + (f"; {empty[0]} is empty" if empty else "")) if here else "")


def _files(name: str, names: Collection[str], full: set[str]) -> tuple[tuple[str, ...], str | None]:
    """The files that a class reads a vocabulary from, and the reason for which it has none.

    ``full``: the files that are not empty.
    """
    tokenizer_class = CLASSES[name]
    if (why := _unable(name)) is not None:
        return (), why
    if tokenizer_class.whole and WHOLE in full:
        return (WHOLE,), None
    files, taken = tokenizer_class.files, [] if WHOLE in names else sorted(filter(_TAKEN.search, names))
    if taken:
        if files != (_PIECES,) or len(taken) > 1 or taken[0] not in {_PIECES, _TIKTOKEN}:
            why = f"in the place of its files, transformers takes {' or '.join(taken)}"
            return (), f"{_wanted(name)}; {why}"
        files = (taken[0],)
    if files and full.issuperset(files):
        why = _lacking(files)
        return (files, None) if why is None else ((), why)
    return (), None if tokenizer_class.built_in else _wanted(name)


def _unable(name: str) -> str | None:
    """The reason for which a class reads no texts, whatever its files."""
    tokenizer_class = CLASSES[name]
    if tokenizer_class.reads is not None:
        return f"{name} reads {tokenizer_class.reads}, and no texts"
    if tokenizer_class.package is None or find_spec(tokenizer_class.package) is not None:
        return None
    return f"transformers makes {name} with {tokenizer_class.package}, which this server lacks"


def _lacking(files: Collection[str]) -> str | None:
    """The reason for which files are not read that only another package can read."""
    package = next((package for end, package in _PACKAGES.items() if any(file.endswith(end) for file in files)), None)
    if package is None or find_spec(package) is not None:
        return None
    read = " and ".join(files)
    return f"transformers reads {read} with {package}, which this server lacks; save the tokenizer as {WHOLE}"


def _wanted(name: str) -> str:
    """The files that a class reads, in words."""
    tokenizer_class = CLASSES[name]
    ways = [WHOLE] if tokenizer_class.whole else []
    ways += [" with ".join(tokenizer_class.files)] if tokenizer_class.files else []
    reads = "transformers reads the texts of this type by" if name == _PLAIN_CLASS else f"{name} reads"
    return f"{reads} {' or '.join(ways)}"


def _class_of(folder: Path, config: Mapping[str, Any]) -> str:
    """The name of the class by which transformers reads a tokenizer: see its ``AutoTokenizer.from_pretrained``."""
    named = _named(folder, config)
    kind = str(config.get("model_type"))
    table = _types()
    if named is not None:
        own = None if kind in table.lacking else table.classes.get(kind)
        if own is not None and _bare(named) != own:
            named = own if own == _PLAIN_CLASS or kind in table.wrong else named
        return _bare(named)
    if kind == "encoder-decoder" and isinstance(encoder := config.get("encoder"), Mapping):
        kind = str(encoder.get("model_type"))
    return table.classes.get(kind, _PLAIN_CLASS)


def _named(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The name of the class that a checkpoint states, if it does."""
    named = _entries(folder / _CONFIG).get("tokenizer_class") or config.get("tokenizer_class")
    return named if isinstance(named, str) else None


def _bare(name: str) -> str:
    """The name of a known class, without the ending that transformers ignores."""
    name = name.removesuffix("Fast")
    return name if name in CLASSES and name not in _GENERAL else _PLAIN_CLASS


def _entries(file: Path) -> dict[str, Any]:
    """The entries of a JSON object; none if there is no such file, or if it is large."""
    try:
        content = json.loads(read_regular(file.resolve(), _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class _Types(NamedTuple):
    """The table of transformers by model type."""

    classes: Mapping[str, str]
    lacking: Mapping[str, str]
    """The package that the class of a type needs, and that is not installed."""
    wrong: Collection[str]
    """The types whose checkpoints name a class that is not theirs."""


@lru_cache(maxsize=1)
def _types() -> _Types:
    """The table of the installed transformers, from its source: its import takes seconds."""
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return _Types({}, {}, ())
    source = (Path(library.origin).parent / "models" / "auto" / "tokenization_auto.py").read_text("utf-8")
    rows = _ROW.findall(source)
    lacking = {
        kind: package for kind, name, package in rows if package and name not in _GENERAL and find_spec(package) is None
    }
    wrong = re.findall(r'"([\w.-]+)"', next(iter(_WRONG.findall(source)), ""))
    return _Types(dict.fromkeys(wrong, _PLAIN_CLASS) | {kind: _bare(name) for kind, name, _ in rows}, lacking, wrong)
