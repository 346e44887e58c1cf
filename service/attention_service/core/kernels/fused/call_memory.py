"""Memory of one call of PyTorch's fused kernel beside its arguments and its context.

Source: PyTorch 2.13's flash kernel of the CPU. A GPU's kernels keep their tiles in shared memory.
"""

from dataclasses import dataclass
from functools import cache

import torch

from attention_service.core.kernels.extent import Extent

FUSED_KEYS = 512
"""Keys that the CPU's kernel takes at a time."""
_SCRATCH_ROW, _SCRATCH = 640, 5248
"""Bytes that oneDNN works in for a product of a tile in half types, for each query and besides; measured."""


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
    def context(self) -> int:
        """Bytes of the context as a CPU makes it."""
        return self.batch * self.heads * self.queries * self.width * self.itemsize

    @property
    def lse(self) -> int:
        """Bytes of each query's log-sum-exp."""
        return self.batch * self.heads * self.queries * max(self.itemsize, 4)

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

    def workspace(self) -> int:
        """Bytes of a tile of scores and outputs for each thread, and of what is packed."""
        if not self.threads:
            return 0
        accumulate = max(self.itemsize, 4)
        keys, rows, width = min(FUSED_KEYS, self.keys), self.tile_rows, self.width
        each = rows * (keys + 2 + width) * accumulate
        if self.itemsize != 2:
            return self.threads * each
        if not self.packed:
            return self.threads * (each + rows * keys * 2)
        each += rows * _even(keys) * 2 + keys * width * 2 + (rows * _even(width) * 2 if width % 2 else 0)
        whole, last = divmod(self.keys - 1, FUSED_KEYS)
        laid_out = self.keys * _even(width) + (whole * _even(FUSED_KEYS) + _even(last + 1)) * width
        return self.threads * each + self.batch * self.kv_heads * laid_out * 2

    def backward_workspace(self) -> int:
        """Bytes of a tile of scores and one of their gradients for each thread, and of oneDNN's scratch."""
        if not self.threads:
            return self.lse
        rows, half = self.tile_rows, self.itemsize == 2
        each = 2 * rows * min(FUSED_KEYS, self.keys) * (max(self.itemsize, 4) + (2 if half else 0))
        return self.threads * (each + (_SCRATCH_ROW * rows + _SCRATCH if half else 0))


@cache
def _matrix_instructions() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _even(count: int) -> int:
    return count + count % 2
