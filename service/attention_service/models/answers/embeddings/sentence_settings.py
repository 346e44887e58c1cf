"""The settings of a model's embeddings, from a folder of sentence-transformers of any generation.

Source: sentence-transformers 6.2, ``base/model.py``, ``base/modules/transformer.py`` and ``modules/pooling.py``, which
reads the folders of earlier versions too.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.answers.embeddings.vector_steps import DenseLayer, VectorStep, activation_of, normalized

POOLING_MODES: Final = "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
"""The entries of a pooling before version 6, in the order in which their vectors follow one another."""
_OF_TRANSFORMER: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the config of the module ``Transformer``; the first that exists counts."""
_ARGUMENTS: Final = "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"
_CHANGE_NOTHING: Final = frozenset({
    "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "model_max_length",
    "padding_side", "torch_dtype", "trust_remote_code", "use_fast", "use_safetensors",
})  # fmt: skip
"""Arguments of transformers that change no vector here, besides the length that is read."""
_KINDS: Final[dict[type, str]] = {list: "JSON list", dict: "JSON object"}
_MAX_SETTINGS_BYTES: Final = 2**22
"""Bytes of a file that is read."""
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class SentenceSettings:
    """The way from texts to vectors."""

    modes: tuple[str, ...]
    """Names among ``POOLING_MODES``; the vectors of several follow one another."""
    steps: tuple[VectorStep, ...]
    """The changes of the pooled vectors, in this order."""
    pools_prompt: bool = True
    limit: int | None = None
    """The tokens to which a text is cut; None to take the tokenizer's limit."""
    lowers: bool = False
    """True to write texts in lower case first."""
    chats: bool = False
    """True if a text is the message of a user in the chat template, and a prompt that of the system."""
    prompts: Mapping[str, str] = field(default_factory=lambda: {"query": "", "document": ""})
    default_prompt: str | None = None
    """Its name."""
    dimensions: int | None = None
    """Numbers of a vector that are kept."""


def read_sentence_settings(folder: Path) -> SentenceSettings | None:
    """Read a folder; None for one without ``modules.json``.

    Raises InvalidCheckpoint for one whose vectors are made in a way that is not known here.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = _read(folder, "modules.json", list)
    if not all(isinstance(module, dict) for module in modules):
        raise _refused("modules.json is not a list of objects")
    types = [str(module.get("type", "")) for module in modules]
    if own := [type_name for type_name in types if not type_name.startswith("sentence_transformers.")]:
        raise _refused(f"its embeddings pass {own[0]}, which is code of its own")
    kinds = [type_name.rpartition(".")[2] for type_name in types]
    if unknown := set(kinds) - {"Transformer", "Pooling", "Dense", "Normalize"}:
        raise _refused(f"its embeddings pass {', '.join(sorted(unknown))}, which is not supported")
    if kinds[:2] != ["Transformer", "Pooling"] or {*kinds[2:]} - {"Dense", "Normalize"}:
        raise _refused(f"expected the modules Transformer and Pooling before others; got {', '.join(kinds)}")
    transformer, pooling, *others = (str(module.get("path", "")) for module in modules)
    modes, pools_prompt = _pooling(_read(folder, Path(pooling, "config.json"), dict))
    steps = tuple(_step(folder, kind, path) for kind, path in zip(kinds[2:], others, strict=True))
    return SentenceSettings(modes, steps, pools_prompt, **_transformer(folder, transformer), **_whole(folder))


def _step(folder: Path, kind: str, path: str) -> VectorStep:
    """A module behind the pooling."""
    config = _read(folder, Path(path, "config.json"), dict, optional=kind == "Normalize")
    for name in ("module_input_name", "module_output_name"):
        if (config.get(name) or "sentence_embedding") != "sentence_embedding":
            raise _refused(f"its module {kind} changes other vectors than the pooled ones ({name})")
    if kind == "Normalize":
        return normalized
    activation = _entry(config, "activation_function", str, "torch.nn.Tanh")
    if not activation.startswith("torch.nn."):
        raise _refused(f"expected an activation of torch.nn; got {activation[:80]!r}")
    layer = DenseLayer(
        folder / path / "model.safetensors",
        _size(config, "in_features"),
        _size(config, "out_features"),
        activation.rpartition(".")[2],
        _entry(config, "bias", bool, True),
        _entry(config, "use_residual", bool, False),
    )
    activation_of(layer.activation)
    if not layer.file.is_file():
        raise _refused(f"{path} has no model.safetensors; other files are not read")
    return layer


def _size(config: dict[str, Any], name: str) -> int:
    size = _entry(config, name, int, 0)
    if not 0 < size < 2**20:
        raise _refused(f"expected {name} between 1 and {2**20 - 1}; got {size}")
    return int(size)


def _pooling(config: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The modes, and True if the tokens of a prompt are pooled too."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag) is True] or ["mean"]
    modes = modes if isinstance(modes, list) else [modes]
    if not modes or (unknown := [mode for mode in modes if mode not in POOLING_MODES]):
        raise _refused(f"expected a pooling_mode of {', '.join(POOLING_MODES)}; got {str(modes and unknown[0])[:80]!r}")
    return tuple(modes), _entry(config, "include_prompt", bool, True)


def _transformer(folder: Path, path: str) -> dict[str, Any]:
    """The settings of the module that computes the states of tokens."""
    configs = (_read(folder, Path(path, name), dict, optional=True) for name in _OF_TRANSFORMER)
    config: dict[str, Any] = next((stated for stated in configs if stated), {})
    if (task := config.get("transformer_task", "feature-extraction")) != "feature-extraction":
        raise _refused(f"its transformer_task is {str(task)[:80]!r}, which makes no embeddings")
    if config.get("processing_kwargs"):
        raise _refused("its processing_kwargs are not supported; write them into tokenizer_config.json")
    for name in _ARGUMENTS:
        if unknown := _entry(config, name, dict, {}).keys() - _CHANGE_NOTHING:
            names = ", ".join(sorted(map(str, unknown)))[:80]
            raise _refused(f"its {name} ({names}) are not supported; write them into config.json")
    modalities = _entry(config, "modality_config", dict, {"text": {}})
    chats = "message" in modalities
    way = modalities.get("message" if chats else "text")
    ways = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}
    if not isinstance(way, dict) or any(way.get(name, expected) != expected for name, expected in ways.items()):
        raise _refused("its modality_config makes vectors of a text in a way that is not supported")
    limit = _entry(config, "max_seq_length", int, None)
    for name in ("tokenizer_args", "processor_kwargs"):
        limit = _entry(_entry(config, name, dict, {}), "model_max_length", int, limit)
    if limit is not None and limit < 1:
        raise _refused(f"expected a max_seq_length of 1 or more; got {limit}")
    lowers = _entry(config, "do_lower_case", bool, False)
    if lowers and chats:
        raise _refused("its do_lower_case in a chat template is not supported")
    return {"limit": limit, "lowers": lowers, "chats": chats}


def _whole(folder: Path) -> dict[str, Any]:
    """The settings of the whole: the prompts, and the length of vectors."""
    config = _read(folder, "config_sentence_transformers.json", dict, optional=True)
    if (kind := config.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
        raise _refused(f"it is a {str(kind)[:80]} of sentence-transformers, which makes no embeddings of texts")
    prompts = {"query": "", "document": ""} | _entry(config, "prompts", dict, {})
    if not all(isinstance(prompt, str | None) for prompt in prompts.values()):
        raise _refused("its prompts are not all texts")
    default = _entry(config, "default_prompt_name", str, None)
    if default is not None and default not in prompts:
        raise _refused(f"its default_prompt_name {default[:80]!r} is none of its prompts")
    dimensions = _entry(config, "truncate_dim", int, None)
    if dimensions is not None and dimensions < 1:
        raise _refused(f"expected a truncate_dim of 1 or more; got {dimensions}")
    known = {name: prompt or "" for name, prompt in prompts.items()}
    return {"prompts": known, "default_prompt": default, "dimensions": dimensions}


def _entry(config: dict[str, Any], name: str, kind: type[ValueT], default: Any) -> Any:
    """An entry of this type, or the default if it is missing or null."""
    if (entry := config.get(name)) is None:
        return default
    if not isinstance(entry, kind) or (kind is int and isinstance(entry, bool)):
        raise _refused(f"expected {name} to be of type {kind.__name__}; got {str(entry)[:80]}")
    return entry


def _read(folder: Path, name: str | Path, kind: type, *, optional: bool = False) -> Any:
    """The content of a file inside a checkpoint, which is JSON of this type; ``{}`` without an optional one."""
    file = Path(name)
    if file.is_absolute() or ".." in file.parts:
        raise _refused(f"{name} is outside the checkpoint")
    place = folder / file
    if optional and not place.exists():
        return {}
    try:
        is_read = place.is_file() and place.stat().st_size <= _MAX_SETTINGS_BYTES
        content = json.loads(place.read_bytes()) if is_read else None
    except (OSError, ValueError, RecursionError) as fault:
        raise _refused(f"{name} cannot be read: {type(fault).__name__}") from None
    if not isinstance(content, kind):
        raise _refused(f"{name} is no {_KINDS[kind]} of at most {_MAX_SETTINGS_BYTES} bytes")
    return content


def _refused(detail: str) -> InvalidCheckpoint:
    return InvalidCheckpoint.at("model", detail)
