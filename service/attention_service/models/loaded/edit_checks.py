"""Edits of a model's layers, checked: the taps that they name, the indices and the values."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_service.models.loaded.model_runner import ModelRunner, Use
from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_taps import GATE, INDEX_SCORES
from attention_service.models.passes.points import EDITED_EMBEDDINGS, EMBEDDINGS
from attention_service.runtime.binding.bound_request import BoundRequest, QueryLayout
from attention_service.runtime.binding.selection import check_edit_sizes

_SCORES: Final = frozenset({"scores", "capped_scores", "masked_scores"})


def check_edits(
    runner: ModelRunner, place: AttentionPlace, edits: Sequence[Edit], bound: BoundRequest, field: str = "edits",
    use: Use = "edit",
) -> None:  # fmt: skip
    """Raise InvalidRequest if an edit names a missing index or a tap not seen, or has a value that does not fit.

    ``bound``: the attention of the layer over its tokens; ``field``: that of the request in which the edits came;
    ``use``: ``generate`` for edits of the passes that generate.
    """
    for index, edit in enumerate(edits):
        check_edit(runner, place, edit, bound, f"{field}.{place.key}.{index}", use)


def check_edits_of_embeddings(
    runner: ModelRunner, edits: Sequence[Edit], bound: BoundRequest, field: str = "edits"
) -> None:
    """Check edits of the model's embeddings as ``check_edits`` does; ``bound``: any attention over the same tokens."""
    for index, edit in enumerate(edits):
        param = f"{field}.{EDITED_EMBEDDINGS}.{index}"
        runner.check(EMBEDDINGS, "edit", f"{param}.tap", "edit hidden of a layer")
        _check_finite(edit, param)
        check_edit_sizes(edit, _state(bound, runner.width(EMBEDDINGS) or 0), param)


def check_edit(
    runner: ModelRunner, place: AttentionPlace, edit: Edit, bound: BoundRequest, param: str, use: Use = "edit"
) -> None:
    """Check one edit, the field ``param``, as ``check_edits`` does."""
    runner.check_tap(place, edit.tap, use, f"{param}.tap")
    _check_finite(edit, param)
    sizes = {"output": _state(bound, place.output_width)}
    if edit.tap in {"mlp", "hidden"}:
        sizes[edit.tap] = _state(bound, runner.width((place.key, edit.tap)) or place.output_width)
    if edit.tap == "router":
        sizes["router"] = _state(bound, runner.width((place.key, "router")) or 0)
    if place.beside.gate is not None:
        sizes[GATE] = bound.replaced(value_dim=place.beside.gate.width)
    if place.beside.rate is not None:
        sizes[INDEX_SCORES] = bound.replaced(keys=bound.queries // place.beside.rate)
    check_edit_sizes(edit, sizes.get(edit.tap, bound), param)


def _state(bound: BoundRequest, width: int) -> BoundRequest:
    """The attention with an output of this width."""
    return bound.replaced(layout=QueryLayout(merged=True), heads=1, value_dim=width)


def _check_finite(edit: Edit, param: str) -> None:
    """Raise InvalidRequest if an edit puts NaN or infinity into a model; a score of −∞ hides its key."""
    for name in ("set", "scale", "value", "add"):
        given = edit.added if name == "add" else getattr(edit, name)
        if given is None:
            continue
        numbers = np.asarray(given)
        meant = np.isfinite(numbers)
        hides = edit.tap in _SCORES and name in {"set", "value"}
        if hides:
            meant |= np.isneginf(numbers)
        if not meant.all():
            beside = ", or -Infinity, which hides a key" if hides else ""
            raise InvalidRequest.at(f"{param}.{name}", f"expected finite numbers{beside}; got NaN or infinity")
