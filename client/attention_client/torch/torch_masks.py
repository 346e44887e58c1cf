"""The masks of ``torch.nn.MultiheadAttention`` as the service's: there True forbids, here it lets a query look."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskSizes:
    """The sizes that masks must have."""

    batch: int
    heads: int
    queries: int
    keys: int


def request_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: MaskSizes, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the fields ``mask`` and ``key_mask`` of a request, where there are any.

    attn_mask ``[Lq, Lk]`` or ``[B·H, Lq, Lk]``, key_padding_mask ``[B, Lk]``: bool, True forbids; or float, added to
    the scores. A float padding mask becomes part of ``mask``, in this dtype, and gradients reach both. Raises
    ValueError.
    """
    mask = None if attn_mask is None else _by_head(attn_mask, sizes)
    if key_padding_mask is None:
        return {} if mask is None else {"mask": _allowing(mask)}
    _check("key_padding_mask", key_padding_mask, [(sizes.batch, sizes.keys)])
    if key_padding_mask.dtype == torch.bool:
        return ({} if mask is None else {"mask": _allowing(mask)}) | {"key_mask": ~key_padding_mask}
    padding = key_padding_mask.to(dtype)[:, None, None]
    return {"mask": padding if mask is None else _added(mask, dtype) + padding}


def _by_head(attn_mask: Tensor, sizes: MaskSizes) -> Tensor:
    """``[Lq, Lk]``, or ``[B, H, Lq, Lk]``."""
    pairs = sizes.queries, sizes.keys
    _check("attn_mask", attn_mask, [pairs, (sizes.batch * sizes.heads, *pairs)])
    return attn_mask if attn_mask.dim() == 2 else attn_mask.view(sizes.batch, sizes.heads, *pairs)


def _allowing(mask: Tensor) -> Tensor:
    return ~mask if mask.dtype == torch.bool else mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    return mask.to(dtype)


def _check(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name}: expected bool, True to forbid, or floats to add; got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {list(mask.shape)}")
