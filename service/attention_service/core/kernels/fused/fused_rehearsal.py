"""PyTorch's fused kernel on meta tensors: the operations by which its attention calls the kernel."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attention_service.core.kernels.fused import cpu_flash

_LAID_OUT_IN = 8
"""Elements of a half type by which a GPU takes its arguments."""


def called_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, **how: Any
) -> Tensor:
    """Stand for ``scaled_dot_product_attention`` on a CPU."""
    if (mask is not None and mask.requires_grad) or not q.shape[2] * k.shape[2]:  # PyTorch takes stages of its own
        return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, **how)
    return cpu_flash.attend(q, k, v, mask, scale, causal=is_causal, exact=False)[0]


def called_on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any) -> Tensor:
    """Stand for ``scaled_dot_product_attention`` on a GPU, where masks are laid out in blocks of 16."""
    width = v.shape[-1]
    if mask is not None and not mask.requires_grad:
        mask = q.new_empty(2, *mask.shape)[0].copy_(mask)
    if q.itemsize == 2:
        q, k, v = (pad(x, (0, -x.shape[-1] % _LAID_OUT_IN)) if x.shape[-1] % _LAID_OUT_IN else x for x in (q, k, v))
    return called_on_cpu(q, k, v, mask, **how)[..., :width]
