"""The tensors of a checkpoint's files, pickled ones among them: only tensors are unpickled, and no code is run."""

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of files that torch pickles."""
_SAFETENSORS: Final = ".safetensors"
_HOLDERS: Final = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")
"""Keys below which training programs keep the tensors of a model."""
_FIRST: Final = ("model", "pytorch_model")
"""The names of the files that transformers writes."""
_NO_MODELS: Final = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
"""The beginnings of the names of files that hold no model."""


class ConversionError(ValueError):
    """A checkpoint cannot be converted."""


def tensor_files(source: Path) -> list[Path]:
    """Return the files of tensors of a folder, or the file itself. Raises ConversionError for none, or a choice."""
    if source.is_file():
        return [source]
    for index in sorted(source.glob("*.index.json")):
        return _indexed(index)
    files = [
        file for file in sorted(source.iterdir())
        if file.suffix in {*PICKLED, _SAFETENSORS} and not file.name.startswith(_NO_MODELS)
    ]  # fmt: skip
    if not files:
        raise ConversionError(f"expected a file of tensors ({', '.join((*PICKLED, _SAFETENSORS))}) in {source}")
    named = [file for file in files if file.stem in _FIRST]
    if len(named or files) > 1:
        names = ", ".join(file.name for file in named or files)
        raise ConversionError(
            f"{source} has several files of tensors ({names}); name one of them in place of the folder"
        )
    return named or files


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, which are in its folder."""
    try:
        named = json.loads(index.read_text("utf-8"))["weight_map"].values()
        names = sorted({Path(str(name)).name for name in named})
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConversionError(f"{index.name} is no index of files of tensors: expected weight_map") from None
    files = [index.parent / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConversionError(f"{index.name} names {', '.join(missing)}, and the folder has no such file")
    return files


def read_tensors(files: list[Path]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of these files by name, and what else they hold. Raises ConversionError."""
    tensors, others = dict[str, Tensor](), list[str]()
    for file in files:
        for name, value in _entries(_loaded(file), others):
            if name in tensors:
                raise ConversionError(f"{file.name} has {name} again")
            tensors[name] = value
    if not tensors:
        raise ConversionError(f"{files[0].name} holds no named tensors")
    return tensors, others


def _loaded(file: Path) -> Any:
    try:
        if file.suffix == _SAFETENSORS:
            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as fault:
        reason = " ".join(str(fault).split())
        at = reason.find("GLOBAL ")
        what = reason[at : at + 120].partition(" was not")[0] if at >= 0 else reason[:200]
        raise ConversionError(
            f"{file.name} holds more than tensors ({what}), which only code could read; save its state_dict alone"
        ) from None
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, SafetensorError) as fault:
        raise ConversionError(f"{file.name} cannot be read: {' '.join(str(fault).split())[:200]}") from None


def _entries(value: Any, others: list[str], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of what a file holds, and note the rest."""
    if not isinstance(value, Mapping):
        others.append(f"{prefix or 'the file'}: {type(value).__name__}")
        return
    if not any(isinstance(part, Tensor) for part in value.values()):
        holder = next((name for name in _HOLDERS if isinstance(value.get(name), Mapping)), None)
        if holder is not None:
            others += [f"{prefix}{name}" for name in value if name != holder]
            yield from _entries(value[holder], others, f"{prefix}{holder}: ")
            return
    for name, part in value.items():
        if isinstance(part, Tensor) and part.layout == torch.strided:
            yield str(name), part
        else:
            others.append(f"{prefix}{name}: {type(part).__name__}")
