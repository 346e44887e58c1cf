"""Heads and layers that an analysis reads in parts, sent in a request or recorded in a file."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_contract.errors import InvalidRequest, InvalidTensor
from attention_contract.recording_tensors import TensorPlace
from attention_contract.tensors import Array
from attention_service.core.inspection.head_reader import HeadReader, UnfitNumbers
from attention_service.core.tensors import to_torch
from attention_service.modules.recording_store import RecordingStore

Recorded = tuple[TensorPlace, tuple[int, ...]]
"""The place and the shape of a recorded tensor."""


@dataclass(frozen=True, eq=False)
class SentHeads:
    """Heads ``[heads, rows, width]`` of a request."""

    array: Array
    fields: tuple[str, ...]
    """The fields of the request, of which an error names the first."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each head."""
        return (self.array.shape[2],) * len(self.array)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.array.shape[1])

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[HeadReader]:
        """Read the heads within the block. Raises InvalidTensor for numbers that are refused there."""
        sent = to_torch(self.array)

        def read(parts: range, rows: range) -> Tensor:
            return sent[_slice(parts), _slice(rows)].to(device).double()

        try:
            yield HeadReader(read, self.widths, self.rows)
        except UnfitNumbers as fault:
            raise InvalidTensor(f"{', '.join(self.fields)}: {fault}", param=self.fields[0]) from fault


@dataclass(frozen=True, eq=False)
class RecordedHeads:
    """Heads, or layers without heads, of one recording."""

    store: RecordingStore
    recording: str
    owner: str | None
    tensors: Sequence[Recorded]
    """Tensors of one kind with the same rows; each of their heads is a part, and a tensor without heads is one."""
    field: str
    """The field of the request that chose them, which an error names."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each part."""
        return tuple(shape[-1] for _, shape in self.tensors for _ in _heads(shape))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.tensors[0][1][-2]

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[HeadReader]:
        """Read the heads within the block.

        Raises RecordingNotFound, InternalError for a file that cannot be read, and InvalidRequest for numbers that are
        refused there.
        """
        kind = self.tensors[0][0].kind
        with self.store.reading(self.recording, self.owner) as file:
            slices = [(file.get_slice(f"{place.layer}.{kind}"), _heads(shape)) for place, shape in self.tensors]
            parts = [(tensor, head) for tensor, heads in slices for head in heads]

            def read(which: range, rows: range) -> Tensor:
                heads_read = []
                for tensor, head in parts[_slice(which)]:
                    at = tensor[_slice(rows)] if head is None else tensor[head : head + 1, _slice(rows)][0]
                    heads_read.append(at.to(device).double())
                return torch.stack(heads_read)

            try:
                yield HeadReader(read, self.widths, self.rows)
            except UnfitNumbers as fault:
                raise InvalidRequest.at(self.field, f"{fault} in the recorded {kind}") from fault


Heads = SentHeads | RecordedHeads


def check_recorded(layers: Sequence[str] | None, recorded: Container[str], names: Sequence[str], kind: str) -> None:
    """Raise InvalidRequest for a layer that is not found, or if there is none at all."""
    if missing := [name for name in layers or () if name not in recorded]:
        raise InvalidRequest.at(
            "layers", f"no {kind} of {missing[0]!r} are recorded; there are {', '.join(names) or 'none'}"
        )
    if not names:
        raise InvalidRequest.at("id", f"the recording holds no {kind}; record the tap weights")


def _heads(shape: Sequence[int]) -> Sequence[int | None]:
    return range(shape[0]) if len(shape) == 3 else (None,)


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)
