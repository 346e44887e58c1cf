"""Masks of ``transformers`` models in the service's terms.

``transformers`` makes one mask for all layers of a kind before the first of them runs. ``service_mask`` makes it with
the library's own ``sdpa_mask``: None, or bool ``[B, 1, Lq, Lk]``, True where a query may look. A mask that is only
causality, a sliding window or padding is marked with a ``KnownMask``. The request then has masks by name in its spec,
and a vector a sequence in place of a matrix. A model that cuts or changes the mask loses the mark, and the tensor
itself is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from attention_contract.spec import Causal, Mask, SlidingWindow

_MARK: Final = "attention_service_mask"


@dataclass(frozen=True)
class KnownMask:
    """A mask in few numbers."""

    masks: tuple[Mask, ...] = ()
    """The masks of the spec, all of which must allow a pair."""
    offset: int = 0
    """The position of the first query, counted from the first key."""
    keys: int | None = None
    """The number of keys from the first on that some query sees; None for all. A static cache has room for more."""
    key_mask: Tensor | None = None
    """``[B, keys]``, True for a real key; None if all are."""
    padding: Tensor | None = None
    """``[B, Lk]``, True for a real key: the padding alone, where ``key_mask`` is a whole row; None for none."""


def service_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | None:
    """Make a mask with ``sdpa_mask``, whose arguments these are, and mark it if a few numbers describe it."""
    mask: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **options,
    )
    if mask is None:
        return None
    key_mask = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if key_mask is not None:
        key_mask = key_mask[:, kv_offset : kv_offset + kv_length]
    known = _recognized(mask, int(q_offset) - kv_offset, key_mask, local_size)
    if known is not None:
        setattr(mask, _MARK, known)
    return mask


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def uncompiled(function: FunctionT) -> FunctionT:
    """Return a function that ``torch.compile`` leaves out of its graphs."""
    disabled: FunctionT = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


MASK_FUNCTION: Final = uncompiled(service_mask)
"""``service_mask`` in the form that is registered."""


def known_mask(mask: Tensor) -> KnownMask | None:
    """Return the numbers that describe a mask; None if it is not one of ``service_mask``, or needs all its elements."""
    known: KnownMask | None = getattr(mask, _MARK, None)
    return known


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as the float mask that eager attention adds: 0, or the lowest number where it is False."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return ``[queries, keys]``, True where the key does not come after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def _recognized(mask: Tensor, offset: int, key_mask: Tensor | None, window: int | None) -> KnownMask | None:
    used = mask.any(2).any(0).any(0).nonzero()
    keys = int(used[-1]) + 1 if len(used) else 1
    if mask.shape[2] == 1:  # one query: its row of the mask is a key mask
        return KnownMask(keys=keys, key_mask=_unless_full(mask[:, 0, 0, :keys]), padding=key_mask)
    i = torch.arange(mask.shape[2], device=mask.device)[:, None] + offset
    j = torch.arange(mask.shape[3], device=mask.device)
    for spec_mask, band in _bands(i, j, window):
        expected = band if key_mask is None else band & key_mask[:, None]
        if torch.equal(mask[:, 0], expected.expand_as(mask[:, 0])):
            real = None if key_mask is None else _unless_full(key_mask[:, :keys])
            return KnownMask(() if spec_mask is None else (spec_mask,), offset, keys, real, key_mask)
    return None


def _bands(i: Tensor, j: Tensor, window: int | None) -> list[tuple[Mask | None, Tensor]]:
    if window is None or window < 1:  # 0: a config without a window, whose mask no layer uses
        return [(Causal(), j <= i), (None, torch.ones_like(j <= i))]
    return [
        (SlidingWindow(left=window - 1, right=0), (j <= i) & (j > i - window)),
        (SlidingWindow(left=window, right=window), (j - i).abs() <= window),
    ]


def _unless_full(key_mask: Tensor) -> Tensor | None:
    return None if bool(key_mask.all()) else key_mask
