"""Slabs: the memory of a cache, in pages of ``PAGE_TOKENS`` tokens.

Source: Kwon et al. 2023, section 4.

A slab on a CPU is a range of addresses: a page takes memory when it is written, and gives it back to the system when
nobody uses it. On another device a slab is allocated whole.
"""

import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_service.core.kv_cache.runs import Run

PAGE_TOKENS = 256
"""Tokens of one page. Pages that adjoin are read as one."""
_ROW_BYTES = 16
"""Bytes of a token's key or value in one head are a multiple of this, so that a page's fill pages of the system, which
have 4 KiB. Where the system's are larger than those, some memory is given back with the slab only."""


@dataclass(frozen=True)
class PageKind:
    """The properties that pages of one slab have in common. The key of the pool's slabs."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def rows(self) -> tuple[int, int]:
        """Numbers that a key and a value take in memory."""
        multiple = max(_ROW_BYTES // self.dtype.itemsize, 1)
        return -(-self.key_dim // multiple) * multiple, -(-self.value_dim // multiple) * multiple

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return PAGE_TOKENS * self.kv_heads * sum(self.rows) * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Page:
    """The slots of ``PAGE_TOKENS`` tokens, side by side in a slab."""

    slab: "Slab"
    index: int
    users: int = 1
    """The number of block tables that use it."""
    name: bytes | None = None
    """The hash of what it holds; None if nobody else can find it."""

    def run(self, first: int, tokens: int) -> "Run[Slab]":
        """Some of its slots."""
        return Run(self.slab, self.index * PAGE_TOKENS + first, tokens)


@dataclass(eq=False)
class Slab:
    """Pages side by side."""

    kind: PageKind
    keys: Tensor = field(repr=False)
    """``[Hkv, slots, D]``"""
    values: Tensor = field(repr=False)
    """``[Hkv, slots, Dv]``"""
    taken: bytearray = field(repr=False)
    """For each page 1 if it is in use."""
    memory: tuple[mmap.mmap, ...] = field(default=(), repr=False)
    """The memory of keys and values on a CPU."""
    used: int = 0
    """Number of pages in use."""

    @classmethod
    def of(cls, kind: PageKind, pages: int) -> "Slab":
        """A slab of unused pages."""
        slots = pages * PAGE_TOKENS
        if kind.device.type == "cpu":
            memory = tuple(_mapped(kind.kv_heads * slots * row * kind.dtype.itemsize) for row in kind.rows)
            both = [torch.frombuffer(x, dtype=kind.dtype).view(kind.kv_heads, slots, -1) for x in memory]
        else:  # as kernels with block tables take it
            memory, shape = (), (slots, kind.kv_heads)
            both = [torch.empty(*shape, x, dtype=kind.dtype, device=kind.device).transpose(0, 1) for x in kind.rows]
        return cls(kind, both[0][..., : kind.key_dim], both[1][..., : kind.value_dim], bytearray(pages), memory)

    @property
    def bytes(self) -> int:
        """Bytes of memory that it takes."""
        return self.without(0)

    def without(self, pages: int) -> int:
        """Bytes of memory that it takes once this many pages more are free: all or nothing where it is allocated."""
        left = self.used - pages
        return (left if self.memory or not left else len(self.taken)) * self.kind.page_bytes

    def take(self, index: int) -> Page:
        """Use a page."""
        self.taken[index], self.used = 1, self.used + 1
        return Page(self, index)

    def release(self, index: int) -> None:
        """Give the memory of a page that nobody uses back to the system."""
        self.taken[index], self.used = 0, self.used - 1
        for mapped in self.memory:
            head = len(mapped) // self.kind.kv_heads
            page = head // len(self.taken)
            for start in range(index * page, len(mapped), head):
                first, stop = -(-start // mmap.PAGESIZE), (start + page) // mmap.PAGESIZE
                if stop > first:
                    mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The first page and the number of pages of each run of unused pages."""
        for found in re.finditer(rb"\0+", self.taken):
            yield found.start(), found.end() - found.start()

    def unused_from(self, index: int, most: int) -> int:
        """The number of unused pages from this one on, at most ``most``."""
        here = self.taken[index : index + most]
        used = here.find(1)
        return len(here) if used < 0 else used


def _mapped(size: int) -> mmap.mmap:
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take memory beside what is written
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return mapped
