"""The tokenizer of a checkpoint, and its processors of images, sounds and prompts, as transformers reads them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, normalizers
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ViTImageProcessorPil,
    modeling_gguf_pytorch_utils,
)
from transformers.image_processing_base import ImageProcessingMixin
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer
from transformers.models.auto import processing_auto

from attention_service.models.folders.tokenizer_files import TEKKEN, TEMPLATES, Vocabulary, vocabulary_of
from attention_service.models.inputs.sounds.voxtral_prompts import VoxtralPrompts
from attention_service.models.inputs.tokenizer_faults import is_fault
from attention_service.modules.checkpoints.forms.gguf.gguf_form import takes_of
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GGUF, read_header

FAULTS: Final = (
    OSError,
    ValueError,
    ArithmeticError,
    AssertionError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""The errors of transformers for a folder that it cannot load."""
SAFE: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments by which transformers neither downloads nor runs code of the checkpoint."""
_PUNCTUATION: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
"""Source: ``canonicalize_text`` of OpenCLIP's tokenizers."""
_OWN_PILLOW: Final = {"DINOv3ViTImageProcessor": ViTImageProcessorPil}
"""Image processors that transformers has for torchvision alone, and others that take the same steps with Pillow."""
_PROCESSORS: Final[Any] = processing_auto
_GGUF_READER: Final[Any] = modeling_gguf_pytorch_utils


def read_tokenizer(folder: Path, config: Any) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """The checkpoint's tokenizer, or the reason for which it cannot be read; neither if it has no files of one.

    Without the files of its vocabulary, transformers would make one in which all texts have the same tokens.
    """
    own = folder.suffix == GGUF
    vocabulary = None if own else vocabulary_of(folder, config.to_dict())
    if vocabulary is not None and vocabulary.missing is not None:
        return None, vocabulary.missing or None
    if own and not takes_of(read_header(folder)):
        return None, None
    try:
        tokenizer = _read_gguf(folder, config) if vocabulary is None else _read_files(folder, config, vocabulary)
    except BaseException as fault:  # whatever its files do to the package tokenizers
        if not is_fault(fault):
            raise
        reason = " ".join(reason_of(fault, folder).split())
        return None, f"{type(fault).__name__}: {reason}"[:400]
    if vocabulary is not None and vocabulary.files and len(tokenizer) <= len({*tokenizer.all_special_ids}):
        return None, f"{' and '.join(vocabulary.files)} has only special tokens"
    return tokenizer, None


def _read_files(folder: Path, config: Any, vocabulary: Vocabulary) -> PreTrainedTokenizerBase:
    if vocabulary.files == (TEKKEN,):
        return _read_tekken(folder)
    # With mistral-common installed, a folder would otherwise mean other tokens than without.
    return AutoTokenizer.from_pretrained(folder, config=config, mistral_format=False, **SAFE)


def _read_gguf(file: Path, config: Any) -> PreTrainedTokenizerBase:
    with TemporaryDirectory() as alone:  # transformers would prefer a tokenizer.json beside the file
        Path(alone, file.name).symlink_to(file.resolve())
        with _told(config):
            return AutoTokenizer.from_pretrained(alone, gguf_file=file.name, **SAFE)


@contextmanager
def _told(config: Any) -> Iterator[None]:
    """Let transformers choose the class of a GGUF file's tokenizer by this config, which its own reader may refuse."""
    own = _GGUF_READER.load_gguf_checkpoint
    _GGUF_READER.load_gguf_checkpoint = lambda *_, **__: {"config": {"model_type": config.model_type}}
    try:
        yield
    finally:
        _GGUF_READER.load_gguf_checkpoint = own


def _read_tekken(folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer of Mistral AI's own format, which puts its first token before a text as mistral-common does."""
    # Without a template, transformers would have mistral-common write one, if it is installed.
    none = None if any((folder / name).is_file() for name in TEMPLATES) else ""
    made: Any = convert_tekken_tokenizer(str(folder / TEKKEN), none)
    made.add_bos_token = True
    return cast("PreTrainedTokenizerBase", made)


def clean_texts(tokenizer: Any) -> None:
    """Have a fast tokenizer remove punctuation and capitals first. Source: Zhai et al. 2023, as OpenCLIP does."""
    backend = tokenizer.backend_tokenizer
    steps = [
        normalizers.Replace("_", " "), normalizers.Replace(Regex(_PUNCTUATION), ""), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip(),
    ]  # fmt: skip
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([*steps, *own])


def read_image_processor(folder: Path) -> Any:
    """The checkpoint's image processor, by Pillow; None without one."""
    try:
        facts, _ = ImageProcessingMixin.get_image_processor_dict(folder, **SAFE)
        own = _OWN_PILLOW.get(facts.get("image_processor_type", "").removesuffix("Fast"))
        auto: Any = AutoImageProcessor  # has no annotations
        return own(**facts) if own is not None else auto.from_pretrained(folder, backend="pil", **SAFE)
    except FAULTS:
        return None


def read_feature_extractor(folder: Path) -> Any:
    """The checkpoint's feature extractor of sounds; None without one."""
    try:
        auto: Any = AutoFeatureExtractor  # has no annotations
        return auto.from_pretrained(folder, **SAFE)
    except FAULTS:
        return None


def read_prompt_processor(folder: Path, kind: str, tokenizer: Any, images: Any) -> Any:
    """The checkpoint's processor of text with images; None without one that runs with Pillow alone."""
    try:
        whole = image_only(getattr(transformers, _PROCESSORS.PROCESSOR_MAPPING_NAMES[kind]))
        facts, _ = whole.get_processor_dict(folder, **SAFE)
        given = {"image_processor": images, "tokenizer": tokenizer}
        return whole.from_args_and_dict([given.get(name) for name in whole.get_attributes()], facts)
    except FAULTS:
        return None


def read_sound_processor(folder: Path, config: Any, tokenizer: Any) -> Any:
    """The checkpoint's processor of text with sounds; None without one."""
    try:
        if config.model_type == "voxtral":
            return VoxtralPrompts(read_feature_extractor(folder), tokenizer, config)
        auto: Any = AutoProcessor  # has no annotations
        processor = auto.from_pretrained(folder, **SAFE)
    except FAULTS:
        return None
    return processor if getattr(processor, "feature_extractor", None) is not None else None


def image_only(whole: Any) -> Any:
    """The class of a processor, which takes None in the place of a processor of videos: that needs torchvision."""
    module: Any = sys.modules[whole.__module__]
    if hasattr(module, "num2words"):  # writes numbers of a video's frames
        module.num2words = module.num2words or str
    return type(whole.__name__, (whole,), {"check_argument_for_proper_class": lambda *_: None})


def reason_of(fault: BaseException, folder: Path) -> str:
    """The words of a fault, with the name of the folder alone."""
    reason = str(fault).strip()
    if not reason or isinstance(fault, KeyError):  # a key alone
        reason = f"{type(fault).__name__} {reason}".strip()
    return reason.replace(str(folder), folder.name)
