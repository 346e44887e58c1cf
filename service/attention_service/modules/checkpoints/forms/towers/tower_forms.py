"""The forms of timm and of OpenCLIP: folders whose tensors are those of classes of transformers, under other names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import DTYPES, Form, FormReader, Stored
from attention_service.modules.checkpoints.forms.towers import openclip_towers, timm_towers
from attention_service.modules.checkpoints.json_objects import UnreadableJson, read_object

_MAX_CONFIG_BYTES: Final = 2**26
"""Bytes of a config."""
_OF_TRANSFORMERS: Final = "model.safetensors", "model.safetensors.index.json"


def is_openclip(folder: Path) -> bool:
    """True for a folder of OpenCLIP that transformers cannot read itself."""
    own = openclip_towers.CONFIG, openclip_towers.TENSORS
    return all((folder / name).is_file() for name in own) and not any(
        (folder / name).exists() for name in _OF_TRANSFORMERS
    )


def _openclip(stored: Stored) -> Form | None:
    if not is_openclip(stored.place):
        return None
    name = openclip_towers.CONFIG
    try:
        config = read_object((stored.place / name).resolve(), _MAX_CONFIG_BYTES)
    except UnreadableJson as why:
        raise InvalidCheckpoint.at("checkpoint", f"{name} of {stored.place.name} {why}") from why
    return _made(openclip_towers.openclip_tower, config, stored, openclip_towers.TENSORS)


def _timm(stored: Stored) -> Form | None:
    if not stored.place.is_dir() or not timm_towers.is_timm(stored.config):
        return None
    return _made(timm_towers.timm_tower, stored.config, stored, timm_towers.TENSORS)


def _made(make: Callable[..., Form], config: Mapping[str, Any], stored: Stored, file: str) -> Form:
    """The form of a file, by the shapes of its tensors and the dtype of the first of floats."""
    place = (stored.place / file).resolve()
    headers = {name: header for name, header in stored.headers.items() if stored.names[name] == place}
    if not headers:
        raise InvalidCheckpoint.at("checkpoint", f"it has no {file}, and nothing pickled is read; convert it")
    dtypes = [DTYPES[header.dtype] for header in headers.values() if header.dtype in DTYPES]
    try:
        return make(config, {name: header.shape for name, header in headers.items()}, (dtypes or ["float32"])[0])
    except (ValueError, IndexError, ZeroDivisionError) as fault:  # tensors of shapes that no such file has
        raise InvalidCheckpoint.at("checkpoint", f"the shapes of {file} are of no such model: {fault}") from fault


OPENCLIP: Final = FormReader(_openclip, is_openclip)
TIMM: Final = FormReader(_timm)
