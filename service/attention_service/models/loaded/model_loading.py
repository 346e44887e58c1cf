"""A model and its tokenizer from a folder. Nothing is fetched, unpickled, or run that the folder brings."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import torch
import transformers
from torch.nn import init
from transformers import (
    AutoConfig,
    AutoModel,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_utils,
)
from transformers.models.auto import auto_factory
from transformers.utils import logging

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.cancellation import checkpoint
from attention_service.core.tensors import TORCH_DTYPES, is_finite, torch_dtype_name
from attention_service.models.folders.checkpoint_facts import beyond_the_model
from attention_service.models.folders.head_kinds import head_kind
from attention_service.models.folders.input_kinds import HEARD_IN_TEXTS, PAIRS
from attention_service.models.inputs.images.prompt_inputs import image_tokens
from attention_service.models.inputs.images.tower_images import TowerImages
from attention_service.models.inputs.model_limits import SOUND
from attention_service.models.loaded.checkpoint_processors import (
    FAULTS,
    SAFE,
    clean_texts,
    read_feature_extractor,
    read_image_processor,
    read_prompt_processor,
    read_sound_processor,
    read_tokenizer,
    reason_of,
)
from attention_service.models.loaded.form_file import FormFile
from attention_service.models.passes.device_heads import own_part
from attention_service.models.passes.float64_runs import made_in_float64
from attention_service.modules.checkpoints.checkpoint_files import Checkpoint, opened
from attention_service.modules.checkpoints.forms.form import Facts
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GGUF
from attention_service.modules.checkpoints.forms.quantized.quantized_tensors import QUANTIZATION, cache_scheme

VISION_HALVES: Final = ("VisionModelWithProjection", "VisionModel")
"""Ends of the class names of the half of a CLIP, or of another pair of encoders, that reads images."""
_LOGGING: Final[Any] = logging  # its functions have no annotations
_MODELING: Final[Any] = modeling_utils
_FACTORY: Final[Any] = auto_factory
_INIT: Final[Any] = init


class CheckpointParts(NamedTuple):
    """A model, and the readers of its inputs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    processor: Any
    """The processor of images, of text with images, or of sounds; None without one."""
    unread: str | None
    """The reason for which the tokenizer cannot be read, if the checkpoint has one."""
    left_out: list[str]
    """The tensors of the checkpoint that the model does not take, sorted."""
    weights: str
    """The numbers of the model, such as ``float32``, or ``dequantized from GPTQ int4``."""


def load_checkpoint(
    folder: Path,
    dtype: str | None,
    device: torch.device,
    progress: Callable[[float], None],
    free_bytes: int | None = None,
    devices: int = 1,
) -> CheckpointParts:
    """Load the model with its head, if it has one that predicts, its tokenizer, and its processor of other inputs.

    ``dtype``: by default the checkpoint's on a GPU, and float32 on a CPU. ``progress`` is told the share that is
    loaded. ``free_bytes``: bytes of the device for the parameters, if the others are to stay on disk, or beside a GPU
    in the host's memory. All that is not to stay on disk is read into memory. ``devices``: those that the model is
    spread over, each with a process of one group; this one reads its shards alone. Raises InvalidCheckpoint.
    """
    with _quietly(progress), ExitStack() as reading, _left_empty(), _without_adapters():
        try:
            whole = opened(folder)
            facts = whole.form.facts
            config, source, read = _opened(whole, dtype, device, progress)
            take_quantization(config, facts)
            reading.enter_context(_read_into_memory(whole))
            kind = _class_of(config)
            if kind.__name__.endswith(VISION_HALVES) and not isinstance(config, kind.config_class):
                pair, config = config, kind.config_class.from_pretrained(folder, **SAFE)
                config.projection_dim = getattr(pair, "projection_dim", None)
            wanted = "auto" if dtype is None and device.type != "cpu" else TORCH_DTYPES[dtype or "float32"]
            if torch.float64 in {wanted, getattr(config, "dtype", None) if wanted == "auto" else None}:
                reading.enter_context(made_in_float64())
            divided = _divided(config, device, free_bytes, devices)
            options = {"dtype": wanted, **SAFE, **divided, **source, **_generation(facts, kind, config)}
            model, loading = kind.from_pretrained(
                config=config, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True, attn_implementation="eager", **options,
            )  # fmt: skip
        except FAULTS as fault:
            first, _, rest = reason_of(fault, folder).partition("\n")
            reason = f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first
            raise InvalidCheckpoint.at("checkpoint", f"{folder.name} cannot be loaded: {reason}") from fault
        tokenizer, unread = read_tokenizer(folder, config)
        hears = model.main_input_name in SOUND
        processor = read_feature_extractor(folder) if hears else read_image_processor(folder)
        if facts.images is not None:
            processor = TowerImages(facts.images)
        if facts.cleans and tokenizer is not None and tokenizer.is_fast:
            clean_texts(tokenizer)
        if tokenizer is not None and processor is not None and image_tokens(config) is not None:
            processor = read_prompt_processor(folder, config.model_type, tokenizer, processor)
        elif tokenizer is not None and config.model_type in HEARD_IN_TEXTS:
            processor = read_sound_processor(folder, config, tokenizer)
    if loading["mismatched_keys"]:
        reason = _mismatch(sorted(loading["mismatched_keys"])[0], config.to_dict())
        raise InvalidCheckpoint.at("checkpoint", f"{folder.name} cannot be loaded: {reason}")
    left_out = sorted(loading["unexpected_keys"]) if read is None else read
    if (others := beyond_the_model(left_out)) is not None:
        raise InvalidCheckpoint.at("checkpoint", f"{folder.name} cannot be loaded: {others}")
    if lacking := _lacking(model, loading["missing_keys"]):
        raise InvalidCheckpoint.at(
            "checkpoint", f"{folder.name} lacks {len(lacking)} tensors of {type(model).__name__}, such as {lacking[0]}"
        )
    if model.device.type == "meta":
        raise InvalidCheckpoint.at(
            "checkpoint", f"{free_bytes} bytes of memory are too few for one layer of {folder.name} and its computation"
        )
    if (infinite := next(_infinite(model), None)) is not None:
        raise InvalidCheckpoint.at(
            "checkpoint", f"{infinite} of {folder.name} has numbers that are not finite in "
            f"{torch_dtype_name(model.dtype)}; save an earlier step of its training, or load it in a wider dtype",
        )  # fmt: skip
    placed = model if places_of_parts(model) or devices > 1 else model.to(device)
    weights = facts.weights(torch_dtype_name(model.dtype))
    return CheckpointParts(placed.eval().requires_grad_(False), tokenizer, processor, unread, left_out, weights)


def take_quantization(config: Any, facts: Facts) -> None:
    """Take the quantization out of a config, if its weights are unpacked here or the cache alone is quantized.

    The model is then as any other.
    """
    if facts.packed is None and cache_scheme(config.to_dict()) is None:
        return
    for part, name in product((config, getattr(config, "text_config", None)), QUANTIZATION):
        vars(part or config).pop(name, None)


class _Opened(NamedTuple):
    """A checkpoint before its model is made."""

    config: Any
    source: dict[str, Any]
    """The arguments by which transformers finds its tensors."""
    left_out: list[str] | None
    """Tensors that the model does not take, if transformers does not name them."""


def _opened(whole: Checkpoint, dtype: str | None, device: torch.device, progress: Callable[[float], None]) -> _Opened:
    """Open a folder, or a GGUF file. Raises InvalidCheckpoint and what transformers does."""
    place, facts = whole.stored.place, whole.form.facts
    source = {"pretrained_model_name_or_path": place}
    if facts.library is not None:
        entries = dict(facts.config)
        config: Any = AutoConfig.for_model(entries.pop("model_type"), **entries)
        alone = (
            {"add_pooling_layer": False} if {"ViTModel", "DeiTModel"}.intersection(config.architectures or ()) else {}
        )
        return _Opened(config, source | alone, None)
    if place.suffix != GGUF:
        return _Opened(AutoConfig.from_pretrained(place, **SAFE), source, None)
    from attention_service.models.loaded import gguf_loading  # noqa: PLC0415  # the extra gguf

    wanted = dtype or ("float32" if device.type == "cpu" else facts.dtype or "float32")
    opened = gguf_loading.open_gguf(place, _class_of, wanted, progress)
    return _Opened(opened.config, opened.arguments | {"dtype": TORCH_DTYPES[wanted]}, opened.left_out)


def _generation(facts: Facts, kind: Any, config: Any) -> dict[str, Any]:
    """The settings of generation of a checkpoint of another library, which has no file that transformers reads."""
    if facts.library is None or not getattr(kind, "can_generate", bool)():  # AutoModel has none
        return {}
    return {"generation_config": GenerationConfig.from_model_config(config)}


def _lacking(model: Any, missing: Iterable[str]) -> list[str]:
    """The tensors of a model that its checkpoint has not, and that would be random numbers, sorted.

    A pooler that is made on request is left out without them: the states do not depend on it, and there is no pooled
    vector then.
    """
    lacking = sorted(missing)
    poolers = [name for name in lacking if name.startswith("pooler.")]
    if poolers and "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        model.pooler = None
        return [name for name in lacking if name not in poolers]
    return lacking


def _infinite(model: PreTrainedModel) -> Iterator[str]:
    """The parameters that hold NaN or infinity, by name; parameters that stay on disk are not looked at."""
    for name, value in model.named_parameters():
        checkpoint()
        if not value.is_meta and not is_finite(own_part(value)):
            yield name


def _mismatch(mismatch: tuple[str, Sequence[int], Sequence[int]], config: Mapping[str, Any]) -> str:
    """The reason for which a tensor is refused: its name, its shape in the file, and the shape that the config asks."""
    name, stored, wanted = mismatch[0], list(mismatch[1]), list(mismatch[2])
    others = {size for size in wanted if size not in stored}
    entries = [f"{entry} {value}" for entry, value in config.items() if type(value) is int and value in others]
    says = f" ({', '.join(entries[:3])})" if entries else ""
    return f"{name} has shape {stored} in its file, and config.json asks for {wanted}{says}"


def places_of_parts(model: PreTrainedModel) -> list[str]:
    """The devices, and ``disk``, over which a model is divided; none if it is on one device."""
    return [*dict.fromkeys(map(str, getattr(model, "hf_device_map", {}).values()))]


def _divided(config: Any, device: torch.device, free_bytes: int | None, devices: int) -> dict[str, Any]:
    """The arguments by which transformers keeps parts of a model elsewhere, or on other devices.

    A model of whose layers transformers has no plan of tensor parallelism is divided by its experts. In transformers
    5.23, the way ``all_reduce`` gives the experts of gpt-oss a number that their eager function does not take.
    """
    if devices > 1:
        from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415  # takes a second

        by_heads = any(getattr(part, "base_model_tp_plan", None) for part in (config, config.get_text_config()))
        by_experts = 1 if by_heads else devices
        return {
            "distributed_config": DistributedConfig(devices, ep_size=by_experts, ep_implementation="all_to_all"),
        }
    return {} if free_bytes is None else {"device_map": "auto", "max_memory": _memory(device, free_bytes)}


def _memory(device: torch.device, free_bytes: int) -> dict[int | str, int]:
    if device.type == "cpu":
        return {"cpu": free_bytes}
    return {device.index or 0: free_bytes, "cpu": psutil.virtual_memory().available // 2}


def _class_of(config: Any) -> Any:
    """The class that the config names, if it predicts; else the one without a head, or its half that reads images."""
    name = next(iter(config.architectures or []), "")
    names = [] if head_kind(name) is None else [name]
    pair = hasattr(config, "vision_config") and hasattr(config, "text_config") and not image_tokens(config)
    if config.model_type in PAIRS and not name.endswith("ForImageClassification"):
        names = [name]
    elif pair and not name.endswith("ForImageClassification"):
        names = [name.removesuffix("Model") + end for end in VISION_HALVES]
    named = next((getattr(transformers, class_name) for class_name in names if hasattr(transformers, class_name)), None)
    return named if isinstance(named, type) and issubclass(named, PreTrainedModel) else AutoModel


@contextmanager
def _read_into_memory(whole: Checkpoint) -> Iterator[None]:
    """Have transformers read the tensors of a file, and not map it: what the file holds later is then no matter.

    Tensors that are not stored as transformers has them are made when they are read.
    """
    own = _MODELING.safe_open
    whole.form.check()  # before anything is unpacked
    as_stored = all(part.make is None and part.names == (name,) for name, part in whole.tensors.items())

    def reading(file: str, **options: Any) -> Any:
        read = own(file, **options | {"backend": "pread"})
        return read if as_stored else FormFile(read, Path(file), whole)

    _MODELING.safe_open = reading
    try:
        yield
    finally:
        _MODELING.safe_open = own


@contextmanager
def _without_adapters() -> Iterator[None]:
    """Load a base alone, also where peft is installed: ``Adapters`` adds the adapter of its folder, if it has one."""
    own = _MODELING.maybe_load_adapters, _FACTORY.is_peft_available
    _MODELING.maybe_load_adapters = lambda folder, _, **options: (None, folder, options)
    _FACTORY.is_peft_available = lambda: False
    try:
        yield
    finally:
        _MODELING.maybe_load_adapters, _FACTORY.is_peft_available = own


@contextmanager
def _left_empty() -> Iterator[None]:
    """Fill no parameter that is on the meta device with random numbers, which it cannot hold: that imports SymPy."""
    own = _INIT._no_grad_normal_
    _INIT._no_grad_normal_ = lambda x, *args, **options: x if x.is_meta else own(x, *args, **options)
    try:
        yield
    finally:
        _INIT._no_grad_normal_ = own


@contextmanager
def _quietly(progress: Callable[[float], None]) -> Iterator[None]:
    """Tell ``progress`` what transformers would draw as a bar, and keep its reports out of the log."""
    level = _LOGGING.get_verbosity()
    _LOGGING.set_verbosity_error()
    former = _LOGGING.set_tqdm_hook(lambda _, args, options: _LoadingProgress(progress, *args, **options))
    try:
        yield
    finally:
        _LOGGING.set_tqdm_hook(former)
        _LOGGING.set_verbosity(level)


class _LoadingProgress:
    """Takes the place of a progress bar over things that are loaded."""

    def __init__(self, progress: Callable[[float], None], items: Iterable[Any] = (), **_: Any) -> None:
        self._progress = progress
        self._items = list(items)

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._items):
            checkpoint()
            yield item
            self._progress((number + 1) / len(self._items))

    def __enter__(self) -> "_LoadingProgress":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None
