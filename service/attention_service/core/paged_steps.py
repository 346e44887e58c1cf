"""Steps on a CUDA device: all sequences in one call of PyTorch's kernel for block tables.

The kernel splits no sequence among thread blocks, so that a sequence gets the same bits whatever runs beside it.
Source: Kwon et al. 2023, section 4; Dao 2023 (FlashAttention-2).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

PAGE = 64
"""Slots of a page. Runs begin at a page of their slab."""
_WIDEST = 256


class CachedRun(Protocol):
    """Adjacent slots of a slab whose tokens lie side by side, ``[slots, Hkv, D]``, seen as ``[Hkv, L, D]``."""

    @property
    def keys(self) -> Tensor:
        """Keys, ``[Hkv, L, D]``."""

    @property
    def values(self) -> Tensor:
        """Values, ``[Hkv, L, D]``."""


def paged_takes(q: Tensor, run: CachedRun) -> bool:
    """Return True if the kernel takes these queries ``[H, Q, D]`` and a cache such as this."""
    width = q.shape[2]
    return q.is_cuda and q.dtype.itemsize == 2 and width % 8 == 0 and width <= _WIDEST and run.values.shape[2] == width


def attend_by_pages(
    queries: Sequence[Tensor], runs: Sequence[Sequence[CachedRun]], scale: float, left: int | None
) -> Tensor | None:
    """Attend causally from the last places of each sequence, ``[H, Q, D]``, to its runs; return ``[H, ΣQ, D]``.

    ``left``: keys before its own that a query sees; None for all. Returns None where the runs are no pages of one slab.
    """
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - it imports PyTorch's compiler

    first = runs[0][0]
    keys, values = _pages_of(first.keys), _pages_of(first.values)
    tables = [_table(each, first) for each in runs]
    if keys is None or values is None or None in tables:
        return None
    most = max(len(table or ()) for table in tables)
    padded = [(table or []) + [0] * (most - len(table or [])) for table in tables]
    counts, lengths = [q.shape[1] for q in queries], [sum(run.keys.shape[1] for run in each) for each in runs]
    device = first.keys.device
    starts, key_starts = _int32([0, *accumulate(counts)], device), _int32([0, *accumulate(lengths)], device)
    query = torch.cat(list(queries), 1).transpose(0, 1).contiguous()  # [ΣQ, H, D]
    context = varlen_attn(
        query, keys, values, starts, key_starts, max(counts), max(lengths),
        scale=scale, window_size=(-1 if left is None else left, 0), enable_gqa=True,
        seqused_k=_int32(lengths, device), block_table=_int32(padded, device), num_splits=1,
    )  # fmt: skip
    if isinstance(context, tuple):
        raise TypeError("the kernel returned what it was not asked for")
    return context.transpose(0, 1)


def _pages_of(view: Tensor) -> Tensor | None:
    """Return the whole slab of a view as pages, ``[pages, PAGE, Hkv, D]``; None if its tokens are not side by side."""
    heads, _, width = view.shape
    token = heads * width
    if view.stride(0) != width or view.stride(1) != token:
        return None
    pages = view.untyped_storage().nbytes() // view.element_size() // (PAGE * token)
    return view.as_strided((pages, PAGE, heads, width), (PAGE * token, token, width, 1), 0)


def _table(runs: Sequence[CachedRun], first: CachedRun) -> list[int] | None:
    """Return the pages of a sequence in the slab of ``first``; None if one of its runs lies elsewhere."""
    slab, page = first.keys.untyped_storage().data_ptr(), PAGE * first.keys.shape[0] * first.keys.shape[2]
    found: list[int] = []
    for index, run in enumerate(runs):
        length, (start, rest) = run.keys.shape[1], divmod(int(run.keys.storage_offset()), page)
        partly = length % PAGE and index + 1 < len(runs)
        elsewhere = run.keys.untyped_storage().data_ptr() != slab
        if rest or partly or elsewhere or run.values.storage_offset() != run.keys.storage_offset():
            return None
        found += range(start, start - (-length // PAGE))
    return found


def _int32(x: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(x, dtype=torch.int32, device=device)
