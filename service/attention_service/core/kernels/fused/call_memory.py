"""Sizes of one call of PyTorch's fused kernel, and how its work is cut.

Source: PyTorch 2.13's flash kernel of the CPU.
"""

from dataclasses import dataclass
from functools import cache

import torch

from attention_service.core.kernels.extent import Extent

FUSED_KEYS = 512
"""Keys that the CPU's kernel takes at a time."""


@dataclass(frozen=True)
class FusedCall:
    """The sizes of one call, whose queries, keys and values have one width."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    itemsize: int
    half: bool
    threads: int

    @classmethod
    def of(cls, sizes: Extent, width: int = 0) -> "FusedCall":
        """Return the call over a whole attention."""
        shape = sizes.batch, sizes.heads, sizes.kv_heads, sizes.queries, sizes.keys
        return cls(*shape, width, sizes.itemsize, sizes.half, sizes.threads)

    @property
    def tile_rows(self) -> int:
        """Queries that the CPU's kernel takes at a time."""
        return min(256 if self.queries >= 768 else 64 if self.queries >= 192 else 32, self.queries)

    @property
    def packed(self) -> bool:
        """True if keys and values of half types are laid out for the processor's matrix instructions.

        Few keys are not, nor are few queries to each key in bfloat16.
        """
        least = 16 if self.half else 64
        if self.itemsize != 2 or not self.threads or not _matrix_instructions():
            return False
        if min(self.queries, self.keys) < least:
            return False
        tasks = self.batch * self.heads * -(-self.queries // self.tile_rows)
        return self.half or -(-tasks // self.threads) * self.tile_rows >= 4 * self.batch * self.kv_heads


@cache
def _matrix_instructions() -> bool:
    return torch.cpu._is_amx_tile_supported()
