"""Interventions on taps: knock out, ablate, patch."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

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
}
"""The dimensions of each tap by name; ``output`` is that of a module, ``[B, Q, d_model]``."""


@dataclass(frozen=True)
class BoundEdit:
    """One edit, its tensor on the device. Exactly one of ``set``, ``value`` and ``scale`` is given."""

    tap: str
    heads: tuple[int, ...] | None = None
    """Indices of heads; for ``k`` and ``v`` they are key/value heads."""
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    set: float | None = None
    value: Tensor | None = None
    """Broadcastable to the selected part: the tap's shape with the listed indices in each listed dimension."""
    scale: float | None = None
    renormalize: bool = False
    """Divide the touched rows of ``weights`` by their sums; a row that sums to zero stays as it is."""


def apply(edits: Iterable[BoundEdit], tap: str, x: Tensor) -> Tensor:
    """Apply the edits of this tap in their order, never in place."""
    return reduce(_edit, (edit for edit in edits if edit.tap == tap), x) if edits else x


def _edit(x: Tensor, edit: BoundEdit) -> Tensor:
    picked = {axis: (dim, getattr(edit, axis)) for axis, dim in AXES[edit.tap].items()}
    listed = {dim: index for dim, index in picked.values() if index is not None}
    # Chosen by `where`: an edited element then has gradient zero, and one listed twice is still edited once.
    x = torch.where(_region(x, listed), _replacement(x, edit, listed), x)
    if edit.renormalize:
        total = x.sum(-1, keepdim=True)  # [B, H, Q, 1]
        rows = _region(x, {dim: index for dim, index in listed.items() if dim != x.ndim - 1})
        x = torch.where(rows, x / total.masked_fill(total == 0, 1), x)
    return x


def _replacement(x: Tensor, edit: BoundEdit, listed: dict[int, tuple[int, ...]]) -> Tensor:
    """Return the new content of the region, in the shape of the tap (or one number)."""
    if edit.value is not None:
        sizes = [len(listed[dim]) if dim in listed else size for dim, size in enumerate(x.shape)]
        places = [
            torch.tensor(listed.get(dim, range(size)), dtype=torch.int64, device=x.device)  # of none it would be floats
            for dim, size in enumerate(x.shape)
        ]
        patch = edit.value.to(device=x.device, dtype=x.dtype).expand(sizes)
        return torch.zeros_like(x).index_put(torch.meshgrid(places, indexing="ij"), patch)
    if edit.scale is not None:
        return x * edit.scale
    return torch.full((), 0.0 if edit.set is None else edit.set, dtype=x.dtype, device=x.device)


def _region(x: Tensor, listed: dict[int, tuple[int, ...]]) -> Tensor:
    """Mark the product of the listed indices: bool, broadcastable to x."""
    region = torch.ones((1,) * x.ndim, dtype=torch.bool, device=x.device)
    for dim, index in listed.items():
        inside = torch.zeros(x.shape[dim], dtype=torch.bool, device=x.device)
        inside = inside.index_fill(0, torch.tensor(index, device=x.device), True)
        region = region & inside.view([-1 if d == dim else 1 for d in range(x.ndim)])
    return region
