"""The durable store of modules: one folder each, and the only truth that replicas share.

::

    <root>/modules/<name>/config.json                          format, version, config, source
    <root>/modules/<name>/parameters-<version>.safetensors

A write is on the disk before it returns. Everything is first written in a hidden folder. A new module is this folder,
renamed; new parameters are moved beside the old ones, until ``config.json``, replaced in one step, names them; a
deleted module is renamed away first. Files that are no regular ones, symbolic links and files that are larger than
their module are never read. So a crash at any moment leaves the old or the new module, whole, and perhaps
leftovers, which ``clean`` removes. Readers and writers of several processes take turns by a lock on the ``modules``
folder, which ends with the process that holds it. Tensors are read as safetensors only; nothing is unpickled.
"""

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.modules import ModuleConfig, Source
from attention_service.core.tensors import torch_dtype_name
from attention_service.modules.resident import Module, check_shapes, complete, content_version, parameter_bytes
from attention_service.modules.store_files import (
    PARAMETERS,
    STAGED,
    check_regular,
    locked,
    make_folder,
    open_tensors,
    os_error,
    read_regular,
    reason,
    sync,
)

FORMAT: Final = 1
_CONFIG: Final = "config.json"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VERSION: Final = re.compile(r"[0-9a-f]{32}")
_REMOVED: Final = ".removed-"
_CONFIG_BYTES: Final = 2**24
"""The largest config.json that is read."""
_HEADER_BYTES: Final = 2**20
"""Bytes of a file of parameters beside their numbers, at most."""
Stamp = tuple[int, ...] | None
"""Times of a module's folder and config.json, its inode and size, which differ after a write; None without the file."""


class DamagedError(Exception):
    """A module's folder does not hold what was once written there. The message says what, without paths."""


class MovedOnError(Exception):
    """The stored module is not at the version that the writer took it to be at."""


class Store:
    """Modules on disk, on behalf of all processes that share the folder."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "modules"

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        """The folders that stand for a module, sorted. Raises FileNotFoundError where there is no store yet."""
        with os.scandir(self._folder) as entries:
            return sorted(entry.name for entry in entries if _NAME.fullmatch(entry.name) is not None and entry.is_dir())

    def stamps(self) -> dict[str, Stamp]:
        """A stamp of each module, which differs once its stored version does. No file is read.

        Raises FileNotFoundError where there is no store yet.
        """
        return {name: _stamp(self._folder / name) for name in self.names()}

    def version(self, name: str) -> str | None:
        """The stored version; None where there is no such module, without a wait for writers. Raises DamagedError."""
        if not self._holds(name):
            return None
        with self._locked(fcntl.LOCK_SH):
            return self._version(name)

    def _version(self, name: str) -> str | None:
        return str(_described(self._folder / name)["version"]) if self._holds(name) else None

    def _holds(self, name: str) -> bool:
        """Return True if there is a folder of this name that stands for a module."""
        return _NAME.fullmatch(name) is not None and (self._folder / name).is_dir()

    def needed_bytes(self, name: str, version: str | None) -> int:
        """Bytes of a module's parameters; 0 if there is none, or its stored version is this. Raises DamagedError."""
        with self._locked(fcntl.LOCK_SH):
            if not self._holds(name) or (described := _described(self._folder / name))["version"] == version:
                return 0
            return parameter_bytes(_configured(described)[0])

    def load(self, name: str, most_bytes: int | None = None) -> Module | None:
        """A module, on the host, once its content is found to be what its version says; None where there is none.

        Raises DamagedError, also for a module whose parameters take more than ``most_bytes`` bytes.
        """
        with self._locked(fcntl.LOCK_SH):
            folder = self._folder / name
            if not self._holds(name):
                return None
            described = _described(folder)
            config, source = _configured(described)
            size = parameter_bytes(config)
            if most_bytes is not None and size > most_bytes:
                raise DamagedError(f"its parameters take {size} bytes, and the memory budget has {most_bytes} left")
            parameters = _read_parameters(folder, described["version"], size + _HEADER_BYTES)
        return _checked(name, described, config, source, parameters)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, module: Module, replaces: str | None) -> None:
        """Write a module (on the host) durably, new or in place of the version that it replaces.

        Raises MovedOnError where the store holds another version, DamagedError where it holds an unreadable one, and
        OSError where the disk does not take it; then the store holds the old or the new one, whole.
        """
        make_folder(self._folder)
        with self._locked(fcntl.LOCK_EX):
            if self._version(module.name) != replaces:
                raise MovedOnError
            staged = self._folder / f"{STAGED}{secrets.token_hex(8)}"
            try:
                staged.mkdir()
                _write_config(staged / _CONFIG, module)
                _write_parameters(staged / _parameters_file(module.version), module)
                sync(staged)
                if replaces is None:
                    os.replace(staged, self._folder / module.name)
                    sync(self._folder)
                else:
                    self._move_over(staged, module)
            finally:
                shutil.rmtree(staged, ignore_errors=True)

    def _move_over(self, staged: Path, module: Module) -> None:
        folder = self._folder / module.name
        parameters = _parameters_file(module.version)
        os.replace(staged / parameters, folder / parameters)
        sync(folder)  # the parameters are there for good before anything names them
        os.replace(staged / _CONFIG, folder / _CONFIG)
        sync(folder)
        _sweep(folder, module.version)

    def delete(self, name: str, version: str) -> None:
        """Remove a module durably. Raises MovedOnError where the store holds another version, and OSError."""
        with self._locked(fcntl.LOCK_EX):
            if self._version(name) != version:
                raise MovedOnError
            removed = self._folder / f"{_REMOVED}{secrets.token_hex(8)}"
            os.replace(self._folder / name, removed)
            sync(self._folder)
        shutil.rmtree(removed, ignore_errors=True)

    def clean(self) -> None:
        """Remove the leftovers of crashes."""
        if not self._folder.is_dir():
            return
        with suppress(OSError), self._locked(fcntl.LOCK_EX):
            for entry in list(self._folder.iterdir()):
                if entry.name.startswith((STAGED, _REMOVED)):
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.is_dir() and _NAME.fullmatch(entry.name):
                    with suppress(DamagedError):
                        _sweep(entry, _described(entry)["version"])

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        # The folder itself is the lock file: nothing to create, so that a store may also be mounted read-only.
        if not self._folder.is_dir():
            yield  # nothing is there yet
            return
        with locked(self._folder, how):
            yield


def _parameters_file(version: str) -> str:
    return PARAMETERS.replace("*", version)


def _stamp(folder: Path) -> Stamp:
    try:
        listed, config_stat = folder.stat(), (folder / _CONFIG).lstat()
    except OSError:
        return None
    return listed.st_mtime_ns, config_stat.st_mtime_ns, config_stat.st_ino, config_stat.st_size


def _write_parameters(path: Path, module: Module) -> None:
    try:
        save_file(dict(module.parameters), path, metadata={"version": module.version})
    except SafetensorError as fault:  # a full disk comes as one of these
        raise os_error(fault) from fault
    shutil.copymode(path.with_name(_CONFIG), path)  # safetensors makes a file that only its owner may read
    sync(path)


def _write_config(path: Path, module: Module) -> None:
    described = {
        "format": FORMAT,
        "version": module.version,
        "config": module.config.model_dump(mode="json"),
        "source": module.source.model_dump(mode="json", exclude_defaults=True) if module.source is not None else None,
    }
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    sync(path)


def _sweep(folder: Path, version: str) -> None:
    """Remove the parameters of other versions, unless those of this one are missing."""
    if not (folder / _parameters_file(version)).exists():
        return
    for entry in list(folder.iterdir()):
        if entry.match(PARAMETERS) and entry.name != _parameters_file(version):
            with suppress(OSError):
                entry.unlink()


def _described(folder: Path) -> dict[str, Any]:
    """Read config.json and check its outermost structure. Raises DamagedError."""
    if folder.is_symlink():
        raise DamagedError("its folder is a symbolic link")
    try:
        described = json.loads(read_regular(folder / _CONFIG, _CONFIG_BYTES))
    except FileNotFoundError:
        raise DamagedError(f"{_CONFIG} is missing") from None
    except OSError as fault:
        raise DamagedError(f"{_CONFIG} cannot be read: {reason(fault)}") from fault
    except (ValueError, RecursionError):
        raise DamagedError(f"{_CONFIG} is not JSON") from None
    if not isinstance(described, dict) or not isinstance(described.get("format"), int):
        raise DamagedError(f"{_CONFIG} states no format")
    if described["format"] > FORMAT:
        raise DamagedError(f"it was written in format {described['format']}; this server reads up to {FORMAT}")
    if not isinstance(described.get("version"), str) or not _VERSION.fullmatch(described["version"]):
        raise DamagedError(f"{_CONFIG} states no version")
    return described


def _read_parameters(folder: Path, version: str, limit: int) -> dict[str, Tensor]:
    file = _parameters_file(version)
    try:
        check_regular(folder / file, limit)
        with open_tensors(folder / file) as tensors:
            # Cloned, so that nothing depends on the file any more.
            return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise DamagedError(f"{file} is missing") from None
    except (SafetensorError, OSError) as fault:
        raise DamagedError(f"{file} cannot be read: {reason(fault)}") from fault


def _configured(described: dict[str, Any]) -> tuple[ModuleConfig, Source | None]:
    """The complete config and the source. Raises DamagedError."""
    try:
        config = complete(ModuleConfig.model_validate(described.get("config")))
        return config, Source.model_validate(described["source"]) if described.get("source") is not None else None
    except ValidationError as fault:
        first = fault.errors()[0]
        raise DamagedError(
            f"{_CONFIG} holds no valid {fault.title}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    except InvalidRequest as fault:
        raise DamagedError(fault.detail) from None


def _checked(
    name: str, described: dict[str, Any], config: ModuleConfig, source: Source | None, parameters: dict[str, Tensor]
) -> Module:
    """The module, if the content is what the version says. Raises DamagedError."""
    try:
        check_shapes(config, {name: tuple(value.shape) for name, value in parameters.items()})
        dtypes = {torch_dtype_name(value.dtype) for value in parameters.values()}
    except InvalidRequest as fault:
        raise DamagedError(fault.detail) from None
    except KeyError:
        raise DamagedError("a parameter has a dtype that modules cannot have") from None
    if dtypes != {config.dtype}:
        raise DamagedError(f"its parameters are {', '.join(sorted(dtypes))}; its config says {config.dtype}")
    # What was written is hashed, not what it means today, so that a version outlives new options of the config.
    version = content_version(described["config"], parameters)
    if version != described["version"]:
        raise DamagedError(f"its content has version {version}, but {described['version']} was written")
    return Module.of(name, config, parameters, source, described["version"])
