"""Marks in a computation by which a rehearsal tells its phases apart; on real tensors they do nothing."""

from typing import Any, cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

_modes = torch._C._len_torch_dispatch_stack


def phase(name: str | None, tensors: str, over_pairs: str | None = None) -> None:
    """Begin a phase of this name; None goes on with the last one. Tensors made from now on are called ``tensors``.

    over_pairs: the name of those with a number for each query and key, if it is another.
    """
    if not _modes():
        return
    mode = cast("Any", _get_current_dispatch_mode())
    if hasattr(mode, "begin"):
        if name is not None:
            mode.begin(name)
        mode.call(tensors, over_pairs)
