"""Steps on a CUDA device: all sequences in one call of PyTorch's kernel for block tables.

The kernel splits no sequence among thread blocks, so that a sequence gets the same bits whatever runs beside it.
Source: Kwon et al. 2023, section 4; Dao 2023 (FlashAttention-2).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from attention_service.core.kv_cache.runs import Run, Slots

PAGE = 64
"""Slots of a page. Runs begin at a page of their slab."""
_WIDEST = 256


def paged_takes(q: Tensor, run: Run[Slots]) -> bool:
    """Return True if the kernel takes these queries ``[..., D]`` and a cache such as this."""
    width, values = q.shape[-1], run.slab.values
    return q.is_cuda and q.dtype.itemsize == 2 and width % 8 == 0 and width <= _WIDEST and values.shape[2] == width


def attend_by_pages(q: Tensor, pasts: Sequence[Sequence[Run[Slots]]], scale: float, left: int | None) -> Tensor | None:
    """Attend causally from the last places of each sequence, ``[S, H, Q, D]``, to its runs; return ``[S, H, Q, D]``.

    ``left``: keys before its own that a query sees; None for all. Returns None where the runs are no pages of one slab.
    """
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - it imports PyTorch's compiler

    slab = pasts[0][0].slab
    keys, values = _pages_of(slab.keys), _pages_of(slab.values)
    tables = [_table(runs, slab) for runs in pasts]
    if keys is None or values is None or None in tables:
        return None
    most = max(len(table or ()) for table in tables)
    padded = [(table or []) + [0] * (most - len(table or [])) for table in tables]
    sequences, _, count, _ = q.shape
    lengths, device = [sum(run.tokens for run in runs) for runs in pasts], q.device
    starts = _int32(range(0, (sequences + 1) * count, count), device)
    context = varlen_attn(
        q.transpose(1, 2).flatten(0, 1), keys, values,
        starts, _int32([0, *accumulate(lengths)], device), count, max(lengths),
        scale=scale, window_size=(-1 if left is None else left, 0), enable_gqa=True,
        seqused_k=_int32(lengths, device), block_table=_int32(padded, device), num_splits=1,
    )  # fmt: skip
    if isinstance(context, tuple):
        raise TypeError("the kernel returned what it was not asked for")
    return context.view(sequences, count, *context.shape[1:]).transpose(1, 2)


def _pages_of(slots: Tensor) -> Tensor | None:
    """Return slots ``[Hkv, slots, D]`` as pages, ``[pages, PAGE, Hkv, D]``; None if its tokens are not side by side."""
    by_token = slots.transpose(0, 1)
    return by_token.view(-1, PAGE, *by_token.shape[1:]) if by_token.is_contiguous() else None


def _table(runs: Sequence[Run[Slots]], slab: Slots) -> list[int] | None:
    """Return the pages of a sequence in this slab; None if one of its runs lies elsewhere."""
    found: list[int] = []
    for index, run in enumerate(runs):
        first, rest = divmod(run.start, PAGE)
        partly = run.tokens % PAGE and index + 1 < len(runs)
        if rest or partly or run.slab is not slab:
            return None
        found += range(first, first - (-run.tokens // PAGE))
    return found


def _int32(x: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(x, dtype=torch.int32, device=device)
