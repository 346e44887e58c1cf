"""Checkpoints as files: where their tensors lie, their headers, and reading parts of them.

A checkpoint is a folder with ``*.safetensors`` files, listed by a ``*.safetensors.index.json`` or not, or one such
file; a ``config.json`` beside the tensors describes them. Only what lies inside the model repository is read, after
symbolic links are followed; what lies outside is answered like what does not exist, and so are the folders in which the
server keeps modules, recordings, lenses, probes and vectors. Beside them there is the checkpoint that ships with the
server.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from torch import Tensor

import attention_service
from attention_contract.errors import CheckpointNotFound, InvalidCheckpoint
from attention_service.modules.checkpoints.forms import FORMS
from attention_service.modules.checkpoints.forms.form import Form, Part, Stored, StoredHeader, unreadable
from attention_service.modules.checkpoints.forms.gguf.gguf_header import GGUF
from attention_service.modules.checkpoints.json_objects import UnreadableJson, read_object
from attention_service.modules.recording_files import RECORDING_ID
from attention_service.modules.store_files import OF_OWNERS, PARAMETERS, open_tensors

_SUFFIX: Final = ".safetensors"
SINGLE: Final = "model.safetensors"
_INDEX: Final = ".safetensors.index.json"
MAIN_INDEX: Final = f"model{_INDEX}"
"""The index that transformers reads."""
_OTHER_FORMATS: Final = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"}
_PICKLED: Final = {".bin", ".ckpt", ".pt", ".pth"}
"""Formats that ``attention convert`` reads."""
OUTSIDE: Final = "link, and not to a file inside the model repository; put the file in its place"
OWN_FOLDERS: Final = ("modules", "recordings", "lenses", "probes", "vectors")
"""Folders of the model repository with what the server keeps, which is no checkpoint. There may be checkpoints too."""
TINY: Final = "tiny"
"""The path of the checkpoint that ships with the server. One of this path in the model repository goes before it."""
_PACKAGE: Final = Path(attention_service.__file__).parent
_SHIPPED: Final = "tiny_model"
SHIPPED_MODEL: Final = _PACKAGE / _SHIPPED
"""Its folder."""
_MAX_NAMES: Final = 5
"""Names of files that a message lists."""
_JSON_BYTES: Final = 2**26
"""The largest JSON file that is read."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint."""

    path: str
    """Its path inside the repository, the same however it is asked for."""
    label: str
    """Name of its folder, or of its file without the ending."""
    stored: Stored
    """Its files."""

    @cached_property
    def form(self) -> Form:
        """The files as their form reads them. Raises InvalidCheckpoint."""
        readings = (reader.read(self.stored) for reader in FORMS)
        return next(form for form in readings if form is not None)

    @property
    def config(self) -> Mapping[str, Any]:
        """The entries of its config.json in transformers; empty where there is none."""
        return self.form.facts.config

    @property
    def tensors(self) -> Mapping[str, Part]:
        """Its tensors, by their names in transformers."""
        return self.form.tensors

    @property
    def files(self) -> list[Path]:
        """Its files with tensors."""
        return [*{*self.stored.names.values()}] or [self.stored.place]

    def check_layers(self) -> None:
        """Raise InvalidCheckpoint if no layer of its form can be imported."""
        if self.form.layerless is not None:
            raise InvalidCheckpoint.at("checkpoint", self.form.layerless)

    def are_packed(self, tensors: Iterable[str]) -> bool:
        """True if some tensors are unpacked when they are read."""
        return any(self.tensors[name].shape is not None for name in tensors)

    def unpacked_bytes(self) -> int:
        """Bytes of all tensors of files of packed numbers. Raises InvalidCheckpoint, also for one that lacks a part."""
        if self.form.facts.bytes is not None:
            return self.form.facts.bytes
        self.form.check()
        headers = self.stored.headers
        parts = self.form.tensors.values()
        return 4 * sum(prod(headers[part.names[0]].shape if part.shape is None else part.shape()) for part in parts)

    def header(self, tensor: str) -> StoredHeader:
        """Dtype, by the wire's name, and shape of a tensor. Raises InvalidCheckpoint, also for one that is no float."""
        return self.tensors[tensor].header(tensor, self.stored.headers)

    def read(self, tensor: str) -> Tensor:
        """A tensor, unpacked if it is quantized. Raises InvalidCheckpoint."""
        return self.tensors[tensor].read(self.stored.read)


def ships(root: Path) -> bool:
    """True if the path ``tiny`` stands for the checkpoint that ships: the repository has none there."""
    return not (root / TINY).exists() and SHIPPED_MODEL.is_dir()


def located(root: Path, checkpoint: str) -> tuple[Path, str]:
    """The folder that holds a checkpoint, and its path inside it: those given, unless it is the one that ships."""
    return (_PACKAGE, _SHIPPED) if checkpoint == TINY and ships(root) else (root, checkpoint)


def open_checkpoint(root: Path, checkpoint: str) -> Checkpoint:
    """The checkpoint at a path inside the repository, or the one that ships.

    Raises CheckpointNotFound and InvalidCheckpoint.
    """
    top, path = located(root, checkpoint)
    place = inside(top, top, path)
    if (file := gguf_file(root, checkpoint)) is not None:
        return Checkpoint(checkpoint.strip("/"), file.stem, Stored(file, {}, {}))
    if place is None or not (place.is_dir() or (place.is_file() and place.suffix == _SUFFIX)):
        raise CheckpointNotFound(
            f"the model repository holds no checkpoint {checkpoint[:128]!r}; expected the path, inside it, of a folder "
            f"with {_SUFFIX} files or of one such file",
            param="checkpoint",
        )
    shipped = top is _PACKAGE
    name = TINY if shipped else "checkpoint" if place == top.resolve() else place.name
    label = name if place.is_dir() else place.stem
    return Checkpoint(TINY if shipped else place.relative_to(top.resolve()).as_posix(), label, _stored(top, place))


def opened(place: Path) -> Checkpoint:
    """The checkpoint in a folder, or a GGUF file, that was found before; its links may lead anywhere.

    Raises InvalidCheckpoint.
    """
    is_file = place.suffix == GGUF and place.is_file()
    return Checkpoint(place.name, place.name, Stored(place, {}, {}) if is_file else _stored(None, place.resolve()))


def _stored(root: Path | None, place: Path) -> Stored:
    """The files of a checkpoint. ``root``: the repository, out of which no link is followed; None for none."""
    config = _read_json(root, place if place.is_dir() else place.parent, "config.json") or {}
    return Stored(place, config, _tensor_files(root, place, config.get("transformers_weights")))


def gguf_file(root: Path, checkpoint: str) -> Path | None:
    """The GGUF file at a path inside the repository, or the only one of a folder that has no safetensors file.

    Raises InvalidCheckpoint for a folder of several.
    """
    place = inside(root, root, checkpoint)
    if place is None:
        return None
    if place.is_file():
        return place if place.suffix == GGUF else None
    files = [] if _tensor_names(root, place) else sorted(place.glob(f"*{GGUF}"))
    if len(files) > 1:
        raise InvalidCheckpoint.at(
            "checkpoint", f"{checkpoint} holds {len(files)} GGUF files; name one, such as {checkpoint}/{files[0].name}"
        )
    return inside(root, place, files[0].name) if files else None


def folder_of(root: Path, path: str) -> Path:
    """The folder at a path inside the repository. Raises CheckpointNotFound."""
    place = inside(root, root, path)
    if place is None or not place.is_dir():
        raise CheckpointNotFound(f"the model repository holds no folder {path[:128]!r}", param="adapter")
    return place


def check_fetched(root: Path, folder: Path) -> None:
    """Raise InvalidCheckpoint for a file below a folder that has, or whose index gives it, a name of tensors, but none.

    An index may name only safetensors files, and a file with that ending must be one.
    """
    for index in sorted(folder.rglob(f"*{_INDEX}")):
        _indexed(root, index.parent, index.name)
    for file in sorted(folder.rglob(f"*{_SUFFIX}")):
        _names_in(_shard(root, file.parent, file.name))


def inside(root: Path | None, folder: Path, path: str) -> Path | None:
    """The place of a path, if it exists and lies inside the repository, and is nothing that the server keeps there.

    ``root``: None for any place.
    """
    try:
        place = (folder / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # missing; a null character; a loop of links
        return None
    if root is None:
        return place
    top = root.resolve()
    return place if place.is_relative_to(top) and not is_kept(top, place) else None


def is_kept(top: Path, place: Path) -> bool:
    """True for what the server keeps in its folders of the repository ``top``, and for such a folder of nothing else.

    The server keeps folders with files of parameters in ``modules``, and files named by an id in the others, also below
    ``of``. All else in them are checkpoints, and files of one that has their name.
    """
    for name in OWN_FOLDERS:
        folder = (top / name).resolve()
        if not place.is_relative_to(folder):
            continue
        if place == folder:
            return not any(entry.is_file() and not _is_kept_in(folder, entry.name) for entry in folder.glob("*"))
        return _is_kept_in(folder, place.relative_to(folder).parts[0])
    return False


def _is_kept_in(folder: Path, name: str) -> bool:
    """True for an entry of this name of one of the server's folders that the server keeps, or that is hidden."""
    id_of_file = name.endswith(_SUFFIX) and RECORDING_ID.fullmatch(name.removesuffix(_SUFFIX)) is not None
    return name[0] == "." or name == OF_OWNERS or id_of_file or any((folder / name).glob(PARAMETERS))


def _tensor_files(root: Path | None, place: Path, named: object) -> dict[str, Path]:
    """The file of each tensor, found as transformers does; ``named``: what config.json says of it."""
    if place.is_file():
        return _tensors_of(root, place.parent, [place.name])
    if named is not None:
        if not isinstance(named, str):
            raise InvalidCheckpoint(
                f"config.json says transformers_weights {str(named)[:80]}; expected text", param="checkpoint"
            )
        return _indexed(root, place, named) if named.endswith(_INDEX) else _tensors_of(root, place, [named])
    if inside(root, place, SINGLE) is not None:
        return _tensors_of(root, place, [SINGLE])
    indexes = sorted(entry.name for entry in place.glob(f"*{_INDEX}"))
    if len(indexes) == 1 or MAIN_INDEX in indexes:
        return _indexed(root, place, MAIN_INDEX if MAIN_INDEX in indexes else indexes[0])
    return _tensors_of(root, place, _tensor_names(root, place))


def _tensor_names(root: Path | None, folder: Path) -> list[str]:
    """The names of the safetensors files of a folder, without those that the server keeps there."""
    top = None if root is None else root.resolve()
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    return [file.name for file in files if top is None or not is_kept(top, file)]


def _tensors_of(root: Path | None, folder: Path, files: list[str]) -> dict[str, Path]:
    tensors: dict[str, Path] = {}
    for name in files:
        file = _shard(root, folder, name)
        for tensor in _names_in(file):
            if tensor in tensors:
                raise InvalidCheckpoint(
                    f"{tensors[tensor].name} and {name} both hold {tensor}; name one of the files",
                    param="checkpoint",
                )
            tensors[tensor] = file
    if not files:
        raise InvalidCheckpoint(_lack_of_tensors(root, folder), param="checkpoint")
    return _some(tensors, ", ".join(files[:3]))


def _lack_of_tensors(root: Path | None, folder: Path) -> str:
    """The reason for which a folder without safetensors files is no checkpoint: what it holds instead."""
    missing = f"the folder holds no {_SUFFIX} file"
    entries = sorted(folder.iterdir())
    if others := sorted(_OTHER_FORMATS & {entry.suffix for entry in entries}):
        if _PICKLED.isdisjoint(others):
            return f"{missing} (only {', '.join(others)}); other formats are not read: convert the checkpoint"
        return f"{missing} (only {', '.join(others)}), and nothing is unpickled: run attention convert FOLDER OUT"
    below = [entry for entry in entries if entry.is_dir() and any(entry.glob(f"*{_SUFFIX}"))]
    if below:
        top = (root or folder).resolve()
        return f"{missing} itself; name a folder in it, such as {below[0].relative_to(top).as_posix()}"
    if not entries:
        return f"{missing}: it is empty"
    names = ", ".join(entry.name[:64] for entry in entries[:_MAX_NAMES]) + (" …" if len(entries) > _MAX_NAMES else "")
    return f"{missing}, only {names}; put the file with the tensors beside {'it' if len(entries) == 1 else 'them'}"


def _indexed(root: Path | None, folder: Path, index: str) -> dict[str, Path]:
    listed = (_read_json(root, folder, index) or {}).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise InvalidCheckpoint(f"{index} has no weight_map from tensors to files", param="checkpoint")
    shards = [_shard(root, folder, name, index) for name in sorted({*listed.values()})]
    # As transformers does: what a shard holds counts, and not the entry of each tensor.
    return _some({tensor: shard for shard in shards for tensor in _names_in(shard)}, index)


def _some(tensors: dict[str, Path], source: str) -> dict[str, Path]:
    if not tensors:
        raise InvalidCheckpoint(f"the checkpoint holds no tensor ({source})", param="checkpoint")
    return tensors


def _shard(root: Path | None, folder: Path, name: str, source: str = "the checkpoint") -> Path:
    """A file with tensors, by the name that an index or config.json gives it. ``source``: which of them."""
    if not name.endswith(_SUFFIX):  # whatever else a file holds, it is not opened
        raise InvalidCheckpoint(
            f"{source} names {name[:128]!r} as a file with tensors; expected a name that ends in {_SUFFIX}",
            param="checkpoint",
        )
    file = inside(root, folder, name)
    if file is None or not file.is_file():
        missing = f"the file {name[:128]!r} of the checkpoint is missing"
        raise InvalidCheckpoint(missing if source == "the checkpoint" else f"{missing} ({source})", param="checkpoint")
    return file


def _names_in(file: Path) -> list[str]:
    try:
        with open_tensors(file) as tensors:
            return list(tensors.keys())
    except (SafetensorError, OSError) as fault:
        raise unreadable(file, fault) from fault


def _read_json(root: Path | None, folder: Path, name: str) -> dict[str, Any] | None:
    """A JSON object beside the tensors; None where there is no such file."""
    file = inside(root, folder, name)
    if file is None:
        return None
    try:
        return read_object(file, _JSON_BYTES)
    except UnreadableJson as why:
        raise InvalidCheckpoint(f"{name} of the checkpoint {why}", param="checkpoint") from why
