"""The way of one checkpoint to a folder that servers and transformers open, with a line for each step."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from attention_client.conversion.model_classes import ClassMatch, matched_class, model_type_of
from attention_client.conversion.stored_tensors import ConversionError, read_tensors, tensor_files
from attention_client.conversion.vocabulary_files import write_tokenizer

_NAMES_IN_LINE: Final = 40
"""Names in one line."""
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def convert(source: Path, target: Path, model_type: str | None = None) -> Iterator[str]:
    """Write a checkpoint anew, and yield what was read, assumed, renamed, left out and written.

    source: a folder with config.json, or a file of tensors in one; target: a folder that does not exist yet;
    model_type: one of transformers, in place of that which config.json names. Raises ConversionError; the target is
    whole, or is not there.
    """
    if target.exists():
        raise ConversionError(f"{target} exists; name a new folder")
    if not source.exists():
        raise ConversionError(f"{source} does not exist; expected a folder, or a file of tensors")
    folder = source if source.is_dir() else source.parent
    config = _config(folder)
    files = tensor_files(source)
    tensors, others = read_tensors(files)
    yield f"read: {len(tensors)} tensors of {', '.join(file.name for file in files)}"
    if others:
        yield f"left out: {_names(others)}"
    kind, reason = model_type_of(config, tensors, model_type)
    yield f"assumed: a model of the type {kind}, {reason}"
    match = matched_class(config, kind, tensors)
    yield from _told(match, config, tensors)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield from _write(match, tensors, folder, made)
        made.chmod(0o755)
        made.rename(target)
    except OSError as fault:
        raise ConversionError(f"{target} cannot be written: {fault.strerror}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    yield f"wrote: {target}"


def quiet() -> None:
    """Leave out the warnings and bars of transformers, whose lines would stand among those of a conversion."""
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConversionError(
            f"{folder} has no config.json; write one with model_type and the sizes of the model"
        ) from None
    except (OSError, ValueError) as fault:
        raise ConversionError(f"{file} cannot be read: {str(fault)[:200]}") from None
    if not isinstance(config, dict):
        raise ConversionError(f"{file} holds no object")
    return config


def _told(match: ClassMatch, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the ways in which the class was found."""
    name, named = match.kind.__name__, config.get("architectures") or []
    instead = f", in place of {', '.join(map(str, named))}" if named and named != [name] else ""
    yield f"assumed: {name}{instead}, whose {len(match.names)} tensors have these names and shapes"
    for (removed, added), count in match.prefixes.most_common():
        yield f"renamed: {removed or '(nothing)'} to {added or '(nothing)'} at the begin of {count} names"
    for name, stored in match.heads.items():
        yield f"assumed: {stored} is {name}, by its shape {list(tensors[stored].shape)}"
    if match.heads and "num_labels" not in config and "id2label" not in config:
        yield f"assumed: {match.config.num_labels} classes, whose names the checkpoint does not tell"
    if "auto_map" in config:
        yield "left out: auto_map of config.json, for no code of a checkpoint is run"
    if left := [stored for stored in tensors if stored not in match.names.values()]:
        yield f"left out: {_names(left)}, which {match.kind.__name__} does not have"


def _write(match: ClassMatch, tensors: Mapping[str, Tensor], source: Path, target: Path) -> Iterator[str]:
    config = match.config
    states = {name: tensors[stored].detach().clone().contiguous() for name, stored in match.names.items()}
    dtypes = [x.dtype for x in states.values() if x.dtype in _FLOATS]
    dtype = max(_FLOATS, key=dtypes.count) if dtypes else torch.float32
    states = {name: x.to(dtype) if x.is_floating_point() else x for name, x in states.items()}
    config.dtype = dtype
    yield from _known_ends(config)
    with torch.device("meta"):
        model = match.kind(config)
    if _own_output(model, states):
        config.tie_word_embeddings = False
        yield "assumed: output embeddings of their own, for they differ from those of the input"
        with torch.device("meta"):
            model = match.kind(config)
    model.load_state_dict(states, strict=False, assign=True)
    model.tie_weights()
    if model.can_generate():
        model.generation_config = type(model.generation_config).from_model_config(config)
    model.save_pretrained(target)
    yield f"wrote: model.safetensors in {str(dtype).removeprefix('torch.')}, and config.json"
    table = model.get_input_embeddings()
    size = None if table is None or not hasattr(table, "weight") else len(table.weight)
    yield from write_tokenizer(source, target, size)


def _known_ends(config: Any) -> Iterator[str]:
    """Take ids of special tokens that the vocabulary does not have out of a config."""
    known = getattr(config.get_text_config(), "vocab_size", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(config, name, None)
        if known is not None and isinstance(given, int) and not 0 <= given < known:
            setattr(config, name, None)
            yield f"left out: {name} {given} of config.json, for the vocabulary has {known} tokens"


def _own_output(model: Any, states: Mapping[str, Tensor]) -> bool:
    """True if the checkpoint has two tensors of other numbers for one of the class."""
    first = dict[int, str]()
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name in states:
            other = first.setdefault(id(parameter), name)
            if parameter.ndim > 1 and not torch.equal(states[other], states[name]):
                return True
    return False


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_IN_LINE} more" if len(names) > _NAMES_IN_LINE else ""
    return ", ".join(names[:_NAMES_IN_LINE]) + more
