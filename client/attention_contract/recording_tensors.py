"""Names, places and parts of the tensors of a recording.

Names are ``{layer}.{tap}``, as in ``layers.0.weights``, ``encoder.2.hidden`` or ``decoder.1.cross.q``, and
``{stack}.embeddings``.
"""

import re
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

from attention_contract.tensors import Array

RecordedStack = Literal["layers", "encoder", "decoder"]
"""The layers of a model with one stack, or one of its two stacks."""
AXES: Final[dict[str, tuple[str, ...]]] = {
    "embeddings": ("queries", "width"),
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
_NAME: Final = re.compile(r"(layers|encoder|decoder)\.(?:(embeddings)|(\d{1,4})(\.cross)?\.([a-z_]+))")


class Place(NamedTuple):
    """The place of a tensor in a model."""

    stack: RecordedStack
    number: int | None
    """The layer's; None for the embeddings."""
    cross: bool
    kind: str
    """A tap, ``hidden`` or ``embeddings``."""

    @property
    def layer(self) -> str:
        """The name of the attention, as in ``decoder.0.cross``; the stack's for its embeddings."""
        return self.stack if self.number is None else f"{self.stack}.{self.number}{'.cross' if self.cross else ''}"

    @property
    def key_stack(self) -> RecordedStack:
        """The stack whose tokens are the keys."""
        return "encoder" if self.cross else self.stack


def place_of(name: str) -> Place | None:
    """The place that a tensor's name says; None for a name that no tensor of a recording has."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    stack, embeddings, number, cross, kind = found.groups()
    if embeddings:
        return Place(stack, None, False, embeddings)  # type: ignore[arg-type]
    place = Place(stack, int(number), cross is not None, kind)  # type: ignore[arg-type]
    return place if kind in AXES and kind != "embeddings" and not (cross and kind == "hidden") else None


class Sliceable(Protocol):
    """An array, or a tensor of a file that reads what it is asked for."""

    def __getitem__(self, key: Any, /) -> Any: ...


def take(part: Sliceable, indices: tuple[list[int] | slice, ...]) -> Array:
    """Read these indices of a tensor. The listed heads are read one by one, listed queries and keys from first to last.

    ``indices``: one item for each dimension, as ``RecordingQuery.indices`` returns them.
    """
    first, *rest = indices
    ranges = [each if isinstance(each, slice) else slice(min(each), max(each) + 1) for each in rest]
    rows = [first] if isinstance(first, slice) else [slice(index, index + 1) for index in first]
    found = np.concatenate([np.asarray(part[(row, *ranges)]) for row in rows])
    for axis, each in enumerate(rest, 1):
        if isinstance(each, list):
            found = found.take([index - min(each) for index in each], axis)
    return found
