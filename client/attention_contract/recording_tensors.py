"""Names, places and parts of the tensors of a recording.

Names are ``{layer}.{tap}``, as in ``layers.0.weights``, ``encoder.2.hidden`` or ``decoder.1.cross.q``, and
``{stack}.embeddings`` and ``{stack}.final``.
"""

import math
import re
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from attention_contract.tensors import Array

RecordedStack = Literal["layers", "encoder", "decoder", "vision"]
"""The layers of a model with one stack, one of its two stacks, or the layers that see images beside a text."""
AXES: Final[dict[str, tuple[str, ...]]] = {
    "embeddings": ("queries", "width"),
    "final": ("queries", "width"),
    "hidden": ("queries", "width"),
    "q": ("heads", "queries", "width"),
    "k": ("heads", "keys", "width"),
    "v": ("heads", "keys", "width"),
    "scores": ("heads", "queries", "keys"),
    "capped_scores": ("heads", "queries", "keys"),
    "masked_scores": ("heads", "queries", "keys"),
    "weights": ("heads", "queries", "keys"),
    "context": ("heads", "queries", "width"),
    "lse": ("heads", "queries"),
    "output": ("queries", "width"),
}
"""The dimensions of each kind of tensor."""
_NAME: Final = re.compile(r"(layers|encoder|decoder|vision)\.(?:(embeddings|final)|(\d{1,4})(\.cross)?\.([a-z_]+))")


class TensorPlace(NamedTuple):
    """The place of a tensor in a model."""

    stack: RecordedStack
    number: int | None
    """The layer's; None for the embeddings and the final state."""
    cross: bool
    kind: str
    """A tap, ``hidden``, ``embeddings`` or ``final``."""

    @property
    def layer(self) -> str:
        """The name of the attention, as in ``decoder.0.cross``; the stack's for its embeddings and final state."""
        return self.stack if self.number is None else f"{self.stack}.{self.number}{'.cross' if self.cross else ''}"

    @property
    def key_stack(self) -> RecordedStack:
        """The stack whose tokens are the keys."""
        return "encoder" if self.cross else self.stack


def place_of(name: str) -> TensorPlace | None:
    """The place that a tensor's name says; None for a name that no tensor of a recording has."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    stack, of_stack, number, cross, kind = match.groups()
    if of_stack:
        return TensorPlace(stack, None, False, of_stack)  # type: ignore[arg-type]
    place = TensorPlace(stack, int(number), cross is not None, kind)  # type: ignore[arg-type]
    of_layer = kind in AXES and kind not in {"embeddings", "final"}
    return place if of_layer and not (cross and kind == "hidden") else None


class Sliceable(Protocol):
    """An array, or a tensor of a file that reads what it is asked for."""

    def __getitem__(self, key: Any, /) -> Any: ...


Indices = list[int] | slice
"""The part of one dimension that is read: indices, or a range with both its ends."""
_STRIP: Final = 2**20
"""Numbers that are read at a time to be pooled, or ``pool`` rows if these are more."""


def take(part: Sliceable, indices: tuple[Indices, ...]) -> Array:
    """Read these indices of a tensor. The listed heads are read one by one, listed queries and keys from first to last.

    ``indices``: one item for each dimension, as ``RecordingQuery.indices`` returns them.
    """
    first, *rest = indices
    ranges = [
        chosen_at if isinstance(chosen_at, slice) else slice(min(chosen_at), max(chosen_at) + 1) for chosen_at in rest
    ]
    rows = [first] if isinstance(first, slice) else [slice(index, index + 1) for index in first]
    chosen = np.concatenate([np.asarray(part[(row, *ranges)]) for row in rows])
    for axis, chosen_at in enumerate(rest, 1):
        if isinstance(chosen_at, list):
            chosen = chosen.take([index - min(chosen_at) for index in chosen_at], axis)
    return chosen


def take_pooled(part: Sliceable, indices: tuple[Indices, ...], pool: int) -> Array:
    """Read the largest number of each square of ``pool`` of these queries and keys, one strip of a head at a time.

    ``indices`` of heads, queries and keys; the result is ``[heads, ⌈queries / pool⌉, ⌈keys / pool⌉]``.
    """
    heads, queries, keys = indices
    height, many, columns = _strip(indices, pool), _count(queries), _count(keys)
    if not (_count(heads) and many and columns):
        return take(part, indices)[:, ::pool, ::pool]
    blocks = []
    for head in range(_count(heads)):
        for start in range(0, many, height):
            block = take(part, (_some(heads, head, head + 1), _some(queries, start, start + height), keys))
            for axis in (1, 2):
                block = np.maximum.reduceat(block, range(0, block.shape[axis], pool), axis)
            blocks.append(block)
    return np.concatenate(blocks, axis=1).reshape(_count(heads), -(-many // pool), -(-columns // pool))


def taken_numbers(indices: tuple[Indices, ...], pool: int | None) -> int:
    """The most numbers that ``take`` or ``take_pooled`` holds: the result, once more in the reply, and a strip."""
    counts = [*map(_count, indices)]
    if pool is None:
        return 2 * math.prod(counts)
    heads, queries, keys = counts
    return 2 * heads * -(-queries // pool) * -(-keys // pool) + 2 * min(_strip(indices, pool), queries) * keys


def _count(index: Indices) -> int:
    """The number of indices."""
    return len(index) if isinstance(index, list) else max(0, index.stop - index.start)


def _some(index: Indices, start: int, stop: int) -> Indices:
    """The indices from number ``start`` to before number ``stop``."""
    if isinstance(index, list):
        return index[start:stop]
    return slice(index.start + start, min(index.start + stop, index.stop))


def _strip(indices: tuple[Indices, ...], pool: int) -> int:
    """Rows of a strip: a multiple of ``pool``."""
    return max(1, _STRIP // (max(1, _count(indices[2])) * pool)) * pool
