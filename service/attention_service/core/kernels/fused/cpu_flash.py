"""PyTorch's flash kernel of the CPU and its gradient, called as the public function calls them.

The operations are private and check next to nothing. They read a row of q, k, v, the context or its gradient as
adjacent numbers, and a mask's row as adjacent numbers or as one number; without keys they divide by zero.
``scaled_dot_product_attention`` asks for all that before it calls them. Every direct call goes through this module,
which refuses what the public function refuses, and copies what is laid out otherwise.

Source: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` and ``transformers/sdp_utils_cpp.cpp`` of PyTorch 2.13.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Three = tuple[Tensor, Tensor, Tensor]
_RANK = 4


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool, exact: bool
) -> tuple[Tensor, Tensor]:
    """The context ``[B, H, Q, D]`` and the log-sum-exp ``[B, H, Q]``.

    q, k and v have one width; mask ``[B or 1, H or 1, Q or 1, K or 1]`` is bool, True where a query may look, or is
    added to the scores. ``causal`` aligns at the top left. ``exact``: half types are computed, and the context is
    returned, in float32, as ``differentiate`` needs it. Raises ValueError for what the kernel does not take.
    """
    _check(q, k, v, mask, causal=causal)
    q, k, v = (_exact(x) for x in (q, k, v)) if exact else (q, k, v)
    q, k, v, mask = laid_out(q, k, v, _added(mask, q.dtype))
    results = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return results[0], results[1]


def differentiate(
    gradient: Tensor, inputs: Three, context: Tensor, lse: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> Three:
    """The gradients of q, k and v from that of the context, half types in float32.

    ``inputs``, ``mask``, ``scale`` and ``causal`` are those of ``attend``; ``context`` and ``lse`` are its exact
    results. The kernel subtracts ∂o·o from ∂o·v: of a context in a half type the difference would keep few digits.
    """
    _check(*inputs, mask, causal=causal)
    if not gradient.shape == context.shape == inputs[0].shape or lse.shape != context.shape[:3]:
        raise ValueError("the context and its gradient have the shape of the queries, and each query has a sum")
    gradient, q, k, v, context = (_exact(x) for x in (gradient, *inputs, context))
    q, k, v, mask = laid_out(q, k, v, _added(mask, q.dtype))
    gradient, context = _rows(gradient), _rows(context)
    gradients = _backward(gradient, q, k, v, context, _exact(lse), 0.0, causal, attn_mask=mask, scale=scale)
    return gradients[0], gradients[1], gradients[2]


def laid_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments as the kernel reads them; copies only of those that other operations left in another layout."""
    if mask is not None and mask.stride(-1) != 1:
        mask = mask[..., :1] if mask.stride(-1) == 0 else mask  # one column stands for all
        mask = mask.clone(memory_format=torch.contiguous_format)
    return _rows(q), _rows(k), _rows(v), mask


def _rows(x: Tensor) -> Tensor:
    """The tensor with rows of adjacent numbers that do not overlap. Not ``contiguous``: it skips dimensions of 1."""
    if x.stride(-1) == 1 and (x.shape[-2] == 1 or x.stride(-2) >= x.shape[-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _exact(x: Tensor) -> Tensor:
    """The tensor in float32, or as it is if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> None:
    """Raise ValueError for what ``scaled_dot_product_attention`` would refuse, or compute by another kernel."""
    (batch, heads, queries, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    if not k.shape == v.shape == (batch, kv_heads, keys, width) or not queries * keys or heads % kv_heads:
        raise ValueError(f"queries {[*q.shape]}, keys {[*k.shape]} and values {[*v.shape]} do not meet")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}, and not of one floating type"
        )
    if mask is None:
        return
    sizes = (batch, heads, queries, keys)
    if causal or mask.ndim != _RANK or any(one not in (1, all_) for one, all_ in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"a mask {[*mask.shape]} is not broadcastable to {[*sizes]}, or comes beside a causal one")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("the flash kernel has no gradient of a mask")


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers that are added to the scores, in a dtype that the kernel takes beside q of ``dtype``."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        look, forbid = (torch.scalar_tensor(x, dtype=dtype, device=mask.device) for x in (0.0, -torch.inf))
        mask = torch.where(mask, look, forbid)
    elif mask.dtype != torch.float32 or dtype == torch.float64:
        mask = mask.to(dtype)
    return mask


def same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros put beside the narrower ones: the flash kernel of the CPU takes one width, and zeros change no product."""
    width = q.shape[-1]
    if width == v.shape[-1] == k.shape[-1]:
        return q, k, v
    width = max(width, v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def called_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, **how: Any
) -> Tensor:
    """Stand for ``scaled_dot_product_attention`` on a CPU."""
    if (mask is not None and mask.requires_grad) or not q.shape[2] * k.shape[2]:  # PyTorch takes stages of its own
        return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, **how)
    return attend(q, k, v, mask, scale, causal=is_causal, exact=False)[0]
