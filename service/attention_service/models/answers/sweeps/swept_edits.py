"""The edits of a sweep over a model, one for each combination of the swept indices, by the layers that they change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

from attention_contract.errors import InvalidRequest
from attention_contract.schemas.analyses.effects import MAX_EFFECTS
from attention_contract.schemas.analyses.model_effects import ModelSweptEdit
from attention_contract.schemas.attention import Edit
from attention_service.core.edits import AXES
from attention_service.models.loaded.checked_request import CheckedRequest
from attention_service.models.loaded.edit_checks import check_edit
from attention_service.models.loaded.edit_parts import part_of
from attention_service.models.loaded.loaded_model import LoadedModel
from attention_service.models.loaded.streams.added_vectors import LayeredVector
from attention_service.models.passes.attention_places import AttentionPlace, kinds_of
from attention_service.models.passes.mixers.implicit_layers import is_by_channel
from attention_service.runtime.binding.selection import check_label_count
from attention_transformers.model_layers import LayerKey

_GROUPS = {"queries": "query_groups", "keys": "key_groups"}


@dataclass(frozen=True)
class LayerSweep:
    """The edits of a request's sweep."""

    swept: dict[str, list[Any]]
    """The indices along each swept axis, as the reply has them."""
    edits: list[Mapping[LayerKey, Edit]]
    """The edit of each layer, for each combination, the last axis fastest; none where no layer has such an index."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of indices along each axis."""
        return tuple(map(len, self.swept.values()))


def is_swept(loaded: LoadedModel, sweep: ModelSweptEdit, place: AttentionPlace) -> bool:
    """True if a layer with implicit weights is one of ``all`` that a sweep changes: it has the tap.

    A layer whose channels stand for heads has too many of them to be one of all in a sweep over heads.
    """
    if "heads" in sweep.over and is_by_channel(place.module):
        return False
    return loaded.runner.refuses((place.key, sweep.tap), "edit") is None


def check_swept(sweep: ModelSweptEdit, places: Sequence[AttentionPlace], param: str) -> None:
    """Raise InvalidRequest, for the field ``param``, for a sweep that changes no layer."""
    if not places:
        reason = "no layer that can be swept with others has it; name layers, such as one whose channels are swept"
        raise InvalidRequest.at(param, f"{sweep.tap}: {reason}")


def check_sweep_labels(sweep: ModelSweptEdit, labels: Sequence[str] | None, checked: CheckedRequest) -> None:
    """Raise InvalidRequest unless the labels are those of the swept queries and keys of every swept layer."""
    if labels is None:
        return
    axes = [axis for axis in sweep.over if axis in _GROUPS]
    for place, _ in checked.kinds:
        lengths = {"queries": checked.queries(place).length, "keys": checked.keys(place).length}
        for axis in axes:
            noun = "query" if axis == "queries" else "key"
            check_label_count("labels", labels, lengths[axis], f"{noun} of layer {place.key}")
        if len(axes) > 1 and checked.stack(place.queries) is not checked.stack(place.keys):
            raise InvalidRequest.at(
                "labels",
                f"the queries and the keys of layer {place.key} are different tokens; sweep over one of them, or leave "
                "labels out",
            )


def layer_sweep(
    loaded: LoadedModel, sweep: ModelSweptEdit, checked: CheckedRequest, *, every: bool = False
) -> LayerSweep:
    """Return the edits of a sweep. Raises InvalidRequest that names the field at fault.

    ``every``: the layers are all that can be swept, and not named; of a vector those that it has directions of.
    """
    places = checked.places
    if every and isinstance(sweep.add, LayeredVector):
        places = [place for place in places if str(place.key) in sweep.add.directions]
    check_swept(sweep, places, "layers")
    sizes = {place.key: _sizes(sweep, place, checked) for place in places}
    swept = swept_axes(sweep, sizes)
    for place in places:
        loaded.runner.check_tap(place, sweep.tap, "edit", "sweep.tap")
    for place, _ in kinds_of(places):
        plain = _plain(sweep, place.key)
        edits = [plain]
        if sweep.scales:
            edits.append(plain.model_copy(update={"add": _scaled(plain.add, max(sweep.scales, key=abs))}))
        for edit in edits:
            check_edit(loaded.runner, place, edit, checked.bound(place), "sweep")
    return LayerSweep(swept, [_edits(sweep, swept, chosen, places, sizes) for chosen in _combinations(swept)])


def swept_axes(sweep: ModelSweptEdit, sizes: Mapping[LayerKey, Mapping[str, int]]) -> dict[str, list[Any]]:
    """The indices along each swept axis. Raises InvalidRequest.

    ``sizes``: the heads, queries and keys of each swept layer.
    """
    layers = [*sizes]
    swept: dict[str, list[Any]] = {}
    for index, axis in enumerate(sweep.over):
        if axis == "layers":
            if sweep.window > len(layers):
                raise InvalidRequest.at(
                    "sweep.window", f"it takes {sweep.window} of {len(layers)} layers; take fewer", limit=len(layers)
                )
            swept[axis] = [*layers[: len(layers) - sweep.window + 1]]
            continue
        if axis == "scales":
            swept[axis] = [*(sweep.scales or ())]
            continue
        if axis not in AXES[sweep.tap]:
            reason = f"{sweep.tap} has no {axis}; it has {', '.join(AXES[sweep.tap])}"
            raise InvalidRequest.at(f"sweep.over.{index}", reason)
        most = max(axes[axis] for axes in sizes.values())
        groups = getattr(sweep, _GROUPS.get(axis, ""), None)
        listed = getattr(sweep, axis)
        for at, group in enumerate(groups or ()):
            if max(group) >= most:
                raise InvalidRequest.at(
                    f"sweep.{_GROUPS[axis]}.{at}",
                    f"{max(group)} is out of range; there are {most} {axis}, numbered from 0",
                    limit=most,
                )
        swept[axis] = [*range(most)] if listed is None and groups is None else list(groups or listed)
    if (count := prod(map(len, swept.values()))) > MAX_EFFECTS:
        raise InvalidRequest.at(
            "sweep",
            f"it has {count} edits; at most {MAX_EFFECTS} are tried in one request. List fewer layers, heads, queries "
            "or keys",
            limit=MAX_EFFECTS,
            actual=count,
        )
    return swept


def _combinations(swept: Mapping[str, Sequence[Any]]) -> list[dict[str, tuple[int, Any]]]:
    """The place and the index along each axis, of each combination."""
    every = product(*(enumerate(indices) for indices in swept.values()))
    return [dict(zip(swept, chosen, strict=True)) for chosen in every]


def _sizes(sweep: ModelSweptEdit, place: AttentionPlace, checked: CheckedRequest) -> dict[str, int]:
    """The heads, queries and keys of a tap of one layer."""
    heads = place.widths.kv_heads if sweep.tap in {"k", "v"} else place.widths.heads
    return {"heads": heads, "queries": checked.queries(place).length, "keys": checked.keys(place).length}


def _plain(sweep: ModelSweptEdit, layer: LayerKey) -> Edit:
    """The edit of all indices of a layer at once. Raises InvalidRequest for a layer without a direction."""
    own = {name: getattr(sweep, name) for name in Edit.model_fields}
    if isinstance(sweep.add, LayeredVector):
        own["add"] = sweep.add.at(layer)
    return Edit.model_construct(**own)


def _edits(
    sweep: ModelSweptEdit, swept: Mapping[str, Sequence[Any]], chosen: Mapping[str, tuple[int, Any]],
    places: Sequence[AttentionPlace], sizes: Mapping[LayerKey, Mapping[str, int]],
) -> Mapping[LayerKey, Edit]:  # fmt: skip
    """The edits of one combination."""
    first = chosen["layers"][0] if "layers" in chosen else 0
    count = sweep.window if "layers" in chosen else len(places)
    edits: dict[LayerKey, Edit] = {}
    for place in places[first : first + count]:
        edit = _plain(sweep, place.key)
        for axis, (at, index) in chosen.items():
            if axis == "layers":
                continue
            if axis == "scales":
                edit = edit.model_copy(update={"add": _scaled(edit.add, index)})
                continue
            group = index if isinstance(index, list) else [index]
            # Without a list, value covers all indices; with groups too.
            at_value = group if getattr(sweep, axis) is None else [at]
            edit = part_of(edit, axis, group, at_value)
        if all(max(getattr(edit, axis) or [0]) < size for axis, size in sizes[place.key].items()):
            edits[place.key] = edit
    return edits


def _scaled(added: Any, factor: float) -> Any:
    """A tensor times a number, with more digits than any model computes in."""
    return np.asarray(added, np.float64) * factor
