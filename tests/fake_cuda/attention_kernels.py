"""Stand-ins of PyTorch's kernels of attention on a GPU: their numbers in plain operations, and what each refuses.

Source: ``transformers/cuda/sdp_utils.cpp`` and ``transformers/cuda/attention.cu`` of PyTorch 2.13, and FlashAttention's
README on its window, which ends at the last query and the last key.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.core.kv_cache.paged_flash import refused_with_pages

HALF = (torch.float16, torch.bfloat16)
TOP_LEFT, BOTTOM_RIGHT = 1, 2
LARGEST_GRID = 65535


def _refused_by_all(q: Tensor, k: Tensor, v: Tensor, lengths: int) -> Iterator[str]:
    """What none takes; the tensors are ``[B, H, L, W]`` or, where ``lengths`` is 1, ``[B, L, H, W]``."""
    heads = 3 - lengths
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        yield "four dimensions, and one number of sequences"
    if max(q.shape[0], q.shape[heads]) > LARGEST_GRID:
        yield f"up to {LARGEST_GRID} sequences, and heads: they are dimensions of the grid"
    if 0 in (*q.shape, *k.shape):
        yield "a query and a key"
    if k.shape[heads] != v.shape[heads] or k.shape[lengths] != v.shape[lengths] or q.shape[heads] % k.shape[heads]:
        yield "groups of heads, and a value for each key"
    whole = 16 // q.element_size()
    for x in (q, k, v):
        if x.stride(-1) != 1 or any(step % whole for step in (*x.stride()[:-1], x.storage_offset())):
            yield f"rows of adjacent numbers at multiples of 16 bytes, not {x.stride()} from {x.storage_offset()}"
        if x.shape[-1] % whole:
            yield f"widths that are multiples of {whole}"


def refused_by_flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Iterator[str]:
    """What the flash kernel refuses of tensors ``[B, L, H, W]``, or with a block table."""
    if options.get("block_table") is not None:
        yield from refused_with_pages(q, k, v, *args, **options)
        return
    yield from _refused_by_all(q, k, v, 1)
    causal, left, right = args[5], options.get("window_size_left"), options.get("window_size_right")
    if q.dtype not in HALF:
        yield "half types"
    if not q.shape[3] == k.shape[3] == v.shape[3] <= 256:
        yield "one width up to 256"
    if causal and (left, right) != (None, None):
        yield "a causal mask or a window"
    if min(left or 0, right or 0) < 0:
        yield "a window that holds the diagonal"


def refused_by_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *args: Any, **_: Any) -> Iterator[str]:
    """What the memory-efficient kernel refuses of tensors ``[B, L, H, W]``."""
    yield from _refused_by_all(q, k, v, 1)
    (batch, queries, heads, width), keys, kind = q.shape, k.shape[1], args[5]
    if q.dtype not in (*HALF, torch.float32):
        yield "no float64"
    if width != k.shape[3] or heads != k.shape[2]:
        yield "keys as wide as queries, and a head of them for each"
    if kind == BOTTOM_RIGHT and keys < queries:
        yield "a key for each query"  # what it makes of queries that look nowhere is nowhere said
    if bias is not None:
        if bias.shape != (batch, heads, queries, keys) or bias.dtype != q.dtype:
            yield "a mask for each pair in the dtype of the queries"
        if bias.stride(-1) != 1 or any(step % 16 for step in bias.stride()[:-1]):
            yield "rows of the mask at multiples of 16"


def refused_by_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *args: Any, **_: Any) -> Iterator[str]:
    """What cuDNN's kernel refuses of tensors ``[B, H, L, W]``."""
    yield from _refused_by_all(q, k, v, 2)
    if q.dtype not in HALF:
        yield "half types"
    if max(q.shape[3], v.shape[3]) > 128:
        yield "widths up to 128"
    if k.shape[2] == 1:
        yield "more than one key"


REFUSALS: dict[str, Callable[..., Iterator[str]]] = {
    "_flash_attention_forward": refused_by_flash,
    "_efficient_attention_forward": refused_by_efficient,
    "_scaled_dot_product_cudnn_attention": refused_by_cudnn,
}


def refuse(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise RuntimeError where a kernel refuses its arguments; the dispatcher leaves out the last ones by default."""
    if name in REFUSALS and (reasons := ", ".join(REFUSALS[name](*args, *[False] * (12 - len(args)), **options))):
        raise RuntimeError(f"{name} asks for {reasons}")


def flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor]:
    """The numbers of ``_flash_attention_forward``."""
    refuse("_flash_attention_forward", (q, k, v, *args), options)
    diagonal = k.shape[1] - q.shape[1]
    left, right = options["window_size_left"], 0 if args[5] else options["window_size_right"]
    low, high = None if left is None else diagonal - left, None if right is None else diagonal + right
    return _attended(q, k, v, None, low, high, options["scale"])


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *args: Any, scale: float) -> tuple[Tensor]:
    """The numbers of ``_efficient_attention_forward``."""
    refuse("_efficient_attention_forward", (q, k, v, bias, *args), {})
    kind = args[5]
    high = None if not kind else 0 if kind == TOP_LEFT else k.shape[1] - q.shape[1]
    return _attended(q, k, v, bias, None, high, scale)


def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, p: float, causal: bool, *args: Any, scale: float):
    """The numbers of ``_scaled_dot_product_cudnn_attention``."""
    refuse("_scaled_dot_product_cudnn_attention", (q, k, v, bias, lse, p, causal), {})
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return (_attended(*turned, bias, None, 0 if causal else None, scale)[0].transpose(1, 2),)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, low: int | None, high: int | None, scale: float
) -> tuple[Tensor]:
    """The context ``[B, Q, H, V]``; of queries that look nowhere zeros."""
    group = q.shape[2] // k.shape[2]
    wide, keys, values = (x.transpose(1, 2).double() for x in (q, k, v))
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = wide @ keys.mT * scale if bias is None else wide @ keys.mT * scale + bias
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    hidden = torch.zeros(len(i), len(j), dtype=torch.bool)
    hidden |= j < i + low if low is not None else hidden
    hidden |= j > i + high if high is not None else hidden
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0)
    return ((weights @ values).to(q.dtype).transpose(1, 2),)
