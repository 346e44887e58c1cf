"""Keys and values in the pages of vLLM's caches.

Notation: P pages of N tokens, Hkv key/value heads, D width; R rows, M pages of a row, K keys.
"""

from typing import Protocol

from torch import Tensor


class PageLayout(Protocol):
    """Reads the pages of rows."""

    def read(self, cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values ``[R, Hkv, M·N, D]``; ``table [R, M]`` has the pages of each row."""


class TokensLast:
    """Pages of CPU_ATTN's kernels ``vec`` and ``vec16``: keys ``[D, N]`` and behind them values ``[N, D]``."""

    def read(self, cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read them. ``cache [P, Hkv, N, 2 D]`` says sizes alone."""
        pages, groups, tokens, double = cache.shape
        keys = cache.view(pages, groups, 2, double // 2, tokens)[:, :, 0]
        values = cache.view(pages, groups, 2, tokens, double // 2)[:, :, 1]
        return _gathered(keys, table).transpose(3, 4).flatten(2, 3), _gathered(values, table).flatten(2, 3)


class SideBySide:
    """Pages ``[P, Hkv, N, 2 D]`` of FLASH_ATTN and TRITON_ATTN: a token's key, and behind it its value."""

    def read(self, cache: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Read them."""
        keys, values = _gathered(cache, table).flatten(2, 3).chunk(2, -1)
        return keys, values


def _gathered(pages: Tensor, table: Tensor) -> Tensor:
    """The pages of each row ``[R, Hkv, M, …]``."""
    found = pages.index_select(0, table.flatten())
    return found.view(*table.shape, *found.shape[1:]).transpose(1, 2)
