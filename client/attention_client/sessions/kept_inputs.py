"""The inputs of a session, from which its past is computed again after the server has lost it.

Kept are the requests that changed the past, without the fields that only say what to return. Forks share their arrays.
"""

import mmap
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np

from attention_contract.base import WireModel, valid
from attention_contract.schemas.sessions import ReorderSession, ReplaceCache, StepRequest, TruncateSession
from attention_contract.tensor_files import from_safetensors, to_safetensors
from attention_contract.tensors import Array

Change = StepRequest | ReorderSession | TruncateSession | ReplaceCache
"""A request that changes a past."""
LARGE_STEP_TOKENS: Final = 2048
LARGE_STEP_BYTES: Final = 2**24
"""Tokens and bytes of the steps into which many small ones are joined, at most."""
_INPUTS: Final = ("query", "key", "value")
_ABOUT_THE_REPLY: Final = frozenset({
    "return_", "select", "average_heads", "return_state", "report_error", "compare", "encoding", "at", "step", "kernel",
    "version",
})  # fmt: skip


class KeptChange(NamedTuple):
    """A change and the session's length before it."""

    start: int
    change: Change


@dataclass
class KeptInputs:
    """The changes of one session in their order, within ``limit`` bytes of memory."""

    limit: int
    """Bytes of arrays that are held in memory; more are written to a temporary file, or give up the rest."""
    spill: bool = False
    """Write what exceeds the limit to a temporary file, which the system removes with the process."""
    joins: bool = True
    """Join small steps into large ones: right where the policy keeps every token."""
    missing: str | None = None
    """The reason why the past cannot be computed again; None if it can."""
    _kept: list[KeptChange] = field(default_factory=list)
    _bytes: int = 0

    def add(self, start: int, change: Change) -> None:
        """Keep a change. Its arrays are copied, since the caller may write to them."""
        if self.missing is not None:
            return
        made = _essential(change)
        self._kept.append(KeptChange(start, made))
        self._bytes += _bytes_of(made)
        if self._bytes > self.limit:
            self._exceed()

    def replace(self, change: ReplaceCache) -> None:
        """Forget all changes: this one replaces the whole past."""
        self._kept, self._bytes, self.missing = [], 0, None
        self.add(0, change)

    def truncate(self, length: int, end: int) -> None:
        """Forget the tokens from ``length`` to ``end``, the session's length so far."""
        while self._kept and self._kept[-1].start >= length and isinstance(self._kept[-1].change, StepRequest):
            end = self._kept[-1].start
            self._drop()
        if end <= length or self.missing is not None:
            return
        start, change = self._kept[-1] if self._kept else KeptChange(0, TruncateSession(length=length))
        if _is_plain(change) and self.joins:
            self._drop()
            self.add(start, _first_tokens(change, length - start))
        else:
            self.add(end, TruncateSession(length=length))

    def copy(self) -> "KeptInputs":
        """Return the inputs of a fork, which share these arrays."""
        made = copy(self)
        made._kept = list(self._kept)
        return made

    def changes(self) -> Iterator[Change]:
        """Yield the changes that make the past, small steps joined."""
        plain: list[StepRequest] = []
        first = 0
        for start, change in self._kept:
            if not (self.joins and _is_plain(change)):
                yield from _joined(plain)
                yield change
                plain = []
                continue
            if plain and not _fits_in(plain[-1], change, start - first):
                yield from _joined(plain)
                plain = []
            first = first if plain else start
            plain.append(change)
        yield from _joined(plain)

    def _drop(self) -> None:
        self._bytes -= _bytes_of(self._kept.pop().change)

    def _exceed(self) -> None:
        if not self.spill:
            self._kept, self._bytes = [], 0
            advice = "open it with more, or with spill=True to keep them in a file"
            self.missing = f"its inputs exceed keep_bytes={self.limit}; {advice}"
            return
        in_memory = [index for index, step in enumerate(self._kept) if _bytes_of(step.change)]
        written = _spilled([self._kept[index].change for index in in_memory])
        for index, change in zip(in_memory, written, strict=True):
            self._kept[index] = KeptChange(self._kept[index].start, change)
        self._bytes = 0


def _essential(change: Change) -> Change:
    """The change without what is only about its reply, over arrays of its own."""
    left_out = _ABOUT_THE_REPLY if isinstance(change, StepRequest) else frozenset()
    fields = {name: getattr(change, name) for name in change.model_fields_set - left_out}
    return valid(type(change), {name: _copied(value) for name, value in fields.items() if value is not None})


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if _is_spilled(value) else value.copy()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value


def _arrays(value: Any) -> Iterator[Array]:
    if isinstance(value, np.ndarray):
        yield value
        return
    if isinstance(value, WireModel):
        value = value.__dict__
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _arrays(item)


def _bytes_of(change: Change) -> int:
    """Bytes of the arrays that a change holds in memory."""
    return sum(array.nbytes for array in _arrays(change) if not _is_spilled(array))


def _is_spilled(array: Array) -> bool:
    """True if an array is a view of a mapped file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base.obj, mmap.mmap) if isinstance(base, memoryview) else isinstance(base, mmap.mmap)


def _is_plain(change: Change) -> TypeGuard[StepRequest]:
    """True for a step of inputs alone, which may be cut and joined."""
    return isinstance(change, StepRequest) and change.model_fields_set <= frozenset(_INPUTS)


def _fits_in(last: StepRequest, step: StepRequest, tokens: int) -> bool:
    """True if a plain step may be joined to ``last`` and those before it, which have this many tokens."""
    more = step.query.shape[-2]
    size = step.query.nbytes * (tokens + more) / max(more, 1)
    return tokens + more <= LARGE_STEP_TOKENS and size <= LARGE_STEP_BYTES and _fit(last, step)


def _fit(step: StepRequest, other: StepRequest) -> bool:
    """True if two plain steps have inputs that can be joined."""
    forms = [
        {
            name: (type(x), x.dtype, x.shape[:-2], x.shape[-1:])
            for name in _INPUTS
            if (x := getattr(inputs, name)) is not None
        }
        for inputs in (step, other)
    ]
    return forms[0] == forms[1]


def _joined(steps: list[StepRequest]) -> Iterator[StepRequest]:
    """One step over the tokens of plain steps that fit; none of none."""
    fields = {}
    for name in _INPUTS if steps else ():
        if (first := getattr(steps[0], name)) is not None:
            fields[name] = np.concatenate([getattr(step, name) for step in steps], -2).view(type(first))
    if steps:
        yield valid(StepRequest, fields)


def _first_tokens(step: StepRequest, count: int) -> StepRequest:
    given = {name: value for name in _INPUTS if (value := getattr(step, name)) is not None}
    return valid(StepRequest, {name: value[..., :count, :] for name, value in given.items()})


def _spilled(changes: Iterable[Change]) -> list[Change]:
    """The same changes over a temporary file without a name, which lasts as long as an array of it."""
    places = []
    with TemporaryFile() as file:
        for change in changes:
            start = file.tell()
            for piece in to_safetensors(change, "request"):
                file.write(piece)
            places.append((type(change), start, file.tell()))
            file.write(bytes(-file.tell() % 64))
        file.flush()
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return [from_safetensors(mapped[start:end], "request", kind) for kind, start, end in places]
