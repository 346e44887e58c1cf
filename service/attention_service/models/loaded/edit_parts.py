"""Parts of the edits of a request: some of their heads, queries or keys, with the tensors that belong to these."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from attention_contract.schemas.attention import Edit
from attention_service.core.edits import axis_of, from_token, varies


def differ_by_text(edits: Iterable[Edit]) -> bool:
    """True if a tensor of an edit may have an entry for each text."""
    return any(edit.tensor is not None and np.ndim(edit.tensor) > 2 for edit in edits)


def part_of(edit: Edit, axis: str, indices: Sequence[int], places: Sequence[int]) -> Edit:
    """Return an edit of these indices of an axis alone, with the entries of its tensor at these places."""
    changed: dict[str, Any] = {axis: [*indices]}
    for name in ("value", "add"):
        x = getattr(edit, name)
        if x is not None and varies(np.shape(x), edit.tap, axis):
            changed[name] = np.take(np.asarray(x), places, axis=axis_of(np.shape(x), edit.tap, axis))
    return edit.model_copy(update=changed)


def edits_from(edits: Mapping[str, Sequence[Edit]], first: int, length: int) -> dict[str, list[Edit]]:
    """Return the edits by layer as they apply to a text of this length from the ``first`` token on.

    One that touches none is left out; see ``from_token``.
    """
    begun: dict[str, list[Edit]] = {}
    for layer, stated in edits.items():
        for edit in stated:
            axis, indices, places = from_token(edit, first, range(length), range(length))
            if places:
                begun.setdefault(layer, []).append(part_of(edit, axis, indices, places))
    return begun
