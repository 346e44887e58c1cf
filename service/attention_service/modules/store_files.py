"""Files of the stores: only regular files are read, folders are made and files replaced durably, writers take turns."""

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from attention_contract.errors import AttentionError, InternalError, StoreFull, StoreReadOnly

STAGED: Final = ".new-"
"""The beginning of the names of files and folders that are being written; a crash may leave some."""
OF_OWNERS: Final = "of"
"""The folder, inside that of a store, with a folder for each owner."""
PARAMETERS: Final = "parameters-*.safetensors"
"""The name of a file of a module's parameters, with the version in place of ``*``."""
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}
_CODE: Final = re.compile(r"os error (\d+)")


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and wait until they are on the disk. Raises OSError."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in reversed(missing):
        sync(parent.parent)


@contextmanager
def staged_file(folder: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> Iterator[Path]:
    """Write a hidden file, which is on the disk within the block and gone after it, unless renamed. Raises OSError."""
    staged = folder / f"{STAGED}{secrets.token_hex(8)}"
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        yield staged
    finally:
        staged.unlink(missing_ok=True)


def remove_staged(folder: Path) -> None:
    """Remove the staged files of writers that were killed. The lock of the folder must be held."""
    for left in folder.glob(f"{STAGED}*"):
        left.unlink(missing_ok=True)


def clean(folder: Path) -> None:
    """Remove what writers have left in a folder whose process was killed, if it may be written to."""
    with suppress(OSError), locked(folder):
        remove_staged(folder)


def replace_file(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Put a file into the place of another once it is on the disk, or leave that as it was. Raises OSError.

    The lock of the folder must be held: what killed writers have left there is removed.
    """
    remove_staged(path.parent)
    with staged_file(path.parent, pieces, mode) as staged:
        os.replace(staged, path)
    sync(path.parent)


@contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process. Nothing is written for it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Make a folder unless there is one, and hold its lock. Raises OSError."""
    make_folder(folder)
    with locked(folder):
        yield


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most ``limit`` bytes. Raises OSError for any other."""
    descriptor = open_regular(path, limit)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit)


@contextmanager
def open_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Open a safetensors file for a block, as ``safe_open`` does. Raises SafetensorError, and OSError for a pipe.

    The file is read, and not mapped: a map of a file that is cut meanwhile ends the process (SIGBUS).
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    with safe_open(path, framework=framework, backend="pread") as file:
        yield file


def check_regular(path: Path, limit: int) -> None:
    """Raise OSError unless this is a regular file of at most ``limit`` bytes that may be read."""
    os.close(open_regular(path, limit))


def refusal(fault: OSError, thing: str, advice: str = "") -> AttentionError:
    """The error of a write of ``thing`` that the disk did not take. ``advice``: what else the caller can do."""
    if fault.errno in _FULL:
        return StoreFull(f"the disk has no room for {thing} ({reason(fault)}); delete some files, and try again")
    if fault.errno in _READ_ONLY:
        return StoreReadOnly(
            f"the server may not write {thing} to its store ({reason(fault)}); make the models folder writable{advice}"
        )
    return InternalError(f"the store could not write {thing}: {reason(fault)}")


def os_error(fault: Exception) -> OSError:
    """The OSError that a fault of safetensors tells of in its text."""
    code = _CODE.search(str(fault))
    return OSError(str(fault)) if code is None else OSError(int(code[1]), os.strerror(int(code[1])))


def reason(fault: Exception) -> str:
    """Return the reason of a fault in one line, without the paths of the server that the text of an OSError names."""
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__


def open_regular(path: Path, limit: int | None = None) -> int:
    """Open a regular file of at most ``limit`` bytes for reading. Raises OSError for any other, and for a link."""
    # Opening a pipe waits for a writer unless told not to.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    opened = os.fstat(descriptor)
    if stat.S_ISREG(opened.st_mode) and (limit is None or opened.st_size <= limit):
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(opened.st_mode):
        raise OSError(errno.EFBIG, f"it has {opened.st_size} bytes; expected at most {limit}")
    raise OSError(errno.EINVAL, "it is no regular file")
