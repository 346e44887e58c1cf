"""Interventions on taps: knock out, ablate, patch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attention_service.core.problem import Selection
from attention_service.core.tensors import constant, heads_read_by, pick

AXES: dict[str, dict[str, int]] = {
    "q": {"heads": 1, "queries": 2},
    "k": {"heads": 1, "keys": 2},
    "v": {"heads": 1, "keys": 2},
    "scores": {"heads": 1, "queries": 2, "keys": 3},
    "capped_scores": {"heads": 1, "queries": 2, "keys": 3},
    "masked_scores": {"heads": 1, "queries": 2, "keys": 3},
    "weights": {"heads": 1, "queries": 2, "keys": 3},
    "context": {"heads": 1, "queries": 2},
    "output": {"queries": 1},
    "gate": {"heads": 1, "queries": 2},
    "index_scores": {"queries": 1, "keys": 2},
    "chosen": {"queries": 1, "keys": 2},
    "mlp": {"queries": 1},
    "router": {"queries": 1, "experts": 2},
    "hidden": {"queries": 1},
    "embeddings": {"queries": 1},
}
"""The dimensions of each tap by name; ``output`` is that of a module, ``[B, Q, d_model]``. Only layers of whole models
have ``gate`` and ``index_scores [B, Q, candidates]`` (``models.passes.module_taps``), ``chosen``, the states ``mlp``
and ``hidden [B, Q, d_model]``, and ``router [B, Q, experts]``; only models have ``embeddings [B, Q, d_model]``."""


@dataclass(frozen=True)
class BoundEdit:
    """One edit, its tensor on the device. Exactly one of ``set``, ``value``, ``scale`` and ``add`` is given."""

    tap: str
    heads: tuple[int, ...] | None = None
    """Indices of heads; for ``k`` and ``v`` they are key/value heads."""
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    set: float | None = None
    value: Tensor | None = None
    """Broadcastable to the selected part: the tap's shape with the listed indices in each listed dimension."""
    scale: float | None = None
    add: Tensor | None = None
    """Broadcastable as ``value`` is; a number has no dimensions."""
    renormalize: bool = False
    """Divide the touched rows of ``weights`` by their sums; a row that sums to zero stays as it is."""
    experts: tuple[int, ...] | None = None
    """Indices of the experts of a router."""
    real_keys: bool = False
    """True if padded keys keep weight 0, so that the texts of a batch do not change each other."""


def apply(edits: Iterable[BoundEdit], tap: str, x: Tensor, within: Tensor | None = None) -> Tensor:
    """Apply the edits of this tap in their order, never in place.

    ``within``: bool, broadcastable to x, True where those of ``real_keys`` may; default: everywhere.
    """
    for edit in edits:
        if edit.tap == tap:
            x = _edit(x, edit, within)
    return x


def write(edits: Iterable[BoundEdit], tap: str, x: Tensor) -> None:
    """Write the edits of this tap into a tensor that needs no gradient, as ``apply`` makes them in a new one.

    x is of one text and one query, ``[1, H, 1, D]``; the edits are ``narrowed`` to it.
    """
    for edit in edits:
        if edit.tap != tap:
            continue
        if edit.heads is not None and edit.value is None and edit.add is None:
            at = constant(edit.heads, x.device, torch.int64)
            if edit.scale is None:
                x.index_fill_(1, at, edit.set or 0.0)
            else:
                x.index_copy_(1, at, x.index_select(1, at) * edit.scale)
        else:
            x.copy_(_edit(x, edit, None))


def is_placed(edit: BoundEdit) -> bool:
    """True if an edit depends on the place of a query or a key, and so on the pass of a text that grows."""
    return any(
        getattr(edit, axis) is not None
        or any(varies(x.shape, edit.tap, axis) for x in (edit.value, edit.add) if x is not None)
        for axis in ("queries", "keys")
        if axis in AXES[edit.tap]
    )


def varies(shape: Sequence[int], tap: str, axis: str) -> bool:
    """True if an edit's tensor of this shape has several entries along an axis of its tap."""
    dim = axis_of(shape, tap, axis)
    return dim >= 0 and shape[dim] != 1


def narrowed(
    edits: Sequence[BoundEdit], selection: Selection, heads: int, kv_heads: int, keys: Sequence[int] | None = None
) -> list[BoundEdit]:
    """Return the edits as they apply to taps narrowed to this selection; one that touches none of it is left out.

    Narrowed keys and values have the heads of ``heads_read_by``. ``keys``: those that the taps have; default: all.
    """
    chosen: dict[str, Sequence[int] | None] = {"heads": selection.heads, "queries": selection.queries, "keys": keys}
    parts: list[BoundEdit | None] = []
    for edit in edits:
        part: BoundEdit | None = edit
        for axis, indices in chosen.items():
            if part is None or indices is None or axis not in AXES[edit.tap]:
                continue
            of_keys = axis == "heads" and edit.tap in ("k", "v")
            read = heads_read_by(indices, heads, kv_heads) if of_keys else indices
            part = _among(part, axis, read)
        parts.append(part)
    return [edit for edit in parts if edit is not None]


class Touched(Protocol):
    """The tap of an edit, and the tokens that it touches."""

    @property
    def tap(self) -> str:
        """The tap that it changes."""

    @property
    def queries(self) -> Sequence[int] | None:
        """Indices of queries; None for all."""

    @property
    def keys(self) -> Sequence[int] | None:
        """Indices of keys; None for all."""


def from_token(edit: Touched, first: int, queries: range, keys: range) -> tuple[str, list[int], list[int]]:
    """The axis by which an edit begins at the ``first`` token, its indices from there on, and their places.

    An edit of a tap with queries begins by its rows, another one by its keys. Indices count from the first of these
    queries and keys; a place is that among the indices that the edit touches.
    """
    axis, tokens = ("queries", queries) if "queries" in AXES[edit.tap] else ("keys", keys)
    listed = getattr(edit, axis)
    touched = range(len(tokens)) if listed is None else listed
    places = [at for at, index in enumerate(touched) if first - tokens.start <= index < len(tokens)]
    return axis, [touched[at] for at in places], places


def begun_at(edits: Sequence[BoundEdit], first: int, queries: range, keys: range) -> list[BoundEdit]:
    """Return the edits as they apply to the tokens from the ``first`` one on; one that touches none is left out.

    The edits are ``narrowed`` to these queries and keys.
    """
    begun: list[BoundEdit] = []
    for edit in edits:
        if (queries if "queries" in AXES[edit.tap] else keys).start >= first:
            begun.append(edit)
            continue
        axis, indices, places = from_token(edit, first, queries, keys)
        if places:
            begun.append(_with(edit, axis, tuple(indices), places))
    return begun


def _among(edit: BoundEdit, axis: str, chosen: Sequence[int]) -> BoundEdit | None:
    """Return the edit of a tap that has only these entries of an axis, in this order; None if it touches none."""
    listed = getattr(edit, axis)
    if listed is None:
        touched, places = None, list(chosen)
    else:
        place = {index: at for at, index in enumerate(listed)}
        touched = tuple(at for at, index in enumerate(chosen) if index in place)
        if not touched and not (axis == "keys" and edit.renormalize):  # which changes rows whatever their keys
            return None
        places = [place[chosen[at]] for at in touched]
    return _with(edit, axis, touched, places)


def single(edit: BoundEdit, axis: str, place: int, index: int) -> BoundEdit:
    """Return the part of an edit that touches one index of an axis: the one at this place of those it touches."""
    return _with(edit, axis, (index,), [place])


def _with(edit: BoundEdit, axis: str, indices: tuple[int, ...] | None, places: Sequence[int]) -> BoundEdit:
    """Return the edit of other indices of an axis, with these entries of its tensor, unless that is broadcast there."""
    changed: dict[str, Any] = {axis: indices}
    for name in ("value", "add"):
        x = getattr(edit, name)
        if x is not None and varies(x.shape, edit.tap, axis):
            changed[name] = pick(x, axis_of(x.shape, edit.tap, axis), places)
    return replace(edit, **changed)


def axis_of(shape: Sequence[int], tap: str, axis: str) -> int:
    """Return the dimension of an edit's tensor that is an axis of its tap; negative if it has none."""
    return AXES[tap][axis] - (4 if "heads" in AXES[tap] else 3) + len(shape)


def _edit(x: Tensor, edit: BoundEdit, within: Tensor | None) -> Tensor:
    picked = {axis: (dim, getattr(edit, axis)) for axis, dim in AXES[edit.tap].items()}
    listed = {dim: index for dim, index in picked.values() if index is not None}
    region = _region(x, listed)
    if edit.real_keys and within is not None:
        region = region & within
    # Chosen by `where`: an edited element then has gradient zero, and one listed twice is still edited once.
    x = torch.where(region, _replacement(x, edit, listed), x)
    if edit.renormalize:
        total = x.sum(-1, keepdim=True)  # [B, H, Q, 1]
        rows = _region(x, {dim: index for dim, index in listed.items() if dim != x.ndim - 1})
        x = torch.where(rows, x / total.masked_fill(total == 0, 1), x)
    return x


def _replacement(x: Tensor, edit: BoundEdit, listed: dict[int, tuple[int, ...]]) -> Tensor:
    """Return the new content of the region, in the shape of the tap (or one number)."""
    if edit.value is not None:
        return _placed(edit.value, x, listed)
    if edit.add is not None:
        return x + _placed(edit.add, x, listed)
    if edit.scale is not None:
        return x * edit.scale
    return torch.full((), 0.0 if edit.set is None else edit.set, dtype=x.dtype, device=x.device)


def _placed(patch: Tensor, x: Tensor, listed: dict[int, tuple[int, ...]]) -> Tensor:
    """Return the tensor of an edit, broadcastable to the tap x, with its entries at the listed indices."""
    patch = patch.to(device=x.device, dtype=x.dtype)
    if all(patch.ndim < x.ndim - dim or patch.shape[dim - x.ndim] == 1 for dim in listed):
        return patch  # the same at all of them
    sizes = [len(listed[dim]) if dim in listed else size for dim, size in enumerate(x.shape)]
    places = [
        constant(listed.get(dim, range(size)), x.device, torch.int64)  # of none it would be floats
        for dim, size in enumerate(x.shape)
    ]
    return torch.zeros_like(x).index_put(torch.meshgrid(places, indexing="ij"), patch.expand(sizes))


def _region(x: Tensor, listed: dict[int, tuple[int, ...]]) -> Tensor:
    """Mark the product of the listed indices: bool, broadcastable to x."""
    region = torch.ones((1,) * x.ndim, dtype=torch.bool, device=x.device)
    for dim, index in listed.items():
        inside = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device)
        inside = inside.index_fill(0, constant(index, x.device, torch.int64), True)
        region = region & inside.view([-1 if d == dim else 1 for d in range(x.ndim)])
    return region
