"""Cuts: the ways in which a parameter lies in a tensor of a checkpoint.

A cut takes a tensor, a weight ``[rows, width]`` or a bias ``[rows]``, and returns the parameter, as a view if possible.
It runs on the meta device for the shape. A tensor whose rows it cannot cut raises RuntimeError.

H query heads, Hkv key/value heads, D width of a head's queries and keys, Dv width of a head's values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadSizes:
    """The head counts and widths that a cut may need."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared: int = 0
    """Width of the part of a head's keys that is every head's."""


Cut = Callable[[Tensor, HeadSizes], Tensor]
_PLACES: Final = {"q": 0, "k": 1, "v": 2}


def same(tensor: Tensor, heads: HeadSizes) -> Tensor:
    """The tensor itself."""
    return tensor


def flat(tensor: Tensor, heads: HeadSizes) -> Tensor:
    """The tensor without its leading dimensions of 1, but for the last."""
    leading = next((at for at, size in enumerate(tensor.shape[:-1]) if size != 1), tensor.dim() - 1)
    return tensor.reshape(tensor.shape[leading:])


def transposed(tensor: Tensor, heads: HeadSizes) -> Tensor:
    """A weight stored ``[inputs, outputs]``, as GPT-2's Conv1D does; a bias stays as it is."""
    return tensor.t()


def row_part(part: int, of: int, before: Cut = same) -> Cut:
    """The ``part``-th of ``of`` equal parts of the rows, after another cut."""

    def cut(tensor: Tensor, heads: HeadSizes) -> Tensor:
        tensor = before(tensor, heads)
        if len(tensor) % of:
            raise RuntimeError(f"{len(tensor)} rows are not {of} equal parts")
        size = len(tensor) // of
        return tensor[part * size : (part + 1) * size]

    return cut


def thirds(role: str) -> Cut:
    """Queries, keys and values, each a third of the rows."""
    return row_part(_PLACES[role], 3)


def transposed_thirds(role: str) -> Cut:
    """Queries, keys and values, each a third of the columns of a transposed weight."""
    return row_part(_PLACES[role], 3, before=transposed)


def unequal(role: str) -> Cut:
    """H·D rows of queries, Hkv·D of keys, Hkv·Dv of values, one behind the other."""

    def cut(tensor: Tensor, heads: HeadSizes) -> Tensor:
        sizes = [heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim, heads.kv_heads * heads.value_dim]
        return torch.split(tensor, sizes)[_PLACES[role]]  # RuntimeError unless the sizes fill the rows

    return cut


def by_group(role: str) -> Cut:
    """The rows of each key/value head lie together: the queries that read it, its keys, its values.

    With as many key/value heads as query heads, these are GPT-NeoX's and BLOOM's rows by head.
    """

    def cut(tensor: Tensor, heads: HeadSizes) -> Tensor:
        together = heads.heads // heads.kv_heads
        groups = tensor.view(heads.kv_heads, together + 2, heads.head_dim, *tensor.shape[1:])
        chosen = groups[:, :together] if role == "q" else groups[:, together + _PLACES[role] - 1]
        return chosen.reshape(-1, *tensor.shape[1:])

    return cut


def shared_first(tensor: Tensor, heads: HeadSizes) -> Tensor:
    """Queries by head, whose last part meets the keys' shared part: that part first, as modules have it."""
    rows = tensor.view(heads.heads, heads.head_dim, -1)
    return rows.roll(heads.shared, 1).reshape(tensor.shape)


def latent_keys(tensor: Tensor, heads: HeadSizes) -> Tensor:
    """The keys, without their shared part, of rows that hold each head's keys and then its values."""
    return _of_latent(tensor, heads)[:, : -heads.value_dim].reshape(-1, tensor.shape[1])


def latent_values(tensor: Tensor, heads: HeadSizes) -> Tensor:
    """The values of the same rows."""
    return _of_latent(tensor, heads)[:, -heads.value_dim :].reshape(-1, tensor.shape[1])


def _of_latent(tensor: Tensor, heads: HeadSizes) -> Tensor:
    return tensor.view(heads.kv_heads, heads.head_dim - heads.shared + heads.value_dim, tensor.shape[1])
