"""The towers of a folder, by its configs and the headers of its tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.towers.openclip_towers import CONFIG, TENSORS, openclip_tower
from attention_service.models.towers.timm_towers import is_timm, timm_tower
from attention_service.models.towers.tower import Tower
from attention_service.modules.checkpoints.json_objects import UnreadableJson, read_object
from attention_service.modules.store_files import open_tensors, reason

_DTYPES: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_LARGEST: Final = 2**26
"""Bytes of a config."""
_OWN: Final = "model.safetensors", "model.safetensors.index.json"


def is_openclip(folder: Path) -> bool:
    """True for a folder of OpenCLIP that transformers cannot read itself."""
    return all((folder / name).is_file() for name in (CONFIG, TENSORS)) and not any(
        (folder / name).exists() for name in _OWN
    )


def tower_of(folder: Path) -> Tower | None:
    """The tower of a folder that timm or OpenCLIP wrote; None for any other folder. Raises InvalidCheckpoint."""
    if is_openclip(folder):
        return _made(openclip_tower, _config(folder, CONFIG), folder / TENSORS)
    if (folder / "config.json").is_file() and is_timm(config := _config(folder, "config.json")):
        if not (folder / _OWN[0]).is_file():
            raise InvalidCheckpoint.at("checkpoint", f"it has no {_OWN[0]}, and nothing pickled is read; convert it")
        return _made(timm_tower, config, folder / _OWN[0])
    return None


def _made(make: Callable[..., Tower], config: Mapping[str, Any], file: Path) -> Tower:
    shapes, dtype = _headers(file)
    try:
        found = make(config, shapes, dtype)
    except (ValueError, IndexError, ZeroDivisionError) as fault:  # tensors of shapes that no such file has
        raise InvalidCheckpoint.at("checkpoint", f"the shapes of {file.name} are of no such model: {fault}") from fault
    found.config["transformers_weights"] = file.name
    return found.of(shapes)


def _headers(file: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """The shapes of all tensors, and the dtype of the first of floats."""
    try:
        with open_tensors(file.resolve()) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            dtypes = [_DTYPES[code] for each in slices.values() if (code := each.get_dtype()) in _DTYPES]
            return {name: tuple(each.get_shape()) for name, each in slices.items()}, (dtypes or ["float32"])[0]
    except (SafetensorError, OSError) as fault:
        raise InvalidCheckpoint.at("checkpoint", f"{file.name} cannot be read: {reason(fault)}") from fault


def _config(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_object((folder / name).resolve(), _LARGEST)
    except UnreadableJson as why:
        raise InvalidCheckpoint.at("checkpoint", f"{name} of {folder.name} {why}") from why
