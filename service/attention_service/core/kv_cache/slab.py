"""Slabs: the memory of a cache, in pages of 64 tokens on a CPU and of 256 on another device.

Source: Kwon et al. 2023, section 4.

A slab on a CPU is a range of addresses: a page takes memory when it is written, and the pool gives that back with the
page. The system does so in whole pages of its own, so memory is counted in grains: as few pages of the pool as fill
some of the system's. On another device a slab is one grain.
"""

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE_TOKENS = 64
"""Tokens of one page. On one core, attention over pages that do not adjoin costs 48 % more than over one block with
pages of 64, 15 % with pages of 256; pages that adjoin cost nothing, and small pages waste less at the end."""
GPU_PAGE_TOKENS = 256
"""Tokens of one page on another device than a CPU: FlashAttention-2 takes pages of a multiple of 256."""


def page_tokens(device: torch.device) -> int:
    """Tokens of one page on this device."""
    return PAGE_TOKENS if device.type == "cpu" else GPU_PAGE_TOKENS


@dataclass(frozen=True)
class PageKind:
    """The properties that pages of one slab have in common. The key of the pool's slabs."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @cached_property
    def page_tokens(self) -> int:
        """Tokens of one page."""
        return page_tokens(self.device)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_tokens * self.token_bytes

    @cached_property
    def is_mapped(self) -> bool:
        """True if a slab takes memory page by page, as it is written; False if it takes all of it at once."""
        return self.device.type == "cpu"


@dataclass(eq=False)
class Slab:
    """Pages of n tokens side by side: slot s of a slab is slot s % n of its page s // n."""

    kind: PageKind
    keys: Tensor = field(repr=False)
    """``[Hkv, slots, D]``"""
    values: Tensor = field(repr=False)
    """``[Hkv, slots, Dv]``"""
    users: NDArray[np.int32] = field(repr=False)
    """For each page, the number of block tables that use it."""
    grain: int
    """Pages whose memory is taken and given back together."""
    paged: bool = False
    """True if it lies as PyTorch's kernel for block tables reads it: token after token, not head after head."""
    memory: tuple[mmap.mmap, ...] = field(default=(), repr=False)
    """The memory of keys and values on a CPU."""

    @classmethod
    def of(cls, kind: PageKind, pages: int, *, paged: bool = False) -> "Slab":
        """A slab of at least this many unused pages. ``paged``: for PyTorch's kernel for block tables."""
        if kind.is_mapped:
            return cls._mapped(kind, pages)
        slots, heads, widths = pages * kind.page_tokens, kind.kv_heads, (kind.key_dim, kind.value_dim)
        shapes = [(slots, heads, width) if paged else (heads, slots, width) for width in widths]
        buffers = [torch.empty(shape, dtype=kind.dtype, device=kind.device) for shape in shapes]
        keys, values = (x.transpose(0, 1) for x in buffers) if paged else buffers
        return cls(kind, keys, values, np.zeros(pages, np.int32), pages, paged)

    @classmethod
    def _mapped(cls, kind: PageKind, pages: int) -> "Slab":
        """A slab on a CPU. Its grains lie one behind the other in each head, from a border of the system's pages on."""
        rows = [kind.page_tokens * width * kind.dtype.itemsize for width in (kind.key_dim, kind.value_dim)]
        grain = math.lcm(*(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, row) for row in rows))
        pages = -(-pages // grain) * grain
        memory: list[mmap.mmap] = []
        tensors: list[Tensor] = []
        for row in rows:
            mapped = mmap.mmap(-1, kind.kv_heads * pages * row, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take memory beside what is written
                mapped.madvise(mmap.MADV_NOHUGEPAGE)
            memory.append(mapped)
            tensors.append(torch.frombuffer(mapped, dtype=kind.dtype).view(kind.kv_heads, pages * kind.page_tokens, -1))
        keys, values = tensors
        return cls(kind, keys, values, np.zeros(pages, np.int32), grain, memory=tuple(memory))

    @property
    def grain_bytes(self) -> int:
        """Bytes of one grain."""
        return self.grain * self.kind.page_bytes

    @property
    def used(self) -> int:
        """Number of pages in use."""
        return int(np.count_nonzero(self.users))

    @property
    def unused(self) -> int:
        """Number of pages that are not in use."""
        return len(self.users) - self.used

    def around(self, first: int, stop: int) -> slice:
        """The pages of the grains in which these lie."""
        return slice(first // self.grain * self.grain, -(-stop // self.grain) * self.grain)

    def grains(self, users: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each grain of whole grains of pages, True if a page of it is in use."""
        return np.asarray(users.reshape(-1, self.grain).any(1))

    def release(self, first: int, stop: int) -> None:
        """Give the memory of whole grains of pages, which hold nothing, back to the system."""
        for mapped in self.memory:
            head = len(mapped) // self.kind.kv_heads
            page = head // len(self.users)
            for start in range(0, len(mapped), head):
                mapped.madvise(mmap.MADV_DONTNEED, start + first * page, (stop - first) * page)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The first page and the number of pages of each run of unused pages."""
        for start, stop in runs(self.users == 0):
            yield start, stop - start

    def unused_from(self, page: int, most: int) -> int:
        """The number of unused pages from this one on, at most ``most``."""
        users = self.users[page : page + most]
        used = np.flatnonzero(users)
        return int(used[0]) if used.size else len(users)


def runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The start and the stop of each run of true flags."""
    padded = np.concatenate(([False], flags, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
