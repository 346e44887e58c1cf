"""Keys and values in the pages of vLLM's caches.

Notation: P pages of N tokens, of which T are read, Hkv key/value heads, D width; R rows, M pages of a row.
"""

from typing import Protocol

from torch import Tensor


class PageLayout(Protocol):
    """Says where keys and values are in pages, and joins those of a row's pages."""

    def key_pages(self, cache: Tensor, tokens: int) -> Tensor:
        """Return the keys ``[P, Hkv, …]`` of the first T tokens of each page, as a view."""

    def value_pages(self, cache: Tensor, tokens: int) -> Tensor:
        """Return the values ``[P, Hkv, …]``, likewise."""

    def keys(self, pages: Tensor) -> Tensor:
        """Return the keys ``[R, Hkv, M·T, D]`` of ``pages [R, M, Hkv, …]`` out of ``key_pages``."""

    def values(self, pages: Tensor) -> Tensor:
        """Return the values ``[R, Hkv, M·T, D]``, likewise."""


class TokensLast:
    """Pages of CPU_ATTN's kernels ``vec`` and ``vec16``: keys ``[D, N]`` and behind them values ``[N, D]``.

    The cache ``[P, Hkv, N, 2 D]`` says sizes alone.
    """

    def key_pages(self, cache: Tensor, tokens: int) -> Tensor:
        """Return keys ``[P, Hkv, D, T]``."""
        pages, groups, length, double = cache.shape
        return cache.view(pages, groups, 2, double // 2, length)[:, :, 0, :, :tokens]

    def value_pages(self, cache: Tensor, tokens: int) -> Tensor:
        """Return values ``[P, Hkv, T, D]``."""
        pages, groups, length, double = cache.shape
        return cache.view(pages, groups, 2, length, double // 2)[:, :, 1, :tokens]

    def keys(self, pages: Tensor) -> Tensor:
        """Join keys, whose last dimension has a stride."""
        return pages.permute(0, 2, 3, 1, 4).flatten(3, 4).transpose(2, 3)

    def values(self, pages: Tensor) -> Tensor:
        """Join values."""
        return pages.transpose(1, 2).flatten(2, 3)


class SideBySide:
    """Pages ``[P, Hkv, N, 2 D]`` of FLASH_ATTN and TRITON_ATTN: a token's key, and behind it its value."""

    def key_pages(self, cache: Tensor, tokens: int) -> Tensor:
        """Return keys ``[P, Hkv, T, D]``."""
        return cache[:, :, :tokens, : cache.shape[-1] // 2]

    def value_pages(self, cache: Tensor, tokens: int) -> Tensor:
        """Return values ``[P, Hkv, T, D]``."""
        return cache[:, :, :tokens, cache.shape[-1] // 2 :]

    def keys(self, pages: Tensor) -> Tensor:
        """Join keys."""
        return pages.transpose(1, 2).flatten(2, 3)

    def values(self, pages: Tensor) -> Tensor:
        """Join values."""
        return pages.transpose(1, 2).flatten(2, 3)
