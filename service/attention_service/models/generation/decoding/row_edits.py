"""The edits of one text, as its passes apply them: inside an attention, and of the states between modules."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from attention_contract.schemas.attention import Edit
from attention_service.core.edits import BoundEdit, apply, begun_at, is_placed, narrowed
from attention_service.core.problem import Selection
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_pass import STATE_TAPS
from attention_service.models.passes.points import Point, edited_point
from attention_service.runtime.operations.compute import bind_edits
from attention_transformers.model_layers import LayerKey


class RowEdits:
    """The edits of one text, which hold for all of its passes."""

    def __init__(self, loaded: LoadedModel, edits: Mapping[LayerKey, Sequence[Edit]], first: int = 0) -> None:
        """``first``: the first token that they change."""
        self._first = first
        device, dtype = loaded.model.device, loaded.model.dtype
        self._bound = {layer: bind_edits(stated, device, dtype, real_keys=True) for layer, stated in edits.items()}
        self.states: dict[Point, Sequence[BoundEdit]] = {}
        """The edits of each state between modules."""
        for layer, own in self._bound.items():
            for tap in dict.fromkeys(edit.tap for edit in own if edit.tap in STATE_TAPS):
                self.states[edited_point(layer, tap)] = [edit for edit in own if edit.tap == tap]
        self._inside = {
            layer: [edit for edit in own if edit.tap not in STATE_TAPS] for layer, own in self._bound.items()
        }
        self._placed = {layer for layer, own in self._inside.items() if any(map(is_placed, own))}

    def __bool__(self) -> bool:
        return bool(self._bound)

    @property
    def of_states_alone(self) -> bool:
        """True if none is inside an attention."""
        return not any(self._inside.values())

    @property
    def begin_later(self) -> bool:
        """True if they leave the first token, and so its prompt, as it is."""
        return self._first > 0

    @cached_property
    def key(self) -> Hashable:
        """Equal for edits after which a past has the same keys and values; None for no edits."""
        if not self._bound:
            return None
        stated = sorted((str(layer), [_numbers_of(edit) for edit in own]) for layer, own in self._bound.items())
        return self._first, sha256(repr(stated).encode()).digest()

    def inside(self, layer: LayerKey, queries: range, heads: tuple[int, int], keys: range) -> list[BoundEdit]:
        """The edits of a layer as they apply to these queries and keys; ``heads``: of queries, and of keys."""
        edits = self._inside.get(layer, [])
        if layer in self._placed:
            edits = narrowed(edits, Selection(queries=queries), *heads, keys=keys)
        return begun_at(edits, self._first, queries, keys) if self._first else edits

    def edited(self, point: Point, queries: range, state: Tensor) -> Tensor:
        """The state ``[1, L, d_model]`` of these tokens at a point after its edits."""
        edits = narrowed(self.states[point], Selection(queries=queries), 1, 1)
        return apply(begun_at(edits, self._first, queries, queries), point[1], state)


def _numbers_of(edit: BoundEdit) -> list[Any]:
    """All that an edit states, its tensors as the digests of their bytes."""
    stated: list[Any] = []
    for one in fields(edit):
        x = getattr(edit, one.name)
        if isinstance(x, Tensor):
            x = tuple(x.shape), sha256(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        stated.append(x)
    return stated
