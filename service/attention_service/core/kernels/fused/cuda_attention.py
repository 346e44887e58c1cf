"""PyTorch's kernels of attention on a GPU, each called by its own operation.

``scaled_dot_product_attention`` chooses one of them by flags of the whole process, which two threads cannot set without
each other's knowledge; where none takes the arguments, it computes with all scores in memory. Here the arguments alone
decide, and what a kernel does not take is laid out so that one does:

- flash: half types, any band of keys beside the diagonal, grouped heads, widths up to 256;
- cuDNN's, faster than flash where the GPU is of the kind that PyTorch gives it first: half types, long sequences. It
  makes a plan for each shape, which takes longer than a short pass: lengths are padded to a few;
- the memory-efficient one: float32, wider heads, and every mask.

The operations are private and check little. Source: ``transformers/cuda/sdp_utils.cpp`` and ``transformers/cuda/
attention.cu`` of PyTorch 2.13, and ``torch/nn/attention/bias.py``, which calls the same operations.
"""

from functools import cache
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_service.core.masks.bands import Band
from attention_service.core.tensors import one_for_each_query_head

_flash = torch.ops.aten._flash_attention_forward
_efficient = torch.ops.aten._efficient_attention_forward
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
LONG = 2048
"""Queries from which on cuDNN's kernel may be taken; below, its plans cost more than they gain."""
_WIDEST, _WIDEST_CUDNN = 256, 128
_MOST_SEQUENCES = 2**16 - 1
"""Sequences of one launch: CUDA's limit of the second and third dimension of a grid."""
_MASK_ROWS = 16
"""Numbers at multiples of which the rows of a mask begin."""
_AMPERE, _CUDNN_FIRST = 8, (9, 10)
"""Generations from which on there is flash and bfloat16, and those for which PyTorch prefers cuDNN."""
_EVERY_PAIR = Band()
_NO_MASK, _TOP_LEFT, _BOTTOM_RIGHT = 0, 1, 2
"""Masks that the memory-efficient kernel knows itself."""


def takes(band: Band, dtype: torch.dtype, width: int, queries: int, keys: int) -> bool:
    """Return True if a kernel computes this band without a mask in memory. ``width``: the widest head of q, k and v.

    Queries that look nowhere get zeros, unless none looks anywhere.
    """
    if _flashes(dtype, width):
        least = 0 if band.low is None else band.low
        seen = keys if band.high is None else min(keys, queries + band.high)
        return seen > max(least, 0) and (band.high is None or band.low is None or band.low <= band.high)
    return band.low is None and (band.high in (None, 0) or 0 <= band.high <= keys - queries)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, band: Band = _EVERY_PAIR
) -> Tensor:
    """The context ``[B, H, Q, V]`` of q ``[B, H, Q, D]``, k ``[B, Hkv, K, D]`` and v ``[B, Hkv, K, V]``.

    mask: broadcastable to ``[B, H, Q, K]`` but for its last dimension, which is whole; bool, True where a query may
    look, or added to the scores. It lets each query look somewhere. ``band``: one that ``takes`` accepts, without a
    mask. float64 raises ValueError.
    """
    if q.dtype == torch.float64:
        raise ValueError("PyTorch has no fused kernel for float64 on a GPU; ask `unsuitable` first")
    if not q.numel() or not k.numel():
        heads = q.shape[1]
        return (q @ one_for_each_query_head(k, heads).mT) @ one_for_each_query_head(v, heads)
    if q.dtype == torch.bfloat16 and generation() < _AMPERE:
        return attend(q.float(), k.float(), v.float(), scale, mask, band).to(q.dtype)
    width = v.shape[-1]
    flashes = mask is None and _flashes(q.dtype, max(q.shape[-1], width))
    of_each = 1 if flashes or q.shape[1] == k.shape[1] else k.shape[1]  # without flash, a group is a sequence
    if q.shape[0] * of_each > _MOST_SEQUENCES and q.shape[0] > 1:
        at_once = max(_MOST_SEQUENCES // of_each, 1)
        masks = repeat(mask) if mask is None or mask.ndim < 4 or mask.shape[0] == 1 else torch.split(mask, at_once)
        parts = zip(*(torch.split(x, at_once) for x in (q, k, v)), masks, strict=False)
        return torch.cat([attend(a, b, c, scale, own, band) for a, b, c, own in parts])
    if flashes:
        q, k, v = _as_read(q, k, v, one_width=True)
        context = _by_cudnn(q, k, v, scale, band) if _prefers_cudnn(q, k, v, band) else _by_flash(q, k, v, scale, band)
    else:
        context = _by_efficient(*_as_read(q, k, v, one_width=False), scale, mask, band)
    return context if context.shape[-1] == width else context[..., :width]


def _flashes(dtype: torch.dtype, width: int) -> bool:
    return dtype.itemsize == 2 and width <= _WIDEST and generation() >= _AMPERE


def _by_flash(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Tensor:
    """Call the flash kernel, which counts its window from the diagonal that ends at the last query and the last key."""
    queries, keys = q.shape[2], k.shape[2]
    left, right = None, None
    if band.high is not None:  # no query sees the keys beyond
        keys = min(keys, queries + band.high)
    seen = queries if band.low is None else min(queries, keys - band.low)  # the queries beyond see no key
    q, k, v = q[:, :, :seen], k[:, :, :keys], v[:, :, :keys]
    if band.high is not None:
        right = band.high - (keys - seen)
    if band.low is not None:
        left = keys - seen - band.low
    causal = right == 0 and left is None
    context = _flash(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, seen, keys, 0.0, causal, False,
        scale=scale, window_size_left=left, window_size_right=None if causal else right,
    )[0].transpose(1, 2)  # fmt: skip
    return context if seen == queries else pad(context, (0, 0, 0, queries - seen))


def _prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, band: Band) -> bool:
    """Return True for a long sequence alone, plainly causal or of a length that needs no padding, without gradients."""
    queries, keys = q.shape[2], k.shape[2]
    if q.shape[0] > 1 or queries < LONG or q.shape[-1] > _WIDEST_CUDNN or _wants_gradient(q, k, v):
        return False
    causal = band == Band(high=0) and queries == keys
    return (causal or (band == _EVERY_PAIR and keys == padded(keys))) and generation() in _CUDNN_FIRST


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> Tensor:
    """Call cuDNN's kernel over lengths of which there are few. A causal mask hides the keys beyond the last query."""
    queries, causal = q.shape[2], band.high is not None
    beside = padded(queries) - queries
    q = pad(q, (0, 0, 0, beside)) if beside else q
    k, v = (pad(x, (0, 0, 0, beside)) if beside and causal else x for x in (k, v))
    context: Tensor = _cudnn(q, k, v, None, False, 0.0, causal, False, scale=scale)[0]
    return context[:, :, :queries]


def padded(length: int) -> int:
    """The next of eight lengths for each power of two."""
    step = 1 << max(length.bit_length() - 4, 0)
    return -(-length // step) * step


def flash_width(width: int) -> int:
    """The width at which flash keeps sums beside its results."""
    step = 32 if width <= 128 else 64
    return -(-width // step) * step


def _by_efficient(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, band: Band) -> Tensor:
    """Call the memory-efficient kernel, which knows two causal masks, and no groups of heads."""
    kind = _NO_MASK
    if band.high == 0:
        kind = _TOP_LEFT
    elif band.high is not None:
        kind, keys = _BOTTOM_RIGHT, q.shape[2] + band.high
        k, v = k[:, :, :keys], v[:, :, :keys]
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    groups, bias = heads // kv_heads, None if mask is None else _bias(mask, q, keys)
    if groups > 1 and (bias is None or batch == 1 or bias.shape[:2] == (1, 1)):
        # Each key/value head is a sequence of its own, which all query heads of its group read.
        q, k, v = (x.reshape(batch * kv_heads, -1, *x.shape[2:]) for x in (q, k, v))
        k, v = (x.expand(-1, groups, -1, -1) for x in (k, v))
        bias = bias if bias is None or bias.shape[1] == 1 else bias.view(kv_heads, groups, *bias.shape[2:])
    elif groups > 1:
        k, v = one_for_each_query_head(k, heads), one_for_each_query_head(v, heads)
    bias = None if bias is None else bias.expand(*q.shape[:3], keys)
    context: Tensor = _efficient(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias, None, None, None, None, 0.0, kind,
        _wants_gradient(q, k, v) or (bias is not None and _wants_gradient(bias)), scale=scale,
    )[0].transpose(1, 2)  # fmt: skip
    return context.reshape(batch, heads, queries, -1)


def _bias(mask: Tensor, q: Tensor, keys: int) -> Tensor:
    """The mask as the memory-efficient kernel reads it: added, in the dtype of q, its rows at multiples of 16."""
    beside = -keys % _MASK_ROWS
    if mask.requires_grad:
        return pad(mask.to(q.dtype), (0, beside))[..., :keys]
    bias = q.new_empty(*mask.shape[:-1], keys + beside)[..., :keys].copy_(mask)
    if mask.dtype == torch.bool:
        bias.log_()  # 1 is 0, and 0 is −∞
    return bias


def _as_read(q: Tensor, k: Tensor, v: Tensor, *, one_width: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in rows that begin at multiples of 16 bytes, zeros put beside narrower ones."""
    whole = 16 // q.itemsize
    of_q, of_v = (-(-x.shape[-1] // whole) * whole for x in (q, v))
    if one_width:
        of_q = of_v = max(of_q, of_v)
    return _rows(q, of_q), _rows(k, of_q), _rows(v, of_v)


def _rows(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] != width:
        x = pad(x, (0, width - x.shape[-1]))  # whose rows lie as those of x did, which may be one among the other
    whole = 16 // x.itemsize
    aligned = x.stride(-1) == 1 and not any(step % whole for step in (*x.stride()[:-1], x.storage_offset()))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@cache
def generation() -> int:
    """The first number of the GPU's compute capability; that of Hopper for plans without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9
