"""Folders of timm: a config.json that has an ``architecture`` and a ``pretrained_cfg``, and a safetensors file."""

import math
from collections.abc import Mapping
from typing import Any, Final

from attention_service.modules.checkpoints.forms.form import Form, ImageSteps, Resizing
from attention_service.modules.checkpoints.forms.towers.timm_classes import as_class
from attention_service.modules.checkpoints.forms.towers.timm_trunk import trunk_of
from attention_service.modules.checkpoints.forms.towers.tower import INTERPOLATIONS, Shapes, tower_form, unlike
from attention_service.modules.checkpoints.forms.towers.tower_entries import TowerEntries
from attention_service.modules.checkpoints.json_objects import index_of

TENSORS: Final = "model.safetensors"
_MODES: Final[Mapping[str, Resizing]] = {
    "center": "shortest",
    "squash": "squash",
    "border": "longest",
}
_IMAGENET: Final = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLASSIFIES: Final = ("ForImageClassification", "ForImageClassificationWithTeacher")


def is_timm(config: Mapping[str, Any]) -> bool:
    """True for a config.json that timm wrote; older ones have all entries side by side."""
    own = "pretrained_cfg" in config or {"input_size", "mean", "std"} <= config.keys()
    return isinstance(config.get("architecture"), str) and own and "model_type" not in config


def timm_tower(config: Mapping[str, Any], shapes: Shapes, dtype: str) -> Form:
    """The model of a folder of timm. Raises InvalidCheckpoint for one that no class of transformers computes."""
    whole = TowerEntries(config, "config.json")
    stated = whole.object("pretrained_cfg") if "pretrained_cfg" in config else whole
    size = stated.size("input_size", (224, 224))
    if stated.flag("fixed_input_size"):  # as timm does; else images of any size are taken
        size = whole.object("model_args").size("img_size", size)
    trunk = trunk_of(str(config["architecture"]), shapes, "", size, config)
    entries, parts = as_class(trunk)
    labels = _labels(config, stated.stated, trunk.head)
    named = {"id2label": labels} if labels and entries["architectures"][0].endswith(_CLASSIFIES) else {}
    entries |= {**named, "dtype": dtype, "transformers_weights": TENSORS}
    return tower_form("timm", entries, trunk.moved(parts), image_steps(stated, size), shapes)


def image_steps(stated: TowerEntries, size: tuple[int, int]) -> ImageSteps:
    """The steps of timm's evaluation. Raises InvalidCheckpoint."""
    share, mode = stated.number("crop_pct", 0.875, 0.05, 2.0), stated.text("crop_mode", "center")
    interpolation = stated.text("interpolation", "bicubic")
    if mode not in _MODES or interpolation not in INTERPOLATIONS:
        raise unlike(f"its images are prepared by crop_mode {mode[:40]!r} and interpolation {interpolation[:40]!r}")
    mean, std = (stated.three(key, own) for key, own in zip(("mean", "std"), _IMAGENET, strict=True))
    scale = math.floor(size[0] / share), math.floor(size[1] / share)
    border = tuple(round(255 * value) for value in mean)
    return ImageSteps(size, scale, _MODES[mode], interpolation, mean, std, border)


def _labels(config: Mapping[str, Any], stated: Mapping[str, Any], count: int) -> dict[int, str]:
    """The names of the classes; none if the config has none."""
    named = config.get("label_names") or stated.get("label_names") or config.get("labels") or stated.get("labels")
    numbered = enumerate(named) if isinstance(named, list) else named.items() if isinstance(named, Mapping) else ()
    label_by_number = {number: str(value) for key, value in numbered if (number := index_of(str(key))) is not None}
    if label_by_number.keys() != {*range(count)}:
        label_by_number = {number: f"LABEL_{number}" for number in range(count)}
    return label_by_number
