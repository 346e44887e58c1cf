"""Grouped heads: query head h reads key/value head h // (H / Hkv).

Source: Ainslie et al. 2023, section 2.2.
"""

from torch import Tensor


def product(x: Tensor, y: Tensor) -> Tensor:
    """The matrix product by head, x ``[B, H, Q, N]`` times y ``[B, Hkv, N, M]``, to ``[B, H, Q, M]``."""
    batch, heads, queries, inner = x.shape
    kv_heads, outer = y.shape[1], y.shape[3]
    if heads == kv_heads:
        return x @ y
    # Stack the queries of one group, so that y is never copied per query head.
    stacked = x.reshape(batch, kv_heads, heads // kv_heads * queries, inner)
    return (stacked @ y).reshape(batch, heads, queries, outer)


def product_backward(x: Tensor, upstream: Tensor, kv_heads: int) -> Tensor:
    """The gradient ``[B, Hkv, N, M]`` of y in ``product(x, y)``, from x ``[B, H, Q, N]`` and that of the product."""
    batch, heads, queries, inner = x.shape
    rows = heads // kv_heads * queries
    return x.reshape(batch, kv_heads, rows, inner).mT @ upstream.reshape(batch, kv_heads, rows, upstream.shape[3])


def head_read_by(head: int, heads: int, kv_heads: int) -> int:
    """The key/value head that a query head reads."""
    return head // (heads // kv_heads)


def one_for_each_query_head(x: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, K, W]`` to ``[B, H, K, W]``, each key/value head repeated for the queries that read it."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Sum a gradient ``[B, H, K, W]`` over the query heads that read one key/value head."""
    batch, heads, keys, width = x.shape
    return x if heads == kv_heads else x.reshape(batch, kv_heads, heads // kv_heads, keys, width).sum(2)
