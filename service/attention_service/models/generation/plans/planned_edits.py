"""Edits of the passes that generate: checked, as a plan has them."""

from collections.abc import Sequence
from typing import Final

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.attention import Edit
from attention_contract.schemas.openai import AttentionOfTokens
from attention_service.core.edits import AXES, varies
from attention_service.models.loaded.edit_checks import check_edits, check_edits_of_embeddings
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.passes.attention_places import BOTH, AttentionPlace
from attention_service.models.passes.points import EDITED_EMBEDDINGS, EMBEDDINGS
from attention_transformers.model_layers import LayerKey

_TOKEN_AXES: Final = ("queries", "keys")


def is_placed(edit: Edit) -> bool:
    """True for an edit of some positions, or of each one by its own numbers."""
    return bool(edit.queries or edit.keys) or any(_is_by(edit, axis) for axis in _TOKEN_AXES)


def _is_by(edit: Edit, axis: str) -> bool:
    """True if the tensor of an edit has numbers of its own for each index of an axis."""
    return edit.tensor is not None and axis in AXES[edit.tap] and varies(edit.tensor.shape, edit.tap, axis)


def planned_edits(
    loaded: LoadedModel, wanted: AttentionOfTokens, rows: Sequence[Sequence[int]], new_tokens: int
) -> dict[LayerKey, Sequence[Edit]]:
    """Check the edits of a request for so many new tokens behind these prompts. Returns them by layer.

    Raises InvalidRequest that names the field at fault.
    """
    length = max(map(len, rows)) + new_tokens
    edits_by_layer: dict[LayerKey, Sequence[Edit]] = {}
    for name, edits in wanted.edits.items():
        if name == EDITED_EMBEDDINGS:
            edits_by_layer[name] = _of_embeddings(loaded, wanted, edits, rows, length)
            continue
        place = loaded.places.get(name) or loaded.implicit.get(name)
        if place is None:
            known = ", ".join(key_name for key_name, other in loaded.places.items() if other.queries != "media")
            raise InvalidRequest.at("attention.edits", f"expected layers among {known}; got {name}")
        check_edits(loaded.runner, place, edits, place.bound(1, length, length), "attention.edits", "generate")
        for index, edit in enumerate(edits if wanted.from_ == "answer" else ()):
            _check_answer(loaded, place, edit, f"attention.edits.{name}.{index}")
        if place.calls > 1 and any(edit.tensor is not None and edit.tap in {"v", "context"} for edit in edits):
            raise InvalidRequest.at(
                "attention.edits",
                f"layer {name} attends in {place.calls} parts of its values; edit v and context by numbers while "
                "tokens are generated, or by a tensor in a forward request",
            )
        if place.keys_of != "tokens" and any(edit.keys or _is_by(edit, "keys") for edit in edits):
            raise InvalidRequest.at(
                "attention.edits",
                f"layer {name} has the keys of {place.keys_of}, which are not counted as tokens are; leave keys and "
                "tensors by key out",
            )
        placed = any(map(is_placed, edits))
        placed = placed or place.keys == BOTH
        if placed and len({len(row) for row in rows}) > 1:
            raise InvalidRequest.at("attention.edits", "edits of some queries or keys need prompts of one length")
        edits_by_layer[place.key] = edits
    return edits_by_layer


def _of_embeddings(
    loaded: LoadedModel, wanted: AttentionOfTokens, edits: Sequence[Edit], rows: Sequence[Sequence[int]], length: int
) -> Sequence[Edit]:
    """Check the edits of the embeddings. Raises InvalidRequest."""
    param = f"attention.edits.{EDITED_EMBEDDINGS}"
    bound = loaded.entered_place.bound(1, length, length)
    check_edits_of_embeddings(loaded.runner, edits, bound, "attention.edits")
    loaded.runner.check(EMBEDDINGS, "generate", param, "edit hidden of a layer")
    if wanted.from_ == "answer" and loaded.reader.pairs:
        raise InvalidRequest.at(param, "they are those of the prompt alone, and from says answer; leave one out")
    if any(map(is_placed, edits)) and len({len(row) for row in rows}) > 1:
        raise InvalidRequest.at(param, "edits of some queries need prompts of one length")
    return edits


def _check_answer(loaded: LoadedModel, place: AttentionPlace, edit: Edit, param: str) -> None:
    """Raise InvalidRequest for an edit that touches no token of an answer."""
    own = "target" if loaded.reader.pairs else "text"
    if place.queries != own:
        raise InvalidRequest.at(param, f"layer {place.key} reads the prompt alone, and from says answer; leave one out")
    if "queries" not in AXES[edit.tap] and (place.keys != own or place.keys_of != "tokens"):
        raise InvalidRequest.at(
            param, f"the keys of layer {place.key} are not those of the answer, and from says answer; leave one out"
        )
