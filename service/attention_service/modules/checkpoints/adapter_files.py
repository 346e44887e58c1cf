"""Adapters as files, as peft writes them: their configs, the reasons to refuse them, and the change of each module.

An adapter of the kinds LoRA, rsLoRA and DoRA changes the product of a weight W ``[out, in]`` with its input: W + s·B·A
takes its place, with A ``[r, in]``, B ``[out, r]`` and s = alpha / r, or alpha / √r. DoRA divides each row of that sum
by its length, and multiplies it by a magnitude of its own. Sources: Hu et al. 2021; Kalajdzievski 2023; Liu 2024.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.core.tensors import is_finite
from attention_service.modules.checkpoints.checkpoint_files import MAIN_INDEX, OUTSIDE, SINGLE, inside
from attention_service.modules.checkpoints.json_objects import UnreadableJson, read_object
from attention_service.modules.checkpoints.module_patterns import ModulePatterns, UnreadPattern
from attention_service.modules.store_files import open_tensors, reason

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_TENSORS: Final = "adapter_model.safetensors"
MERGE: Final = "merge it first: PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(new) of peft"
_UNMERGED: Final = frozenset(
    {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CARTRIDGE", "ADAPTION_PROMPT", "CPT"}
)
"""Kinds that add tokens, keys or values, and have no merged form."""
_FILES: Final = ADAPTER_CONFIG, ADAPTER_TENSORS
_PREFIX: Final = "base_model.model."
_RANKS: Final = "rank_pattern"
_PATTERNS: Final = _RANKS, "alpha_pattern"
"""Entries that have numbers by patterns of module paths. Which modules change is read off the tensors' names."""
_LARGEST_RANK: Final = 2**16
_MAX_CONFIG_BYTES: Final = 2**24
"""The largest adapter_config.json that is read."""
_BASE_CHANGED: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations after which W is another matrix than that of the base, so that the adapter is no difference to it."""
_REFUSED: Final = {
    "ensure_weight_tying": "a prediction head that changes with the embedding",
    "alora_invocation_tokens": "an activated LoRA, which applies only after some tokens",
    "arrow_config": "Arrow, which chooses among adapters by the input",
    "kasa_config": "KaSA",
    "layer_replication": "a base whose layers are repeated",
    "megatron_config": "parallel layers of Megatron",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "parameters that belong to no linear layer, as of experts",
    "trainable_token_indices": "single rows of an embedding",
    "use_bdlora": "a block-diagonal LoRA",
    "use_qalora": "a QA-LoRA",
    "velora_config": "VeLoRA",
}
"""Entries of a config that make an adapter of another kind, and their meaning."""
_PART: Final = re.compile(
    r"\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?P<adapter>(?!weight$|bias$)[^.]+))?(\.(?P<kind>weight|bias))?$"
)
"""The end of the name of a tensor of LoRA; older files have the adapter's name in it."""
_WHOLE_MODULE_PARTS: Final = re.compile(r"\.(modules_to_save\.[^.]+|modules_to_save|base_layer)(?=\.)")
"""Parts of the names of whole modules that an adapter brings."""


@dataclass
class ModuleChange:
    """The tensors of an adapter for one module of its base."""

    down: Tensor | None = None
    """A ``[r, in]``; ``[r, tokens]`` of an embedding."""
    up: Tensor | None = None
    """B ``[out, r]``."""
    up_bias: Tensor | None = None
    """``[out]``, of B."""
    magnitude: Tensor | None = None
    """``[out]``; that of DoRA."""
    scale: float = 1.0
    """s."""
    embeds: bool = False
    """True for an embedding."""
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Parameters of the module, by name, in whose places the adapter's are."""

    def merged(self, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """Return the weight ``[out, in]`` with the change; ``transposed``: it is stored ``[in, out]``.

        An embedding has ``[tokens, out]``.
        """
        weight = self.replaced.get("weight", weight)
        if self.down is None or self.up is None:
            return weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        turned = transposed or self.embeds
        whole = weight.to(wide).T if turned else weight.to(wide)
        whole = whole + self.scale * (self.up.to(wide) @ self.down.to(wide))
        if self.magnitude is not None:
            whole = whole * self.gain(weight, transposed=transposed)[:, None]
        return (whole.T if turned else whole).to(weight.dtype).contiguous()

    def gain(self, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """Return DoRA's factor of each output: its magnitude, divided by the length of a row of W + s·B·A."""
        if self.down is None or self.up is None or self.magnitude is None:
            raise ValueError("no DoRA")
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = self.scale * (self.up.to(wide) @ self.down.to(wide))  # [out, in]
        whole = weight.to(wide) + (change.T if transposed or self.embeds else change)
        # Of an embedding, peft takes the length over all tokens.
        length: Tensor = torch.linalg.norm(whole, dim=0 if transposed or self.embeds else 1)
        return self.magnitude.to(wide) / length


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter in a folder."""

    folder: Path
    root: Path
    """The model repository, out of which no link is followed."""
    config: Mapping[str, Any]
    """adapter_config.json."""
    bytes: int
    """Bytes of its tensors."""
    written: int
    """Nanoseconds since 1970 at which its newest file was written."""

    @classmethod
    def open(cls, folder: Path, root: Path | None = None) -> "AdapterFiles":
        """Read its config. ``root``: the model repository, by default the folder. Raises InvalidCheckpoint."""
        root = root or folder
        places = {name: _place(root, folder, name) for name in _FILES}
        try:
            config = read_object(places[ADAPTER_CONFIG], _MAX_CONFIG_BYTES)
        except UnreadableJson as why:
            raise InvalidCheckpoint.at("adapter", f"{ADAPTER_CONFIG} of {folder.name} {why}") from why
        seen = [file.stat() for file in places.values() if file.is_file()]
        size = seen[-1].st_size if len(seen) > 1 else 0
        return cls(folder, root, config, size, max(file_status.st_mtime_ns for file_status in seen))

    @property
    def base(self) -> str | None:
        """The name, or the path, that its config has of its base."""
        named = self.config.get("base_model_name_or_path")
        return named if isinstance(named, str) and named else None

    @property
    def refused(self) -> str | None:
        """The reason for which it is refused, by its config and the names of its files."""
        return _of_other_kind(self.config) or self._without_numbers or self._unread_patterns

    @property
    def _without_numbers(self) -> str | None:
        if not _is_rank(self.config.get("r")) or not _is_number(self.config.get("lora_alpha")):
            return f"its {ADAPTER_CONFIG} has no r of 1 to {_LARGEST_RANK} and lora_alpha as numbers"
        if (self.folder / ADAPTER_TENSORS).is_file():
            return None
        other = ", ".join(sorted(file.name for file in self.folder.glob("adapter_model.*")))
        return f"it has no {ADAPTER_TENSORS}{f' (only {other})' if other else ''}; save it with safe_serialization"

    @property
    def _unread_patterns(self) -> str | None:
        for entry in _PATTERNS:
            numbers = self.config.get(entry) or {}
            fits = _is_rank if entry == _RANKS else _is_number
            if not isinstance(numbers, dict) or not all(map(fits, numbers.values())):
                return f"its {entry} is no object of numbers by patterns of module names"
        try:
            _ = self._patterns
        except UnreadPattern as why:
            return f"{why}; or {MERGE}"
        return None

    @cached_property
    def _patterns(self) -> dict[str, ModulePatterns]:
        """The patterns of each entry. Raises UnreadPattern."""
        return {entry: ModulePatterns(entry, tuple(self.config.get(entry) or ())) for entry in _PATTERNS}

    def check(self) -> None:
        """Raise InvalidCheckpoint if it is refused."""
        if (why := self.refused) is not None:
            raise InvalidCheckpoint.at("adapter", f"{self.folder.name}: {why}")

    def changes(self) -> dict[str, ModuleChange]:
        """Read its tensors: the change of each module, by the module's path in the model that was adapted.

        Raises InvalidCheckpoint for a tensor that belongs to no change, for one whose rank is not that of the config,
        and for one whose numbers are not finite.
        """
        self.check()
        changes: dict[str, ModuleChange] = {}
        for name, value in self._tensors().items():
            if not is_finite(value):
                raise InvalidCheckpoint.at(
                    "adapter", f"{name} of {self.folder.name} has numbers that are not finite; train it again, or save "
                    "it from an earlier step"
                )  # fmt: skip
            path = name.removeprefix(_PREFIX)
            if (part := _PART.search(path)) is not None:
                self._add(changes.setdefault(path[: part.start()], ModuleChange()), part, value, name)
            else:
                module, _, parameter = _WHOLE_MODULE_PARTS.sub("", path).rpartition(".")
                changes.setdefault(module, ModuleChange()).replaced[parameter] = value
        for path, change in changes.items():
            self._complete(path, change)
        return changes

    def merged(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the base, by their names, with the adapter merged into them.

        Raises InvalidCheckpoint if it changes none of them.
        """
        changes, tensors = self.changes(), dict(stored)
        for name, value in stored.items():
            path, _, parameter = name.rpartition(".")
            alike = [
                renamed
                for renamed in changes
                if f".{path}".endswith(f".{renamed}") or f".{renamed}".endswith(f".{path}")
            ]
            if alike:
                tensors[name] = self._merged(alike[0], changes[alike[0]], parameter, value)
        if all(tensors[name] is value for name, value in stored.items()):
            raise InvalidCheckpoint.at("adapter", f"{self.folder.name} changes no tensor of this layer; leave it out")
        return tensors

    def _merged(self, path: str, change: ModuleChange, parameter: str, value: Tensor) -> Tensor:
        """One tensor with the change of its module. Raises InvalidCheckpoint if they do not fit."""
        if change.up_bias is not None:
            raise InvalidCheckpoint.at("adapter", f"{self.folder.name} has biases of B (lora_bias); {MERGE}")
        if parameter != "weight" or change.down is None or change.up is None:
            return change.replaced.get(parameter, value)
        shape = (len(change.up), change.down.shape[1])
        turned = tuple(value.shape) != shape or (shape[0] == shape[1] and bool(self.config.get("fan_in_fan_out")))
        if value.ndim != 2 or tuple(value.T.shape if turned else value.shape) != shape:
            raise InvalidCheckpoint.at(
                "adapter", f"{self.folder.name} changes {path} of {shape[0]} rows and {shape[1]} columns, and that of "
                f"the checkpoint has shape {list(value.shape)}: it is of another base"
            )  # fmt: skip
        return change.merged(value, transposed=turned)

    def _tensors(self) -> dict[str, Tensor]:
        file = _place(self.root, self.folder, ADAPTER_TENSORS)
        try:
            with open_tensors(file) as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as fault:
            raise InvalidCheckpoint.at(
                "adapter", f"{ADAPTER_TENSORS} of {self.folder.name} is not a readable safetensors file: "
                f"{reason(fault)}"
            ) from fault  # fmt: skip

    def _add(self, change: ModuleChange, part: re.Match[str], value: Tensor, name: str) -> None:
        """Take in one tensor of LoRA."""
        role, is_bias = part["part"], part["kind"] == "bias"
        if role == "lora_magnitude_vector":
            change.magnitude = value.flatten()
        elif role.endswith("_A") and not is_bias and value.ndim == 2:
            change.down, change.embeds = value, role == "lora_embedding_A"
        elif role.endswith("_B") and not is_bias and value.ndim == 2:
            change.up = value
        elif role == "lora_B" and is_bias:
            change.up_bias = value
        else:
            raise InvalidCheckpoint.at(
                "adapter", f"{name} of {self.folder.name} has shape {list(value.shape)}, and only adapters of linear "
                f"layers and embeddings are read; {MERGE}"
            )  # fmt: skip

    def _complete(self, path: str, change: ModuleChange) -> None:
        """Check the ranks of a module's tensors, and set its scale. Raises InvalidCheckpoint."""
        if change.down is None and change.up is None and change.magnitude is None:
            return
        if change.down is None or change.up is None:
            raise InvalidCheckpoint.at("adapter", f"{self.folder.name} lacks A or B of {path}; save it again")
        rank, stored = self.rank(path), (len(change.down), change.up.shape[1])
        if stored != (rank, rank):
            raise InvalidCheckpoint.at(
                "adapter",
                f"{self.folder.name} has A {list(change.down.shape)} and B {list(change.up.shape)} of {path}, and its "
                f"{ADAPTER_CONFIG} asks for rank {rank}; correct r or rank_pattern",
            )
        for what, x in (("magnitudes", change.magnitude), ("a bias of B", change.up_bias)):
            if x is not None and x.shape != (len(change.up),):
                raise InvalidCheckpoint.at(
                    "adapter",
                    f"{self.folder.name} has {what} {list(x.shape)} of {path}, and B has {len(change.up)} rows",
                )
        if change.magnitude is None and self.config.get("use_dora"):
            raise InvalidCheckpoint.at("adapter", f"{self.folder.name} lacks the magnitudes of {path}; save it again")
        alpha = self._of_module("alpha_pattern", path, self.config["lora_alpha"])
        change.scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def rank(self, path: str) -> int:
        """Return the rank of a module, by the config."""
        return int(self._of_module("rank_pattern", path, self.config["r"]))

    def _of_module(self, entry: str, path: str, default: float) -> float:
        """The number of the first pattern that a module's path ends with, as peft chooses it."""
        try:
            pattern = self._patterns[entry].first(path)
        except UnreadPattern as why:
            raise InvalidCheckpoint.at("adapter", f"{self.folder.name}: {why}") from why
        return default if pattern is None else float(self.config[entry][pattern])


def _is_number(value: object) -> bool:
    """True for a number that a float holds."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_rank(value: object) -> bool:
    """True for a whole number of rows that a matrix may have."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_RANK


def _of_other_kind(config: Mapping[str, Any]) -> str | None:
    """The reason for which an adapter is refused that is no LoRA, rsLoRA or DoRA, or no difference to its base."""
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        way = "ask its base without it" if kind in _UNMERGED else MERGE
        return f"it is an adapter of kind {kind[:40]}, and only LoRA, rsLoRA and DoRA are read; {way}"
    begun = str(config.get("init_lora_weights", "")).lower()
    if begun.startswith(_BASE_CHANGED):
        return (
            f"it was saved after the initialization {begun[:40]!r}, which changes the base: it is no difference to the "
            "base as it is. Save it as one: save_pretrained of peft with path_initial_model_for_weight_conversion"
        )
    wanted = next((f"its {name} asks for {meaning}" for name, meaning in _REFUSED.items() if config.get(name)), None)
    return None if wanted is None else f"{wanted}, which is not read; {MERGE}"


def _place(root: Path, folder: Path, name: str) -> Path:
    """The path of a file of an adapter, without links. Raises InvalidCheckpoint for a link out of the repository."""
    path = inside(root, folder, name)
    if path is None and (folder / name).is_symlink():
        raise InvalidCheckpoint.at("adapter", f"{name} is a {OUTSIDE}")
    return path or folder / name


def is_adapter(folder: Path) -> bool:
    """Return True if a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_adapter_alone(folder: Path) -> bool:
    """Return True if a folder holds an adapter, and not its base too."""
    return is_adapter(folder) and not any((folder / name).exists() for name in (SINGLE, MAIN_INDEX))


def adapter_at(root: Path, checkpoint: str) -> Path | None:
    """Return the folder of the adapter, without its base, at a path of the repository; None for any other path."""
    place = inside(root, root, checkpoint)
    folder = place.parent if place is not None and place.name == ADAPTER_TENSORS else place
    return folder if folder is not None and is_adapter_alone(folder) else None


def adapter_beside(root: Path, checkpoint: str) -> Path | None:
    """Return the folder of a checkpoint that holds an adapter beside its base; None for any other path."""
    place = inside(root, root, checkpoint)
    folder = place if place is None or place.is_dir() else place.parent
    return folder if folder is not None and folder != root.resolve() and is_adapter(folder) else None


def base_instead(root: Path, folder: Path) -> str:
    """Return the reason for which an adapter without its base has no layers: import those of the base."""
    try:
        base = AdapterFiles.open(folder, root).base
    except InvalidCheckpoint as fault:
        return fault.detail
    path = folder.relative_to(root.resolve()).as_posix()
    of = "a base that its config does not name" if base is None else repr(base[:128])
    return (
        f"{path} is an adapter of {of}, and has no attention layer of its own; import the layer from its base, with "
        f'"adapter": "{path}" beside the checkpoint, or load the base with it as a model (POST /v1/models)'
    )
