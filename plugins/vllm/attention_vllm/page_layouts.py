"""Keys and values in the pages of vLLM's caches.

Notation: P pages of N tokens, Hkv key/value heads, D width; R rows, M pages of a row, K keys.
"""

from typing import Protocol

from torch import Tensor


class PageLayout(Protocol):
    """Reads the pages of rows. ``table [R, M]`` has the pages of each row."""

    def keys(self, cache: Tensor, table: Tensor) -> Tensor:
        """Return the keys ``[R, Hkv, M·N, D]``."""

    def values(self, cache: Tensor, table: Tensor) -> Tensor:
        """Return the values ``[R, Hkv, M·N, D]``."""


class TokensLast:
    """Pages of CPU_ATTN's kernels ``vec`` and ``vec16``: keys ``[D, N]`` and behind them values ``[N, D]``.

    The cache ``[P, Hkv, N, 2 D]`` says sizes alone.
    """

    def keys(self, cache: Tensor, table: Tensor) -> Tensor:
        """Read the keys, whose last dimension has a stride."""
        pages, groups, tokens, double = cache.shape
        keys = cache.view(pages, groups, 2, double // 2, tokens)[:, :, 0]
        return _gathered(keys, table).transpose(2, 3).flatten(3, 4).transpose(2, 3)

    def values(self, cache: Tensor, table: Tensor) -> Tensor:
        """Read the values."""
        pages, groups, tokens, double = cache.shape
        return _gathered(cache.view(pages, groups, 2, tokens, double // 2)[:, :, 1], table).flatten(2, 3)


class SideBySide:
    """Pages ``[P, Hkv, N, 2 D]`` of FLASH_ATTN and TRITON_ATTN: a token's key, and behind it its value."""

    def keys(self, cache: Tensor, table: Tensor) -> Tensor:
        """Read the keys."""
        return _gathered(cache[..., : cache.shape[-1] // 2], table).flatten(2, 3)

    def values(self, cache: Tensor, table: Tensor) -> Tensor:
        """Read the values."""
        return _gathered(cache[..., cache.shape[-1] // 2 :], table).flatten(2, 3)


def _gathered(pages: Tensor, table: Tensor) -> Tensor:
    """The pages of each row ``[R, Hkv, M, …]``."""
    rows = pages.index_select(0, table.flatten())
    return rows.view(*table.shape, *rows.shape[1:]).transpose(1, 2)
