"""The past of a session as tensors, for operations that take a past: gathered from its pages, and written to them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_service.runtime.sessions.block_table import Cached
from attention_service.runtime.sessions.pages import Slab

_BY_SLICES = 16
"""From this many new tokens of a sequence on, they are copied by slices rather than slot by slot."""


def gathered(
    rows: Sequence[Cached],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """``past_key [B, Hkv, P, D]`` and ``past_value [B, Hkv, P, Dv]``.

    A single sequence in one run is not copied; callers must not change the tensors.
    """
    parts = [row.gathered() for row in rows]
    found = [part for part in parts if part is not None]
    if not found:
        shapes = {"past_key": key_shape, "past_value": value_shape}
        return {name: torch.empty(*shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    if len(found) == 1:
        key, value = found[0][0][None], found[0][1][None]
    else:
        key, value = torch.stack([part[0] for part in found]), torch.stack([part[1] for part in found])
    return {"past_key": key.to(dtype), "past_value": value.to(dtype)}


def write(rows: Sequence[Cached], keys: Tensor, values: Tensor) -> None:
    """Put the new tokens' keys ``[B, Hkv, tokens, D]`` and values ``[B, Hkv, tokens, Dv]`` into their slots."""
    tokens = keys.shape[2]
    slab = _one_slab(rows)
    if slab is None or tokens >= _BY_SLICES:
        for row, key, value in zip(rows, keys, values, strict=True):
            row.write(key, value)
        return
    # The slot mapping of all new tokens.
    slots = [slot for row in rows for span in row.new for slot in range(span.start, span.stop)]
    index = torch.tensor(slots, device=keys.device)
    slab.keys.index_copy_(1, index, keys.transpose(0, 1).flatten(1, 2))
    slab.values.index_copy_(1, index, values.transpose(0, 1).flatten(1, 2))


def _one_slab(rows: Sequence[Cached]) -> Slab | None:
    """The slab of all new tokens; None if there are several."""
    slabs = {id(span.slab): span.slab for row in rows for span in row.new}
    return next(iter(slabs.values())) if len(slabs) == 1 else None
