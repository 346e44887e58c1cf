"""The bytes of all recordings, counted in a file beside them, so that a new one does not have all others looked at.

Every change of the folder of recordings that changes a count is made within ``changing``. Its lock is held for no
longer, and is one for all processes that share the folder. The file is empty during a change: if the process ends
there, or the change fails, the next one counts all files anew.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from attention_service.modules.store_files import make_folder

COUNTS_FILE: Final = ".counts"
NOBODY: Final = ""
"""The key of the recordings that belong to no owner."""


@dataclass
class Counts:
    """Bytes of recordings by owner."""

    held: dict[str, int]
    at: float
    """The time at which all files were looked at last, in seconds since 1970."""

    @property
    def total(self) -> int:
        """Bytes of all recordings."""
        return sum(self.held.values())

    def of(self, owner: str | None) -> int:
        """Bytes of the recordings of one owner."""
        return self.held.get(owner or NOBODY, 0)

    def change(self, owner: str | None, size: int) -> None:
        """Add bytes to those of an owner, or take some away."""
        self.held[owner or NOBODY] = max(0, self.of(owner) + size)


class RecordingCounts:
    """The counts of one folder, on behalf of all processes that share it."""

    def __init__(self, folder: Path, count: Callable[[], dict[str, int]]) -> None:
        self._folder = folder
        self._count = count
        """Looks at every recording, and returns the bytes by owner."""

    @contextmanager
    def changing(self, newest_s: float | None = None) -> Iterator[Counts]:
        """The counts, to be changed together with the folder while nobody else changes either. Raises OSError.

        All files are looked at if there are no counts, or if these are more than ``newest_s`` seconds old.
        """
        make_folder(self._folder)
        descriptor = os.open(self._folder / COUNTS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            counts = _read(descriptor)
            os.ftruncate(descriptor, 0)
            if counts is None or (newest_s is not None and not 0 <= time.time() - counts.at <= newest_s):
                counts = Counts(self._count(), time.time())
            yield counts
            with suppress(OSError):  # a full disk: the change stands, and the next one counts anew
                os.pwrite(descriptor, json.dumps([counts.held, counts.at]).encode(), 0)
        finally:
            os.close(descriptor)

    def forget(self) -> None:
        """Have the next change count all files, since a power failure may have kept old counts."""
        with suppress(OSError):
            os.truncate(self._folder / COUNTS_FILE, 0)


def _read(descriptor: int) -> Counts | None:
    try:
        held, at = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
        return Counts({str(owner): int(size) for owner, size in held.items()}, float(at))
    except (ValueError, TypeError, AttributeError):
        return None
