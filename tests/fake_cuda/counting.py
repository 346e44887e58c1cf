"""What a computation would make a GPU and its host do: launches, copies either way, waits, and what is not allowed."""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor

_PACKAGE = "attention_service/"
_KEEPS_ITS_MEMORY = "runtime/operations/cuda_graph_forward.py"
"""The one place whose copies may be captured: the host's memory that they name stays its own."""


@dataclass(frozen=True)
class Copied:
    """A copy between the host and the device."""

    place: str
    shape: tuple[int, ...]
    blocking: bool
    """True if the host waits for it: it was not asked otherwise, or the host's memory is not pinned."""


@dataclass
class Counts:
    """What was counted. Each place is the innermost line of the project that was running, as ``core/file.py:12``."""

    launches: Counter[str] = field(default_factory=Counter)
    """Operations that launch kernels, by name; one for each call."""
    waits: list[str] = field(default_factory=list)
    """Places where the host waited until the device had done what it was given."""
    uploads: list[Copied] = field(default_factory=list)
    downloads: list[Copied] = field(default_factory=list)
    statistics: int = 0
    """Times that the allocator was asked for its statistics, each of which costs the host about 90 µs."""
    largest: int = 0
    """Bytes of the largest tensor that an operation made on the device."""
    peak: int = 0
    """Bytes of the device that were held at most, of those that were allocated meanwhile."""
    mixed: list[str] = field(default_factory=list)
    """Operations of the device that read a tensor of the host with more than one number."""
    illegal: list[str] = field(default_factory=list)
    """What happened while a stream was captured, and may not."""
    capturing: bool = False
    _alive: dict[int, object] = field(default_factory=dict)
    _held: int = 0

    def __str__(self) -> str:
        what = {name: count for name, count in vars(self).items() if count and name[0] != "_" and name != "launches"}
        return f"{self.launches.total()} launches {dict(self.launches)}, {what}"

    def launch(self, name: str, arguments: list[Tensor], made: list[Tensor]) -> None:
        """Count an operation on the device."""
        self.launches[name] += 1
        self.largest = max([self.largest, *(x.numel() * x.element_size() for x in made if x.is_cuda)])
        if any(x.device.type == "cpu" and x.ndim for x in arguments):
            self.mixed.append(f"{name} at {place()}")

    def hold(self, made: Iterable[Tensor], given: Iterable[Tensor] = ()) -> None:
        """Count the memory of tensors for as long as anybody holds it; that of ``given`` ones was there before."""
        for x, is_new in (*((x, False) for x in given), *((x, True) for x in made)):
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes() if is_new else 0
            if x.is_cuda and key not in self._alive:
                self._alive[key] = weakref.ref(storage, partial(self._free, key, size))
                self._held += size
                self.peak = max(self.peak, self._held)

    def _free(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self._held -= size

    def wait(self, why: str) -> None:
        """Count a wait of the host for the device."""
        self.waits.append(f"{place()} {why}")
        if self.capturing:
            self.illegal.append(f"{why} at {place()}")

    def copy(self, source: Tensor, into: Tensor, *, blocking: bool) -> None:
        """Count a copy between the host and the device."""
        copies = self.uploads if into.is_cuda else self.downloads
        copies.append(Copied(place(), tuple(source.shape), blocking))
        if self.capturing and (blocking or not place().startswith(_KEEPS_ITS_MEMORY)):
            self.illegal.append(f"a copy at {place()}")

    @property
    def blocking_uploads(self) -> list[Copied]:
        """Uploads for which the host waits."""
        return [each for each in self.uploads if each.blocking]


def place() -> str:
    """The innermost line of the project that is running; of the tests where it is none of the server's."""
    frame: FrameType | None = sys._getframe(1)
    tests = "?"
    while frame is not None:
        name = frame.f_code.co_filename
        if _PACKAGE in name:
            return f"{name.rpartition(_PACKAGE)[2]}:{frame.f_lineno}"
        if tests == "?" and "/test_" in name:
            tests = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return tests


def name_of(operation: Any) -> str:
    """``aten::add.Tensor`` as ``add``."""
    return str(operation._schema.name).rpartition("::")[2]
