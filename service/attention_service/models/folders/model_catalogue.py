"""The checkpoints of the model repository that can become models, by their configs and the sizes of their files."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from attention_contract.errors import InvalidCheckpoint, InvalidRequest, ModelExists, ModelNotFound
from attention_contract.schemas.models import ModelInfo, default_model_name
from attention_service.models.folders.adapter_catalogue import BETWEEN, AdapterFolder, adapters, find_adapter
from attention_service.models.folders.checkpoint_facts import (
    inputs_of,
    is_taken_for_model,
    lack_of_config,
    link_out,
    refusal_of,
)
from attention_service.models.folders.head_kinds import LISTED_CLASSES, LISTED_TENSORS, HeadKind, class_names, head_kind
from attention_service.models.folders.spread_models import bytes_on_all
from attention_service.models.folders.tokenizer_files import Vocabulary, vocabulary_of
from attention_service.models.folders.unread_files import unread_beside, unread_files
from attention_service.modules.checkpoints.adapter_files import is_adapter
from attention_service.modules.checkpoints.catalogue import paths, unreadable_reason
from attention_service.modules.checkpoints.checkpoint_files import TINY, located, open_checkpoint
from attention_service.modules.checkpoints.forms.form import Form, Input
from attention_service.modules.store_files import reason
from attention_service.runtime.device.freed_memory import MUCH

PROCESS_BYTES: Final = 240 * 2**20 + MUCH
"""Memory of its own of a process that has imported torch and transformers, and what it may keep of freed memory.

Measured with the CPU build of torch 2.13: 215 MiB, beside 110 MiB of its libraries' files, whose pages all processes
share. A process that takes more without a model says so.
"""
_WIDTHS: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MISSING: Final = (
    "the other layers of whole models run by transformers, which this server lacks; install its extra "
    "(attention-service[transformers])"
)


@dataclass(frozen=True)
class ModelFolder:
    """A checkpoint that can become a model."""

    checkpoint: str
    """Its path inside the repository."""
    folder: Path
    form: Form
    """Its files as their form reads them."""
    created: int
    """Seconds since 1970 at which its newest file was written."""
    file_bytes: int
    """Bytes of its files with tensors."""
    tensor_bytes: int
    """Bytes of its tensors, unpacked where they are quantized."""
    fault: str | None
    """The reason for which its files are refused."""
    left_out: Sequence[str] = ()
    """Its files that are not read, each with the reason."""
    adapter: AdapterFolder | None = None
    """The adapter that lies beside the model, and applies to it."""
    vocabulary: Vocabulary | None = None
    """The vocabulary of its folder; None of a file that brings its own."""

    @property
    def name(self) -> str:
        """The name that a model of it has by default."""
        return default_model_name(self.checkpoint)

    @property
    def refused(self) -> str | None:
        """The reason for which no process is started for it."""
        return self.fault if has_transformers() else _MISSING

    def resident_bytes(self, dtype: str | None, devices: int = 1, *, apart: bool = False) -> int:
        """Estimate the memory of its processes, one a device, once the model is loaded.

        ``apart``: each device has memory of its own, as GPUs have; the memory is then that of one.
        """
        width = _WIDTHS[dtype or "float32"]
        tensors = self.tensor_bytes * width // _WIDTHS[self.form.facts.stored]
        if devices > 1:
            tensors = bytes_on_all(self.form.facts, tensors, width, devices)
        whole = devices * PROCESS_BYTES + tensors
        return whole // devices if apart else whole

    def loading_bytes(self, dtype: str | None, devices: int = 1, *, apart: bool = False) -> int:
        """Estimate the memory of the same while it loads: what is read of the file, beside what was made of it."""
        read = self.file_bytes // devices if apart else self.file_bytes
        return self.resident_bytes(dtype, devices, apart=apart) + read

    def info(self, name: str, dtype: str | None) -> ModelInfo:
        """Describe the model before it is loaded."""
        kind = self.config.get("model_type")
        return ModelInfo(
            id=name,
            created=self.created,
            checkpoint=self.checkpoint,
            state="idle",
            architecture=self._class,
            model_type=kind[:80] if isinstance(kind, str) else None,
            takes=self.takes,
            generates=self.generates,
            predicts=None if self._head is None else self._head.predicts,
            classes=[*class_names(self._head, self.config.get("id2label"))][:LISTED_CLASSES],
            stored=self.form.facts.packed or self.form.facts.weights(self.form.facts.stored),
            bytes=self.resident_bytes(dtype),
            refused=self.refused,
            left_out=[*self.left_out, *self.form.left_out[:LISTED_TENSORS]],
            adapter=None if self.adapter is None else self.name,
        )

    def check(self) -> None:
        """Raise InvalidCheckpoint unless a process can be started for it."""
        if self.refused is not None:
            raise InvalidCheckpoint.at("checkpoint", f"{self.checkpoint} is no model of this server: {self.refused}")

    @property
    def config(self) -> Mapping[str, Any]:
        """The entries of its config.json in transformers."""
        return self.form.facts.config

    @property
    def _class(self) -> str | None:
        """The name of its class in transformers."""
        named = self.config.get("architectures")
        return str(named[0])[:120] if isinstance(named, list) and named else None

    @property
    def generates(self) -> bool:
        """True if its class generates text."""
        return self._head is not None and self._head.predicts == "next"

    @property
    def _head(self) -> HeadKind | None:
        return head_kind(self._class or "")

    @cached_property
    def takes(self) -> list[Input]:
        """The inputs that its requests may have, by the names of its files and by its config."""
        facts = self.form.facts
        if facts.takes is not None:
            return [*facts.takes]
        reads_texts = self.vocabulary is not None and self.vocabulary.is_there
        prepares = facts.images is not None
        return inputs_of(self.folder, self.config, self._head, reads_texts=reads_texts, prepares=prepares)


class _Beside(NamedTuple):
    """The facts of a folder that all of its GGUF files share."""

    link_out: str | None
    unread: list[str]


def _beside(root: Path, folder: Path) -> _Beside:
    """Look at what lies beside the GGUF files of a folder."""
    if folder == root.resolve():
        return _Beside(None, [])
    return _Beside(link_out(root, folder), unread_beside(folder))


def find_folder(root: Path, checkpoint: str, beside: Callable[[Path, Path], _Beside] = _beside) -> ModelFolder:
    """The checkpoint at a path of the repository, or the one that ships. Raises what ``open_checkpoint`` does."""
    opened = open_checkpoint(root, checkpoint)
    place, form = opened.stored.place, opened.form
    alone = place.is_file()
    if not form.facts.config or (alone and form.facts.takes is None):
        raise InvalidCheckpoint.at("checkpoint", f"{opened.path} {lack_of_config(place)}")
    try:
        files = [file.stat() for file in opened.files]
    except OSError as fault:
        raise InvalidCheckpoint.at("checkpoint", f"{opened.path} cannot be read: {reason(fault)}") from fault
    size = sum(file.st_size for file in files)
    around = beside(root, place.parent) if alone else None
    vocabulary = None if alone else vocabulary_of(place, form.facts.config)
    names = opened.stored.names
    return ModelFolder(
        checkpoint=opened.path,
        folder=place,
        form=form,
        created=int(max(file.st_mtime for file in files)),
        file_bytes=size,
        tensor_bytes=size if form.facts.packed is None and form.facts.bytes is None else opened.unpacked_bytes(),
        fault=refusal_of(root, place, form, names) if around is None else form.refusal or around.link_out,
        left_out=unread_files(place, {*names.values()}, vocabulary) if around is None else around.unread,
        adapter=AdapterFolder(opened.path, place, root, opened.path, None) if is_adapter(place) else None,
        vocabulary=vocabulary,
    )


def find_name(root: Path, name: str) -> ModelFolder:
    """The checkpoint whose path, or whose default name, is this.

    Raises ModelNotFound, ModelExists and InvalidCheckpoint.
    """
    known = _paths(root)
    path_named = name if name in known else next((path for path in known if default_model_name(path) == name), None)
    if path_named is None:
        raise ModelNotFound(
            f"there is no model {name[:128]!r}, and the model repository holds no checkpoint of this name; "
            "GET /v1/models lists them",
            param="model",
        )
    check_own_name(root, path_named, "model")
    return find_folder(root, path_named)


def check_own_name(root: Path, checkpoint: str, param: str) -> None:
    """Raise ModelExists for a checkpoint whose default name is another's too; the path ``a--b`` goes before ``a/b``."""
    if (shared := _shared_name(checkpoint.strip("/"), _by_name(_paths(root)))) is not None:
        raise ModelExists.at(param, shared)


def _by_name(known: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """The paths of checkpoints by their default names."""
    paths_by_name: dict[str, list[str]] = {}
    for path in known:
        paths_by_name.setdefault(default_model_name(path), []).append(path)
    return paths_by_name


def _shared_name(checkpoint: str, known: Mapping[str, Sequence[str]]) -> str | None:
    name = default_model_name(checkpoint)
    others = [path for path in known.get(name, ()) if path != checkpoint]
    if checkpoint == name or not others:
        return None
    return (
        f"the checkpoints {checkpoint} and {others[0]} have the same default name {name}; "
        f"load {checkpoint} with a name of its own (POST /v1/models with name)"
    )


def _paths(root: Path) -> list[str]:
    """The path of every checkpoint that can become a model or is taken for one; first of the model that ships."""
    checkpoints = [path for path in paths(root) if is_taken_for_model(Path(*located(root, path)))]
    return sorted(checkpoints, key=TINY.__ne__)


def has_transformers() -> bool:
    """Return True if transformers is installed."""
    return find_spec("transformers") is not None


def check_divisible(device_map: str) -> None:
    """Raise InvalidRequest unless this server can divide a model so."""
    if device_map == "balanced":
        raise InvalidRequest.at(
            "device_map",
            "balanced divides a model over several devices, but a model uses one device here; auto keeps "
            "on disk the layers that do not fit into memory",
        )
    if find_spec("accelerate") is None:
        raise InvalidRequest.at(
            "device_map",
            "transformers needs accelerate to divide a model, which this server lacks; install its extra "
            "(attention-service[offload])",
        )


def listed(root: Path) -> list[ModelInfo]:
    """Describe every checkpoint that can become a model or is taken for one, by path, with why it is refused."""
    infos, known = [], _paths(root)
    by_name, beside = _by_name(known), cache(_beside)  # of this list alone
    for path in known:
        try:
            if (shared := _shared_name(path, by_name)) is not None:
                infos.append(_faulty(path, path, shared))
                continue
            folder = find_folder(root, path, beside)
            infos.append(folder.info(folder.name, None))
        except Exception as fault:  # whatever a folder holds, the others are listed
            infos.append(_faulty(default_model_name(path), path, unreadable_reason(fault)))
    return infos


def _faulty(name: str, path: str, refused: str) -> ModelInfo:
    return ModelInfo(id=name, created=0, checkpoint=path, state="idle", refused=refused)


def with_adapters(root: Path, infos: Sequence[ModelInfo], held: Mapping[str, Collection[str]]) -> list[ModelInfo]:
    """Describe models with the names of their adapters, then each with each adapter.

    ``held``: the adapters that the process of each model has, by the model's name.
    """
    known = adapters(root)
    described: list[ModelInfo] = []
    for info in infos:
        own = [adapter for adapter in known if adapter.base == info.checkpoint and info.adapter is None]
        described.append(info.model_copy(update={"adapters": [adapter.name for adapter in own]}))
        folder = Path(*located(root, info.checkpoint)).resolve()
        described += [
            adapter.variant(described[-1], folder, loaded=adapter.name in held.get(info.id, ())) for adapter in own
        ]
    return described


def all_with_adapters(root: Path, infos: Sequence[ModelInfo], held: Mapping[str, Collection[str]]) -> list[ModelInfo]:
    """The same, and the adapters whose base is not among the checkpoints."""
    return [*with_adapters(root, infos, held), *(adapter.alone() for adapter in adapters(root) if adapter.base is None)]


def named_variant(root: Path, name: str, adapter: str | None) -> tuple[str, AdapterFolder | None]:
    """The name of a base and its adapter, by the name of a variant or of an adapter, or that of a base and an adapter.

    Raises ModelNotFound, InvalidCheckpoint and InvalidRequest.
    """
    base, between, own = name.partition(BETWEEN)
    if between and adapter is not None and adapter != own:
        raise InvalidRequest.at("adapter", f"the model names the adapter {own[:128]!r}, and adapter another one")
    if (wanted := own if between else adapter) is not None:
        return base, find_adapter(root, wanted)
    alike = [candidate for candidate in adapters(root) if name in (candidate.checkpoint, candidate.name)]
    return (default_model_name(alike[0].found_base()), alike[0]) if alike else (name, None)


def named_adapter(root: Path, checkpoint: str, adapter: str | None) -> tuple[str, AdapterFolder | None]:
    """The checkpoint of a base and its adapter, by a checkpoint that may be the adapter's.

    Raises ModelNotFound and InvalidCheckpoint.
    """
    if adapter is not None:
        adapter_folder = find_adapter(root, adapter)
        adapter_folder.check()
        return checkpoint, adapter_folder
    alike = [candidate for candidate in adapters(root) if candidate.checkpoint == checkpoint.strip("/")]
    return (alike[0].found_base(), alike[0]) if alike else (checkpoint, None)
