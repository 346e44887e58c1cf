"""The adapters of the model repository, each with its base, by their configs and the names of their files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from attention_contract.errors import AttentionError, InvalidCheckpoint, ModelNotFound
from attention_contract.schemas.models import ModelInfo, default_model_name
from attention_service.models.folders.checkpoint_facts import link_out
from attention_service.models.folders.tokenizer_files import TEXT_FILES
from attention_service.modules.checkpoints.adapter_files import AdapterFiles, is_adapter_alone
from attention_service.modules.checkpoints.catalogue import paths
from attention_service.modules.checkpoints.checkpoint_files import located

BETWEEN: Final = ":"
"""Stands between the names of a base and of its adapter."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter of the repository, or one that lies beside its base."""

    checkpoint: str
    """Its path inside the repository."""
    folder: Path
    root: Path
    """The model repository."""
    base: str | None
    """The checkpoint of its base, by its config; None if that is not in the repository."""
    refused: str | None
    """The reason for which it is refused."""
    created: int = 0
    """Seconds since 1970 at which its newest file was written."""

    @property
    def name(self) -> str:
        """Its name."""
        return default_model_name(self.checkpoint)

    @property
    def facts(self) -> dict[str, str]:
        """The facts by which a model's process loads it."""
        return {"name": self.name, "folder": str(self.folder), "root": str(self.root)}

    def check(self) -> None:
        """Raise InvalidCheckpoint if it is refused."""
        if self.refused is not None:
            raise InvalidCheckpoint.at("adapter", f"{self.checkpoint} is no adapter of this server: {self.refused}")

    def variant(self, base: ModelInfo, folder: Path, *, loaded: bool) -> ModelInfo:
        """Describe the base with the adapter. ``folder``: that of the base; ``loaded``: its process has the adapter."""
        others = [
            f"{name} (that of the base is used)"
            for name in TEXT_FILES
            if self.refused is None and (own := self.folder / name).is_file() and not _same(own, folder / name)
        ]
        changed = {
            "id": f"{base.id}{BETWEEN}{self.name}", "checkpoint": self.checkpoint, "created": self.created,
            "base": base.id, "adapter": self.name, "adapters": [], "refused": self.refused or base.refused,
            "left_out": [*base.left_out, *others],
        }  # fmt: skip
        if base.state == "resident" and not loaded:
            changed |= {"state": "idle", "running": 0, "waiting": 0}
        return base.model_copy(update=changed)

    def alone(self) -> ModelInfo:
        """Describe an adapter without its base."""
        return ModelInfo(
            id=self.name, created=self.created, checkpoint=self.checkpoint, state="idle", adapter=self.name,
            refused=self.refused or self._baseless,
        )  # fmt: skip

    @property
    def _baseless(self) -> str:
        return (
            "its base is not in the model repository, by the path or the last part of its base_model_name_or_path; put "
            f"it there, or name another one: BASE{BETWEEN}{self.name} as the model of a request"
        )

    def found_base(self) -> str:
        """The checkpoint of its base. Raises InvalidCheckpoint."""
        self.check()
        if self.base is None:
            raise InvalidCheckpoint.at("model", f"{self.checkpoint} is an adapter: {self._baseless}")
        return self.base


def adapters(root: Path) -> list[AdapterFolder]:
    """Every adapter of the repository that has a folder of its own, by path."""
    known = [*paths(root)]
    alone = {path: None for path in known if is_adapter_alone(Path(*located(root, path)))}
    bases = [path for path in known if path not in alone]
    return [opened(root, path, bases) for path in alone]


def opened(root: Path, path: str, bases: Sequence[str]) -> AdapterFolder:
    """The adapter of a folder. ``bases``: the checkpoints among which its base is looked for."""
    folder = Path(*located(root, path)).resolve()
    try:
        files = AdapterFiles.open(folder, root)
    except AttentionError as fault:
        return AdapterFolder(path, folder, root, None, fault.detail)
    refused = files.refused or link_out(root, folder)
    base, doubt = _base(files.config, bases)
    return AdapterFolder(path, folder, root, base, refused or doubt, files.written // 10**9)


def find_adapter(root: Path, name: str) -> AdapterFolder:
    """The adapter whose path, name, or last part of the path this is. Raises ModelNotFound."""
    known = adapters(root)
    exact = [adapter for adapter in known if name in (adapter.checkpoint, adapter.name)]
    alike = exact or [adapter for adapter in known if adapter.checkpoint.rpartition("/")[2] == name]
    if len(alike) != 1:
        how_many = (
            f"several are called so: {', '.join(adapter.name for adapter in alike)}" if alike else "there is none"
        )
        raise ModelNotFound(f"no adapter {name[:128]!r}: {how_many}; GET /v1/models lists them", param="adapter")
    return alike[0]


def _base(config: Mapping[str, Any], bases: Sequence[str]) -> tuple[str | None, str | None]:
    """The checkpoint that a config names as the base, and the doubt if several have its last part."""
    named = config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return None, None
    named = named.rstrip("/")
    exact = [path for path in bases if path == named or default_model_name(path) == default_model_name(named)]
    last = named.rpartition("/")[2]
    alike = exact or [path for path in bases if path.rpartition("/")[2] == last or path.endswith(f"--{last}")]
    if len(alike) > 1 and not exact:
        return (
            None,
            f"its base {last[:128]!r} may be {' or '.join(alike[:3])}; name it before the adapter's: BASE:ADAPTER",
        )
    return (alike[0] if alike else None), None


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
