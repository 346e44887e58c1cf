"""Queries, keys and values of one width, as PyTorch's fused kernel of the CPU takes them."""

from torch import Tensor
from torch.nn.functional import pad


def same_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros put beside the narrower ones: the flash kernel of the CPU takes one width, and zeros change no product."""
    width = q.shape[-1]
    if width == v.shape[-1] == k.shape[-1]:
        return q, k, v
    width = max(width, v.shape[-1])
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v
