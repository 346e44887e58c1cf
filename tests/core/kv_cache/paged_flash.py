"""FlashAttention-2 over a block table as PyTorch calls it on a GPU: its conditions and its numbers, on a CPU.

Source: ``mha_varlen_fwd`` of ``flash_attn/flash_api.cpp`` in the sources of PyTorch 2.13. The arguments go through the
schema of the PyTorch that is installed.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from attention_service.core.kv_cache import slab as slab_module
from attention_service.core.kv_cache.slab import GPU_PAGE_TOKENS, PageKind


@dataclass(frozen=True)
class Call:
    """One call of the kernel."""

    sequences: int
    queries: int
    splits: int | None
    """Parts of the keys that are summed apart."""
    grouped: bool
    """True if each key was read once for the heads of a group."""


@contextlib.contextmanager
def paged_flash() -> Iterator[list[Call]]:
    """Have the kernel on a CPU within the block; yields its calls."""
    calls: list[Call] = []

    def kernel(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
        call, context = _attend(*args, **kwargs)
        calls.append(call)
        empty = torch.empty(0)
        return context, empty, empty, empty, empty

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", kernel, "CPU")
        yield calls


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slabs on the CPU be what they are on a GPU: pages of 256 tokens, and memory taken at once."""
    monkeypatch.setattr(PageKind, "is_mapped", False)
    monkeypatch.setattr(slab_module, "PAGE_TOKENS", GPU_PAGE_TOKENS)


def refused_with_pages(
    q: Tensor, k: Tensor, v: Tensor, by_query: Tensor, by_key: Tensor, max_q: int, max_k: int, dropout: float,
    is_causal: bool, debug: bool, *_: object, seqused_k: Tensor, block_table: Tensor, num_splits: int | None = None,
    **__: object,
) -> Iterator[str]:  # fmt: skip
    """What the kernel refuses where it is given a block table."""
    count = len(by_query) - 1
    conditions = {
        "half types": q.dtype in (torch.float16, torch.bfloat16),
        "one dtype": q.dtype == k.dtype == v.dtype,
        "queries [T, H, D], pages [N, page, Hkv, D]": q.ndim == 3 and k.ndim == v.ndim == 4,
        "adjacent numbers in a row": q.stride(-1) == k.stride(-1) == v.stride(-1) == 1,
        f"a page size that is divisible by 256, not {k.shape[1]}": k.shape[1] % 256 == 0,
        "one width": k.shape == v.shape and q.shape[-1] == k.shape[-1],
        "a width that is a multiple of 8, up to 256": q.shape[-1] % 8 == 0 and q.shape[-1] <= 256,
        "groups of heads": q.shape[1] % k.shape[2] == 0,
        "a table of int32 with a row for each sequence": (
            block_table.dtype == torch.int32 and block_table.ndim == 2 and len(block_table) == count
        ),
        "adjacent numbers in a row of the table": block_table.stride(-1) == 1,
        "lengths of int32": seqused_k.dtype == torch.int32 and seqused_k.shape == (count,),
        "borders of int32": by_query.dtype == by_key.dtype == torch.int32 and by_key.shape == (count + 1,),
        "contiguous borders and lengths": all(x.is_contiguous() for x in (by_query, by_key, seqused_k)),
        "neither dropout nor debugging": dropout == 0 and not debug,
        "up to 128 splits": num_splits is None or 0 <= num_splits <= 128,
    }
    yield from (what for what, met in conditions.items() if not met)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, by_query: Tensor, by_key: Tensor, max_q: int, max_k: int, dropout: float,
    is_causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int, seqused_k: Tensor,
    block_table: Tensor, num_splits: int | None = None,
) -> tuple[Call, Tensor]:  # fmt: skip
    refusal = refused_with_pages(
        q, k, v, by_query, by_key, max_q, max_k, dropout, is_causal, debug,
        seqused_k=seqused_k, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip
    if reasons := ", ".join(refusal):
        raise RuntimeError(f"the kernel asks for {reasons}")
    count = len(by_query) - 1
    # What the kernel does not check, and reads beyond its memory for.
    assert block_table.min() >= 0
    assert block_table.max() < len(k)
    assert seqused_k.max() == max_k <= block_table.shape[1] * k.shape[1]
    assert by_query.diff().eq(max_q).all()
    assert by_query[-1] == len(q)
    assert by_key.diff().equal(seqused_k)
    right = 0 if is_causal and max_q > 1 else window_size_right
    left = -1 if window_size_left >= max_k else window_size_left
    found = []
    for index, length in enumerate(seqused_k.tolist()):
        own = q[index * max_q : (index + 1) * max_q].transpose(0, 1).double()  # [H, Q, D]
        keys, values = (x[block_table[index].long()].flatten(0, 1)[:length].transpose(0, 1).double() for x in (k, v))
        group = q.shape[1] // k.shape[2]
        scores = own @ keys.repeat_interleave(group, 0).mT * scale
        at = torch.arange(length - max_q, length)[:, None] - torch.arange(length)  # keys before the query
        hidden = (at < -right if right >= 0 else at > length) | (at > left if left >= 0 else at > length)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append((weights @ values.repeat_interleave(group, 0)).to(q.dtype).transpose(0, 1))
    grouped = max_q == 1 and left < 0 and right < 0 and q.shape[1] > k.shape[2]
    if num_splits != 1 and not grouped:  # the parts are all put together in the place of the first sequence
        found[1:] = [x.fill_(torch.nan) for x in found[1:]]
    return Call(count, max_q, num_splits, grouped), torch.cat(found)
