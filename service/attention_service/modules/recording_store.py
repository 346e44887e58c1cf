"""The durable store of recordings: one safetensors file each, named by a hash of its content.

::

    <root>/recordings/<id>.safetensors
    <root>/recordings/of/<owner>/<id>.safetensors

The second form is for a recording that belongs to one owner. To another owner it is missing. None, in place of an
owner, stands for those who may use all recordings.

A recording never changes. It is written to a hidden file, which is renamed once it is on the disk. A crash leaves the
whole recording or none, and perhaps a hidden file, which ``clean`` removes. Writers of several processes take turns by
a lock on the folder, so that they keep the limit together; a removal does not wait for them. Reading maps the file and
copies the asked part alone. A damaged file stays on the disk until it is deleted or its recording is added again, and
does not count.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError

from attention_contract.errors import (
    AttentionError,
    InternalError,
    InvalidRequest,
    RecordingNotFound,
    StoreFull,
    TooLarge,
    Unreadable,
)
from attention_contract.recording_tensors import taken_numbers
from attention_contract.schemas.recordings import (
    RecordedTensor,
    RecordingFile,
    RecordingInfo,
    RecordingList,
    RecordingQuery,
)
from attention_contract.tensors import DTYPES
from attention_contract.wire import to_safetensors
from attention_service.modules.recording_files import (
    RECORDING_ID,
    SUFFIX,
    content_id,
    described,
    recordings_in,
    summary,
)
from attention_service.modules.store_files import (
    OF_OWNERS,
    locked_folder,
    make_folder,
    open_tensors,
    reason,
    refusal,
    remove_staged,
    staged_file,
    sync,
)

_KNOWN: Final = 1024
"""Descriptions that are remembered."""


class RecordingStore:
    """Recordings on disk. Every method blocks and may be called from any thread."""

    def __init__(self, root: Path, limit: int) -> None:
        self._folder = root / "recordings"
        self.limit = limit
        """Bytes of all recordings together."""
        self._described = lru_cache(maxsize=_KNOWN)(described)  # a file never changes

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def listing(self, owner: str | None = None) -> RecordingList:
        """Every recording of an owner, the newest first."""
        recordings, damaged, total = [], [], 0
        for path in sorted(path for folder in self._folders(owner) for path in recordings_in(folder)):
            try:
                size = path.lstat().st_size
                recordings.append(self._described(path, size))
                total += size
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (Unreadable, SafetensorError, OSError):
                damaged.append(path.stem)
        recordings.sort(key=lambda recording: (recording.created, recording.id), reverse=True)
        return RecordingList(
            recordings=[summary(recording) for recording in recordings],
            bytes=total,
            limit_bytes=self.limit,
            damaged=damaged,
        )

    def path(self, recording: str, owner: str | None = None) -> Path:
        """The file of a recording. Raises RecordingNotFound."""
        for path in self._places(recording, owner):
            if path.is_file() and not path.is_symlink():
                return path
        raise _missing(recording)

    def _places(self, recording: str, owner: str | None) -> list[Path]:
        """The paths that the file of a recording may have."""
        known = RECORDING_ID.fullmatch(recording) is not None
        return [folder / f"{recording}{SUFFIX}" for folder in self._folders(owner)] if known else []

    def _folders(self, owner: str | None) -> list[Path]:
        """The folders with the recordings that an owner may use."""
        if owner is not None:
            return [self._folder / OF_OWNERS / owner]
        return [self._folder, *sorted((self._folder / OF_OWNERS).glob("*"))]

    def part_bytes(self, recording: str, query: RecordingQuery, owner: str | None = None) -> int:
        """Bytes that ``get`` holds. Raises what ``get`` raises, before anything is read."""
        name = query.tensor_name()
        if name is None:
            return 0
        tensor = _tensor(self._info(recording, owner), name)
        numbers = taken_numbers(query.indices(name, tuple(tensor.shape)), query.pool)
        return numbers * DTYPES[tensor.dtype].itemsize

    def get(self, recording: str, query: RecordingQuery, owner: str | None = None) -> RecordingInfo:
        """The description of a recording, with the part of a tensor that the query names.

        Raises RecordingNotFound, InvalidRequest for a tensor or an index that it does not have, and InternalError for a
        file that cannot be read.
        """
        info, name = self._info(recording, owner), query.tensor_name()
        if name is None:
            return info
        shape = tuple(_tensor(info, name).shape)
        with self.reading(recording, owner, "np") as file:
            return info.model_copy(update={"value": query.read(file.get_slice(name), name, shape)})

    @contextmanager
    def reading(self, recording: str, owner: str | None = None, framework: str = "pt") -> Iterator[Any]:
        """Open the file of a recording for a block.

        Raises RecordingNotFound, also if it is deleted meanwhile, and InternalError if the file cannot be read.
        """
        try:
            with open_tensors(self.path(recording, owner), framework=framework) as file:
                yield file
        except FileNotFoundError:
            raise _missing(recording) from None
        except (SafetensorError, OSError) as fault:
            raise _damaged(recording, reason(fault)) from fault

    def _info(self, recording: str, owner: str | None) -> RecordingInfo:
        path = self.path(recording, owner)
        try:
            return self._described(path, path.stat().st_size)
        except FileNotFoundError:  # deleted meanwhile
            raise _missing(recording) from None
        except Unreadable as fault:
            raise _damaged(recording, fault.detail) from fault
        except (SafetensorError, OSError) as fault:
            raise _damaged(recording, reason(fault)) from fault

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(
        self, recording: RecordingFile, owner: str | None = None, check: Callable[[int, str], None] | None = None
    ) -> RecordingInfo:
        """Write a recording durably, unless its owner has it.

        ``check`` raises if the owner's recordings must not have so many bytes together. Raises what it does, TooLarge,
        StoreFull, StoreReadOnly, or InternalError.
        """
        pieces = to_safetensors(recording, "recording")
        size = sum(map(len, pieces))
        if size > self.limit:
            raise TooLarge(
                f"the recording has {size} bytes; this server keeps up to {self.limit} of all recordings together",
                limit_bytes=self.limit,
                needed_bytes=size,
            )
        path = self._folders(owner)[0] / f"{content_id(recording, owner)}{SUFFIX}"
        try:
            with locked_folder(self._folder):
                if (stored := self._stored(path)) is not None:
                    return stored
                try:
                    self._check_limits(size, owner, check, _bytes)
                except AttentionError:  # some may be damaged, which only reading tells
                    self._check_limits(size, owner, check, self._whole_bytes)
                make_folder(path.parent)
                with staged_file(self._folder, pieces) as staged:
                    made = described(staged, size, path.stem)
                    os.replace(staged, path)
                    sync(path.parent)
                    return made
        except OSError as fault:
            raise refusal(fault, f"a recording of {size} bytes") from fault

    def _stored(self, path: Path) -> RecordingInfo | None:
        """The recording at a path; None if there is none, or a damaged one."""
        with suppress(FileNotFoundError, Unreadable, SafetensorError):
            return self._described(path, path.stat().st_size)
        return None

    def _check_limits(
        self, size: int, owner: str | None, check: Callable[[int, str], None] | None, counted: Callable[[Path], int]
    ) -> None:
        """Raise StoreFull, or what ``check`` does, by the bytes that are ``counted`` of each recording."""
        by_folder = {folder: sum(map(counted, recordings_in(folder))) for folder in self._folders(None)}
        held, own = sum(by_folder.values()), by_folder.get(self._folders(owner)[0], 0)
        if held + size > self.limit:
            raise StoreFull(
                f"the recording has {size} bytes, and {held} of {self.limit} bytes are taken by others; delete "
                "some, or raise the server's recordings limit",
                limit_bytes=self.limit,
                needed_bytes=size,
                held_bytes=held,
            )
        if check is not None and owner is not None:
            check(own + size, f"your recordings have {own} bytes, and this one {size}; delete some first")

    def delete(self, recording: str, owner: str | None = None) -> None:
        """Remove a recording durably, or what lies in its place and is none. Raises RecordingNotFound."""
        for path in self._places(recording, owner):
            if self._remove(path):
                return
        raise _missing(recording)

    def _remove(self, path: Path) -> bool:
        """Remove a file; False if it is gone."""
        try:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
            sync(path.parent)
        except FileNotFoundError:
            return False
        except OSError as fault:
            raise refusal(fault, "the removal of a recording") from fault
        return True

    def _whole_bytes(self, path: Path) -> int:
        """Bytes of a recording that count; 0 if it is damaged or gone."""
        size = _bytes(path)
        try:
            self._described(path, size)
        except (FileNotFoundError, Unreadable, SafetensorError):
            return 0
        except OSError:  # it may be whole, and cannot be opened now
            return size
        return size

    def clean(self) -> None:
        """Remove the leftovers of crashes."""
        if not self._folder.is_dir():
            return
        with locked_folder(self._folder):
            remove_staged(self._folder)


def _bytes(path: Path) -> int:
    """Bytes of a file; 0 if it is gone."""
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _tensor(info: RecordingInfo, name: str) -> RecordedTensor:
    tensor = next((tensor for tensor in info.tensors if tensor.name == name), None)
    if tensor is None:
        names = [stored.name for stored in info.tensors]
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        raise InvalidRequest.at("tensor", f"the recording has no {name[:80]!r}; it has {', '.join(names[:12])}{more}")
    return tensor


def _missing(recording: str) -> RecordingNotFound:
    return RecordingNotFound(f"no recording has the id {recording[:64]!r}; GET /v1/recordings lists them", param="id")


def _damaged(recording: str, why: str) -> InternalError:
    return InternalError(f"the stored recording {recording} cannot be read: {why}; delete it")
