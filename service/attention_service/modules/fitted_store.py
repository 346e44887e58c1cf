"""The durable store of what is fitted to models: one safetensors file each, with its facts in a metadata entry.

::

    <root>/<folder>/<id>.safetensors
    <root>/<folder>/of/<owner>/<id>.safetensors

A store holds one kind: lenses, whose entry is ``lens``, probes, or steering vectors. Owners and writes are those of
``recording_store``: a file never changes, and a crash leaves the whole file or none.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from attention_contract.base import WireModel
from attention_contract.errors import (
    AttentionError,
    InvalidRequest,
    LensNotFound,
    ProbeNotFound,
    StoreFull,
    TooLarge,
    Unreadable,
    VectorNotFound,
)
from attention_contract.json_reading import from_json
from attention_contract.schemas.analyses.lenses import LensFacts, LensInfo
from attention_contract.schemas.analyses.probes import ProbeFacts, ProbeInfo
from attention_contract.schemas.analyses.vectors import VectorFacts, VectorInfo
from attention_contract.validation import validate
from attention_service.modules.recording_files import RECORDING_ID, SUFFIX
from attention_service.modules.store_files import (
    OF_OWNERS,
    locked_folder,
    make_folder,
    open_tensors,
    refusal,
    remove_staged,
    staged_file,
    sync,
)

WEIGHTS: Final = "weights."
DIRECTIONS: Final = "directions."
"""The beginnings of the names of arrays in files of probes and of steering vectors; a layer follows."""


InfoT = TypeVar("InfoT", bound=LensInfo | ProbeInfo | VectorInfo)


@dataclass(frozen=True)
class FittedKind(Generic[InfoT]):
    """One kind of what is fitted to models."""

    noun: str
    """Its name, which is that of the metadata entry too."""
    plural: str
    """The name of its folder, and in the path that lists it."""
    facts: type[WireModel]
    """The facts that its files state."""
    info: Callable[..., InfoT]
    """These facts with ``id`` and ``bytes``."""
    missing: type[AttentionError]


LENSES: Final = FittedKind("lens", "lenses", LensFacts, LensInfo, LensNotFound)
PROBES: Final = FittedKind("probe", "probes", ProbeFacts, ProbeInfo, ProbeNotFound)
VECTORS: Final = FittedKind("vector", "vectors", VectorFacts, VectorInfo, VectorNotFound)


class FittedStore(Generic[InfoT]):
    """All of one kind on disk. Every method blocks and may be called from any thread."""

    def __init__(self, root: Path, limit: int, kind: FittedKind[InfoT]) -> None:
        self.kind = kind
        self._folder = root / kind.plural
        self.limit = limit
        """Bytes of all files together."""

    def listing(self, owner: str | None = None) -> list[InfoT]:
        """Return all of an owner, the newest first. Damaged files are left out."""
        infos: list[InfoT] = []
        for path in self._files(owner):
            with suppress(FileNotFoundError, Unreadable, SafetensorError, OSError, InvalidRequest):
                infos.append(self._described(path))
        return sorted(infos, key=lambda info: (info.created, info.id), reverse=True)

    def path(self, fitted: str, owner: str | None = None) -> Path:
        """The file of an id. Raises the kind's error for what is not there."""
        for folder in self._folders(owner) if RECORDING_ID.fullmatch(fitted) else ():
            path = folder / f"{fitted}{SUFFIX}"
            if path.is_file() and not path.is_symlink():
                return path
        noun, plural = self.kind.noun, self.kind.plural
        raise self.kind.missing(
            f"no {noun} has the id {fitted[:64]!r}; GET /v1/models/{{model}}/{plural} lists them", param="id"
        )

    def get(self, fitted: str, owner: str | None = None) -> InfoT:
        """Describe one. Raises the kind's error, also for a damaged one."""
        path = self.path(fitted, owner)
        try:
            return self._described(path)
        except (FileNotFoundError, Unreadable, SafetensorError, OSError, InvalidRequest):
            raise self.kind.missing(
                f"the stored {self.kind.noun} {fitted} cannot be read; delete it", param="id"
            ) from None

    def add(
        self, fitted: str, facts: WireModel, arrays: Mapping[str, NDArray[Any]], owner: str | None,
        check: Callable[[int, str], None],
    ) -> InfoT:  # fmt: skip
        """Write one durably. ``check`` raises if the owner must not have so many bytes of the kind together.

        Raises what it does, TooLarge, StoreFull, StoreReadOnly or InternalError.
        """
        noun, plural = self.kind.noun, self.kind.plural
        size = sum(array.nbytes for array in arrays.values())
        if size > self.limit:
            raise TooLarge(
                f"the {noun} has {size} bytes; this server keeps up to {self.limit} of all {plural} together",
                limit_bytes=self.limit, needed_bytes=size,
            )  # fmt: skip
        folder = self._folders(owner)[0]
        try:
            with locked_folder(self._folder):
                held, own = (sum(map(_bytes, self._files(whose))) for whose in (None, owner))
                if held + size > self.limit:
                    raise StoreFull(
                        f"the {noun} has {size} bytes, and {held} of {self.limit} bytes are taken by others; delete "
                        "some",
                        limit_bytes=self.limit, needed_bytes=size, held_bytes=held,
                    )  # fmt: skip
                check(own + size, f"your {plural} have {own} bytes, and this one {size}; delete some first")
                make_folder(folder)
                stated = facts.model_dump_json(include=set(self.kind.facts.model_fields))
                with staged_file(self._folder, [save(dict(arrays), {noun: stated})]) as staged:
                    os.replace(staged, folder / f"{fitted}{SUFFIX}")
                sync(folder)
        except OSError as fault:
            raise refusal(fault, f"a {noun} of {size} bytes") from fault
        return self.get(fitted, owner)

    def delete(self, fitted: str, owner: str | None = None) -> None:
        """Remove one durably. Raises the kind's error for what is not there."""
        path = self.path(fitted, owner)
        try:
            path.unlink()
            sync(path.parent)
        except FileNotFoundError:
            self.path(fitted, owner)
        except OSError as fault:
            raise refusal(fault, f"the removal of a {self.kind.noun}") from fault

    def clean(self) -> None:
        """Remove the leftovers of crashes."""
        if self._folder.is_dir():
            with locked_folder(self._folder):
                remove_staged(self._folder)

    def _files(self, owner: str | None) -> list[Path]:
        return [
            path
            for folder in self._folders(owner)
            for path in sorted(folder.glob(f"*{SUFFIX}"))
            if RECORDING_ID.fullmatch(path.stem)
        ]

    def _folders(self, owner: str | None) -> list[Path]:
        """The folders with what an owner may use; the first is that of new ones."""
        if owner is not None:
            return [self._folder / OF_OWNERS / owner]
        return [self._folder, *sorted((self._folder / OF_OWNERS).glob("*"))]

    def _described(self, path: Path) -> InfoT:
        """Read the header of a file. Raises Unreadable, InvalidRequest, SafetensorError and OSError."""
        noun = self.kind.noun
        with open_tensors(path, framework="np") as file:
            text = (file.metadata() or {}).get(noun)
        if text is None:
            raise Unreadable(f"the safetensors file has no metadata entry {noun!r}")
        facts = validate(self.kind.facts, from_json(text.encode(), f"the metadata entry {noun!r}"))
        return self.kind.info(**facts.model_dump(), id=path.stem, bytes=_bytes(path))


class FittedStores:
    """The stores of all kinds under one root, each with a limit of its own."""

    def __init__(self, root: Path, limit: int) -> None:
        self.lenses = FittedStore(root, limit, LENSES)
        self.probes = FittedStore(root, limit, PROBES)
        self.vectors = FittedStore(root, limit, VECTORS)

    def clean(self) -> None:
        """Remove the leftovers of crashes."""
        self.lenses.clean()
        self.probes.clean()
        self.vectors.clean()


def arrays_by_layer(path: Path, prefix: str) -> dict[str, NDArray[Any]]:
    """The arrays ``[d]`` of a stored probe or steering vector by what follows ``prefix``. Raises what the file does."""
    with open_tensors(path, framework="np") as file:
        return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def check_layer(directions: Mapping[str, NDArray[Any]], layer: object, param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, for a layer of which a steering vector has no direction."""
    if layer != "all" and str(layer) not in directions:
        raise InvalidRequest.at(param, f"the vector has directions of the layers {', '.join(directions)}")


def _bytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0
