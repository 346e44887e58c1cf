"""PyTorch's fused kernel of the CPU on meta tensors: the operation by which its attention calls the kernel."""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_service.core.kernels.fused import cpu_flash


def called_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, **how: Any
) -> Tensor:
    """Stand for ``scaled_dot_product_attention`` on a CPU."""
    if (mask is not None and mask.requires_grad) or not q.shape[2] * k.shape[2]:  # PyTorch takes stages of its own
        return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, **how)
    return cpu_flash.attend(q, k, v, mask, scale, causal=is_causal, exact=False)[0]
