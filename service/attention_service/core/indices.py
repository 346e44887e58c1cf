"""Picking entries along a dimension."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pick(x: Tensor, dim: int, index: Sequence[int]) -> Tensor:
    """The listed entries of one dimension, in the order of the list; a view of a single one."""
    if len(index) == 1:
        return x.narrow(dim, index[0], 1)
    return x.index_select(dim, torch.tensor(index, device=x.device))
