"""The durable store of fitted lenses: one safetensors file each, with its facts in the metadata entry ``lens``.

::

    <root>/lenses/<id>.safetensors
    <root>/lenses/of/<owner>/<id>.safetensors

Owners and writes are those of ``recording_store``: a file never changes, and a crash leaves the whole file or none.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save

from attention_contract.errors import InvalidRequest, LensNotFound, StoreFull, TooLarge, Unreadable
from attention_contract.json_reading import from_json
from attention_contract.schemas.analyses.lenses import LensFacts, LensInfo, LensList
from attention_contract.validation import validate
from attention_service.modules.recording_files import RECORDING_ID, SUFFIX
from attention_service.modules.store_files import (
    locked_folder,
    make_folder,
    open_tensors,
    refusal,
    remove_staged,
    staged_file,
    sync,
)

_OWNED: Final = "of"
_ENTRY: Final = "lens"


class LensStore:
    """Lenses on disk. Every method blocks and may be called from any thread."""

    def __init__(self, root: Path, limit: int) -> None:
        self._folder = root / "lenses"
        self.limit = limit
        """Bytes of all lenses together."""

    def listing(self, owner: str | None = None) -> LensList:
        """Every lens of an owner, the newest first. Damaged files are left out."""
        found: list[LensInfo] = []
        for path in self._files(owner):
            with suppress(FileNotFoundError, Unreadable, SafetensorError, OSError, InvalidRequest):
                found.append(_described(path))
        found.sort(key=lambda each: (each.created, each.id), reverse=True)
        return LensList(lenses=found, bytes=sum(each.bytes for each in found), limit_bytes=self.limit)

    def path(self, lens: str, owner: str | None = None) -> Path:
        """The file of a lens. Raises LensNotFound."""
        for folder in self._folders(owner) if RECORDING_ID.fullmatch(lens) else ():
            path = folder / f"{lens}{SUFFIX}"
            if path.is_file() and not path.is_symlink():
                return path
        raise LensNotFound(f"no lens has the id {lens[:64]!r}; GET /v1/models/{{model}}/lenses lists them", param="id")

    def get(self, lens: str, owner: str | None = None) -> LensInfo:
        """Describe a lens. Raises LensNotFound, also for a damaged one."""
        path = self.path(lens, owner)
        try:
            return _described(path)
        except (FileNotFoundError, Unreadable, SafetensorError, OSError, InvalidRequest):
            raise LensNotFound(f"the stored lens {lens} cannot be read; delete it", param="id") from None

    def add(
        self, lens: str, facts: LensFacts, jacobians: Mapping[int, NDArray[Any]], owner: str | None,
        check: Callable[[int, str], None],
    ) -> LensInfo:  # fmt: skip
        """Write a lens durably. ``check`` raises if the owner must not have so many bytes of lenses together.

        Raises what it does, TooLarge, StoreFull, StoreReadOnly or InternalError.
        """
        arrays = {f"jacobians.{number}": np.ascontiguousarray(x, np.float32) for number, x in jacobians.items()}
        size = sum(each.nbytes for each in arrays.values())
        if size > self.limit:
            raise TooLarge(
                f"the lens has {size} bytes; this server keeps up to {self.limit} of all lenses together",
                limit_bytes=self.limit, needed_bytes=size,
            )  # fmt: skip
        folder = self._folders(owner)[0]
        try:
            with locked_folder(self._folder):
                held, own = (sum(map(_bytes, self._files(whose))) for whose in (None, owner))
                if held + size > self.limit:
                    raise StoreFull(
                        f"the lens has {size} bytes, and {held} of {self.limit} bytes are taken by others; delete some",
                        limit_bytes=self.limit, needed_bytes=size, held_bytes=held,
                    )  # fmt: skip
                check(own + size, f"your lenses have {own} bytes, and this one {size}; delete some first")
                make_folder(folder)
                stated = facts.model_dump_json(include=set(LensFacts.model_fields))
                with staged_file(self._folder, [save(arrays, {_ENTRY: stated})]) as staged:
                    os.replace(staged, folder / f"{lens}{SUFFIX}")
                sync(folder)
        except OSError as fault:
            raise refusal(fault, f"a lens of {size} bytes") from fault
        return self.get(lens, owner)

    def delete(self, lens: str, owner: str | None = None) -> None:
        """Remove a lens durably. Raises LensNotFound."""
        path = self.path(lens, owner)
        try:
            path.unlink()
            sync(path.parent)
        except FileNotFoundError:
            self.path(lens, owner)
        except OSError as fault:
            raise refusal(fault, "the removal of a lens") from fault

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
        """The folders with the lenses that an owner may use; the first is that of new ones."""
        if owner is not None:
            return [self._folder / _OWNED / owner]
        return [self._folder, *sorted((self._folder / _OWNED).glob("*"))]


def _described(path: Path) -> LensInfo:
    """Read the header of a file. Raises Unreadable, InvalidRequest, SafetensorError and OSError."""
    with open_tensors(path, framework="np") as file:
        text = (file.metadata() or {}).get(_ENTRY)
    if text is None:
        raise Unreadable("the safetensors file has no metadata entry 'lens'")
    facts = validate(LensFacts, from_json(text.encode(), "the metadata entry 'lens'"))
    return LensInfo(**facts.model_dump(), id=path.stem, bytes=_bytes(path))


def _bytes(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0
