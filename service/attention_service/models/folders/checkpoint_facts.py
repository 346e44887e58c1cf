"""Facts of a checkpoint by its files alone: the inputs of its model, and the reason for which it is refused."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.folders.head_kinds import HeadKind
from attention_service.models.folders.input_kinds import HEARD, HEARD_IN_TEXTS, PAIRS, READS
from attention_service.models.folders.tokenizer_files import TEMPLATES
from attention_service.modules.checkpoints.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    MERGE,
    AdapterFiles,
    is_adapter_alone,
)
from attention_service.modules.checkpoints.attention_blocks import blocks_of
from attention_service.modules.checkpoints.checkpoint_files import MAIN_INDEX, OUTSIDE, SINGLE, opened
from attention_service.modules.checkpoints.forms import FORMS
from attention_service.modules.checkpoints.forms.form import Form, Input
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GGUF
from attention_service.modules.checkpoints.forms.quantized.quantized_tensors import quantization_of
from attention_service.modules.checkpoints.import_plan import missing_fields
from attention_service.modules.checkpoints.json_objects import UnreadableJson, json_object
from attention_service.modules.store_files import read_regular

_PROCESSORS: Final = "preprocessor_config.json", "processor_config.json"
"""Files of which a processor of images, or of audio, has one."""
_IMAGE_ENTRIES: Final = re.compile(rb'"(image_\w+|do_resize|crop_size)"')
"""Entries of a processor of images, which one of audio has not."""
_TABLES: Final = "auto_mappings.py", "configuration_auto.py"
_TYPE: Final = re.compile(r'"([\w.-]+)"[,:] "(?!AutoConfig)\w+Config"')
"""A row of the tables of transformers, from a model type to the class of its config."""
_MAX_CONFIG_BYTES: Final = 2**22
"""Bytes of a config of a tokenizer or processor that is looked into."""
_PAIR: Final = frozenset({"text_config", "vision_config"})
_IMAGE_TOKENS: Final = frozenset({"image_token_id", "image_token_index"})
"""Names of the token that stands for an image in a text, in configs of models that read both."""
_MODULES: Final = re.compile(r"(?!max_|first_)\w*(layers?|experts|blocks|depth)")
"""Entries that count modules."""
_FEW_MODULES: Final = 1024
"""The modules of one kind that any checkpoint may have: layers can share a tensor, and a tensor can hold experts."""
_SCALES: Final = re.compile(
    r"\.(weight_scale(_inv|_2)?|weight_zero_point|weight_packed|weight_shape|input_scale|activation_scale|qweight|_weight_qdata"
    r"|qzeros|g_idx|SCB|weight\.(absmax|quant_map|nested_absmax|quant_state\..+))$"
)
"""Ends of the names of tensors without which quantized weights are other numbers."""
_ADAPTERS: Final = re.compile(r"\b(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|hada_w\d_a|ia3_l|base_layer)\b")
"""Parts of the names of an adapter's tensors, as peft writes them."""
_READ: Final = SINGLE, MAIN_INDEX
"""Files of which transformers reads the first that exists."""
_DISTRIBUTED: Final = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""Files that transformers reads as a distributed checkpoint, whatever else a folder holds."""


def inputs_of(
    folder: Path, config: Mapping[str, Any], head: HeadKind | None, *, reads_texts: bool, prepares: bool = False
) -> list[Input]:
    """The inputs that requests to a model may have.

    ``reads_texts``: the folder has a tokenizer. ``prepares``: images are prepared without a file for it.
    """
    classifies = head is not None and head.predicts == "class"
    pairs: list[Input] = ["target"] if config.get("is_encoder_decoder") is True and not classifies else []
    if _reads(config) == "audio":
        return ["audio", *(pairs if reads_texts else ())]
    inputs: list[Input] = ["text"] if reads_texts else []
    if prepares or any(_IMAGE_ENTRIES.search(_beginning(folder / name)) for name in _PROCESSORS):
        inputs.append("images")
    # A decoder of texts with an encoder of images inside, such as GIT, has no token that stands for an image.
    within = "vision_config" in config and "text_config" not in config and _IMAGE_TOKENS.isdisjoint(config)
    if "images" in inputs and reads_texts and within:
        inputs.remove("images")
    kind = _type_of(config)
    if kind in PAIRS and not classifies:
        return inputs
    # Of an encoder of texts beside one of images that are no pair here, the half that reads images is loaded.
    generates = head is not None and head.predicts == "next"
    both = config.keys() >= _PAIR and _IMAGE_TOKENS.isdisjoint(config) and not generates
    if "images" in inputs and both:
        return ["images"]
    if not reads_texts and not _IMAGE_TOKENS.isdisjoint(config):  # images are parts of a text there
        return []
    if "text" in inputs:
        inputs += ["text_pair"] if classifies else []
        says = b'"chat_template"' in _beginning(folder / "tokenizer_config.json")  # as older checkpoints do
        written = kind == "voxtral" and _has(folder, *_PROCESSORS)  # here
        writes = says or written or _has(folder, *TEMPLATES, "additional_chat_templates")
        inputs += ["messages"] if writes else []
        inputs += pairs
        inputs += ["audio"] if kind in HEARD_IN_TEXTS and _hears(folder) else []
    return inputs


def _type_of(config: Mapping[str, Any]) -> str:
    """The entry model_type; empty where it is no text."""
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _hears(folder: Path) -> bool:
    """True if a checkpoint has a feature extractor, and the server the packages that read sounds."""
    return _has(folder, *_PROCESSORS) and find_spec("soundfile") is not None and find_spec("soxr") is not None


def is_taken_for_model(folder: Path) -> bool:
    """True if people take a folder of the repository for a model; a part of one, such as ``1_Pooling``, is none."""
    config = folder / "config.json"
    if folder.suffix == GGUF and folder.is_file():
        return True
    if is_adapter_alone(folder):  # a variant of its base
        return False
    if any(reader.is_at(folder) for reader in FORMS):
        return True
    if not config.is_file():
        return folder.is_dir() and any(folder.glob(f"*{GGUF}"))
    try:
        entries = json_object(_beginning(config))
    except UnreadableJson:
        return True  # which is told when it is opened
    return not {"model_type", "architectures", "architecture"}.isdisjoint(entries)


def lack_of_config(folder: Path) -> str:
    """The reason for which a checkpoint without entries in a config.json is no model."""
    has = "an empty config.json" if (folder / "config.json").is_file() else "no config.json"
    return f"has {has}, which is needed to build the model"


def refusal_of(root: Path, folder: Path, form: Form, tensors: Iterable[str]) -> str | None:
    """The reason for which no process is started for a checkpoint; None if one can try.

    ``tensors``: the names of those of its files.
    """
    config = form.facts.config
    kind = _type_of(config)
    if not kind:
        return "its config.json has no model_type that is a text, by which transformers chooses the class"
    names = [*tensors]
    return (
        _unknown_type(kind, config)
        or _unread(kind, config)
        or form.refusal
        or _too_many(config, names)
        or beyond_the_model(names, quantized=quantization_of(config) is not None)
        or _unnamed(folder, config)
        or _beside(root, folder)
        or link_out(root, folder)
    )  # fmt: skip


def import_instead(folder: Path) -> str:
    """Advice for a model whose attention cannot run here: import its layers, if they can be imported, or why not."""
    if not (folder / "config.json").is_file():  # made without a checkpoint
        return ""
    try:
        checkpoint = opened(folder)
        blocks = blocks_of(checkpoint)
        for block in blocks[:1]:
            missing_fields(checkpoint, block)
    except InvalidCheckpoint as fault:
        return f"; its layers cannot be imported as modules either: {fault.detail}"
    return "; or import its layers as modules (POST /v1/modules/import)" if blocks else ""


def beyond_the_model(tensors: Iterable[str], *, quantized: bool = False) -> str | None:
    """The reason for which a model is refused whose tensors are not its numbers: scales or an adapter change them.

    ``quantized``: config.json says how, so that scales are taken.
    """
    for name in tensors:
        if _SCALES.search(name) and not quantized:
            return (
                f"{name} belongs to quantized weights, and config.json has no quantization_config that says how: the "
                "numbers of the model would be others; take the checkpoint before quantization"
            )
        if _ADAPTERS.search(name):
            return f"{name} belongs to an adapter, without which its numbers are others; {MERGE}"
    return None


def _too_many(config: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """The reason for which a config is refused that asks for more modules than files of so few tensors can have.

    Transformers makes one after the other, before it looks into the files.
    """
    most = max(len(names), _FEW_MODULES)
    for part in (config, *(settings for settings in config.values() if isinstance(settings, Mapping))):
        for entry, value in part.items():
            if (
                isinstance(entry, str)
                and _MODULES.fullmatch(entry)
                and isinstance(value, int | float)
                and not value <= most
            ):
                return f"its config.json says {entry} {str(value)[:40]}, and its files have {len(names)} tensors"
    return None


def _unknown_type(kind: str, config: Mapping[str, Any]) -> str | None:
    known = _known_types()
    if not known or kind in known:
        return None
    if isinstance(config.get("auto_map"), Mapping):
        return (
            f"only code of the checkpoint's own computes model_type {kind[:80]!r}, and no code of a checkpoint is run"
        )
    return f"transformers {version('transformers')} does not know model_type {kind[:80]!r}; a newer one may"


def _unread(kind: str, config: Mapping[str, Any]) -> str | None:
    """The reason for which inputs of a model type cannot be read."""
    if kind in HEARD:
        if find_spec("soundfile") is None or find_spec("soxr") is None:
            return f"models of type {kind} read audio; install the server's extra (attention-service[sound])"
        return None
    if (reads := _reads(config)) is not None:
        advice = "; save the half that reads texts (…ForTextToText)" if kind.startswith("seamless_m4t") else ""
        return f"models of type {kind} read {reads}, which is not supported for this type{advice}"
    return None


def _reads(config: Mapping[str, Any]) -> str | None:
    """The input of a model that reads neither tokens nor images. None for one that does, and for its half that does."""
    named = config.get("architectures")
    if isinstance(named, list) and str(next(iter(named), "")).endswith(("ForTextToText", "WhisperForCausalLM")):
        return None
    return READS.get(_type_of(config))


def _unnamed(folder: Path, config: Mapping[str, Any]) -> str | None:
    if config.get("transformers_weights") or _has(folder, *_READ):
        return None
    return f"transformers reads {' or '.join(_READ)}, and its files have other names; save it anew (save_pretrained)"


def _beside(root: Path, folder: Path) -> str | None:
    """The reason for which a folder is refused whose model takes more than the tensors that are read."""
    if (folder / ADAPTER_CONFIG).exists():
        try:
            why = AdapterFiles.open(folder, root).refused
        except InvalidCheckpoint as fault:
            return fault.detail
        return None if why is None else f"of the adapter beside the model: {why}; or move it elsewhere"
    if (folder / ADAPTER_TENSORS).exists():
        return f"{ADAPTER_TENSORS} lies beside the model without {ADAPTER_CONFIG}; move it elsewhere"
    with os.scandir(folder) as entries:
        shard = next((entry.name for entry in entries if _DISTRIBUTED.fullmatch(entry.name)), None)
    if shard is None:
        return None
    return f"{shard} is a part of a distributed checkpoint, which is not read; save it whole (save_pretrained)"


def link_out(root: Path, folder: Path) -> str | None:
    """The reason for which a folder is refused with a link that transformers would follow out of the repository."""
    top = root.resolve()
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(top)):
                return f"{path.relative_to(folder)} is a {OUTSIDE}"
    return None


@lru_cache(maxsize=1)
def _known_types() -> frozenset[str]:
    """The model types of the installed transformers, from the source of its tables: its import takes seconds."""
    library = find_spec("transformers")
    if library is None or library.origin is None:
        return frozenset()
    tables = [Path(library.origin).parent / "models" / "auto" / name for name in _TABLES]
    return frozenset(name for file in tables if file.is_file() for name in _TYPE.findall(file.read_text("utf-8")))


def _has(folder: Path, *names: str) -> bool:
    return any((folder / name).exists() for name in names)


def _beginning(file: Path) -> bytes:
    """The content of a file; nothing if there is none, or if it is large."""
    try:
        return read_regular(file.resolve(), _MAX_CONFIG_BYTES)
    except OSError:
        return b""
