"""PyTorch's flash kernel of the CPU and its gradient, called as the public function calls them.

The operations are private and check nothing. They read a row of q, k, v, the context or its gradient as adjacent
numbers, and a mask's row as adjacent numbers or as one number. ``scaled_dot_product_attention`` asks for that before it
calls them. Every direct call goes through this module, which copies what is laid out otherwise.

Source: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp`` and ``transformers/sdp_utils_cpp.cpp`` of PyTorch 2.13.
"""

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Three = tuple[Tensor, Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool, exact: bool
) -> tuple[Tensor, Tensor]:
    """The context ``[B, H, Q, D]`` and the log-sum-exp ``[B, H, Q]``.

    q, k and v have as many heads and one width; mask ``[B or 1, H or 1, Q or 1, K or 1]`` is bool, True where a query
    may look, or is added to the scores. ``causal`` aligns at the top left. ``exact``: half types are computed, and the
    context is returned, in float32, as ``differentiate`` needs it.
    """
    q, k, v = (_rows(x, exact=exact) for x in (q, k, v))
    found = _forward(q, k, v, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale)
    return found[0], found[1]


def differentiate(
    gradient: Tensor, inputs: Three, context: Tensor, lse: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> Three:
    """The gradients of q, k and v from that of the context, half types in float32.

    ``inputs``, ``mask``, ``scale`` and ``causal`` are those of ``attend``; ``context`` and ``lse`` are its exact
    results. The kernel subtracts ∂o·o from ∂o·v: of a context in a half type the difference would keep few digits.
    """
    gradient, q, k, v, context = (_rows(x, exact=True) for x in (gradient, *inputs, context))
    found = _backward(gradient, q, k, v, context, lse, 0.0, causal, attn_mask=_added(mask, q.dtype), scale=scale)
    return found[0], found[1], found[2]


def _rows(x: Tensor, *, exact: bool) -> Tensor:
    """The tensor with rows of adjacent numbers that do not overlap; if ``exact``, in float32 or better."""
    if exact:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if x.stride(-1) == 1 and (x.shape[-2] == 1 or x.stride(-2) >= x.shape[-1]) else x.contiguous()


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers that are added to the scores, in a dtype that the kernel takes beside q of ``dtype``."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        look, forbid = (torch.scalar_tensor(x, dtype=dtype, device=mask.device) for x in (0.0, -torch.inf))
        mask = torch.where(mask, look, forbid)
    elif mask.dtype != torch.float32 or dtype == torch.float64:
        mask = mask.to(dtype)
    return mask if mask.shape[-1] == 1 or mask.stride(-1) in (0, 1) else mask.contiguous()
