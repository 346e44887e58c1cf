"""PyTorch's choice among its kernels of attention on an H100, and what each refuses.

Source: ``transformers/sdp_utils_cpp.h`` among the headers of PyTorch 2.13, and ``transformers/cuda/sdp_utils.cpp`` and
``transformers/attention.cpp`` of its sources. Where none takes the arguments, PyTorch computes by its MATH, which holds
every score in memory; here that fails.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def refused_by_all(q: Tensor, k: Tensor, v: Tensor) -> Iterator[str]:
    """What no kernel takes."""
    if not q.ndim == k.ndim == v.ndim == 4:
        yield "four dimensions"
    elif not q.shape[0] == k.shape[0] == v.shape[0]:
        yield "one number of sequences"
    elif 0 in (q.shape[2], k.shape[2]):
        yield "a query and a key"
    elif k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        yield "groups of heads"
    elif any(x.stride(-1) != 1 for x in (q, k, v)):
        yield "adjacent numbers in a row"


def refused_by_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Iterator[str]:
    """What the flash kernel refuses, called by ``scaled_dot_product_attention``."""
    yield from refused_by_all(q, k, v)
    if mask is not None:
        yield "no mask"
    if q.dtype not in _HALF:
        yield "half types"
    if not q.shape[3] == k.shape[3] == v.shape[3] <= 256:
        yield "one width up to 256"
    if causal and q.shape[2] != k.shape[2]:
        yield "as many queries as keys under a causal mask"


def refused_by_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Iterator[str]:
    """What cuDNN refuses."""
    yield from refused_by_all(q, k, v)
    if mask is not None and mask.requires_grad:
        yield "a mask without gradient"
    if q.dtype not in _HALF:
        yield "half types"
    if max(q.shape[3], v.shape[3]) > 128 or q.shape[3] % 8 or v.shape[3] % 8:
        yield "widths up to 128 that are multiples of 8"
    if k.shape[2] == 1:
        yield "more than one key"


def refused_by_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Iterator[str]:
    """What the memory-efficient kernel refuses."""
    yield from refused_by_all(q, k, v)
    if q.dtype not in (*_HALF, torch.float32):
        yield "no float64"
    whole = 8 if q.dtype in _HALF else 4
    if q.shape[3] != k.shape[3] or q.shape[3] % whole or v.shape[3] % whole:
        yield f"widths that are multiples of {whole}"
    if q.shape[1] != k.shape[1]:
        yield "a key/value head for each query head"
    if mask is not None and mask.stride(-1) != 1 and mask.shape[-1] != 1:
        yield "adjacent numbers in a row of the mask"


_Refusals = Callable[..., Iterator[str]]
_KERNELS: dict[str, _Refusals] = {
    "_scaled_dot_product_cudnn_attention": refused_by_cudnn,
    "_scaled_dot_product_flash_attention": refused_by_flash,
    "_scaled_dot_product_efficient_attention": refused_by_efficient,
}
"""In PyTorch's order on this GPU."""


def attention_of_cuda(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Stand for ``scaled_dot_product_attention``: the operations that it starts on an H100. Fails where it is MATH."""
    told = {name: [*refusals(q, k, v, attn_mask, causal=is_causal)] for name, refusals in _KERNELS.items()}
    chosen = next((name for name, reasons in told.items() if not reasons), None)
    if chosen is None or (q.shape[1] != k.shape[1] and not enable_gqa):
        raise AssertionError(f"PyTorch would compute this by its MATH, with all scores in memory: {told}")
    how: dict[str, Any] = {"scale": q.shape[3] ** -0.5 if scale is None else scale}
    if chosen == "_scaled_dot_product_flash_attention":
        width = v.shape[3]
        q, k, v = (pad(x, (0, -width % 8)) if width % 8 else x for x in (q, k, v))
        return _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, **how)[0][..., :width]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if chosen == "_scaled_dot_product_cudnn_attention":
        call = _aten._scaled_dot_product_cudnn_attention
        return call(q, k, v, attn_mask, differentiated, dropout_p, is_causal, False, **how)[0]
    if attn_mask is not None:
        beside = -attn_mask.shape[-1] % 16
        attn_mask = pad(attn_mask, (0, beside))[..., :-beside] if beside else attn_mask
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    call = _aten._scaled_dot_product_efficient_attention
    return call(q, k, v, attn_mask, differentiated, dropout_p, is_causal, **how)[0]


def refuse(name: str, arguments: tuple[Any, ...]) -> None:
    """Raise RuntimeError where a kernel of attention that is called directly refuses its arguments."""
    if name not in _KERNELS:
        return
    q, k, v = arguments[:3]
    mask = None if name == "_scaled_dot_product_flash_attention" else arguments[3]
    causal_at = {"_scaled_dot_product_flash_attention": 4}.get(name, 6)
    causal = len(arguments) > causal_at and arguments[causal_at]
    reasons = _KERNELS[name](q, k, v, mask, causal=causal)
    if name == "_scaled_dot_product_flash_attention":
        reasons = chain((each for each in reasons if "causal" not in each), _unpadded(q))
    if name == "_scaled_dot_product_efficient_attention" and mask is not None:
        reasons = chain(reasons, _not_laid_out(mask, (*q.shape[:3], k.shape[2])))
    if told := ", ".join(reasons):
        raise RuntimeError(f"{name} asks for {told}")


def _unpadded(q: Tensor) -> Iterator[str]:
    if q.shape[3] % 8:
        yield "a width that is a multiple of 8"


def _not_laid_out(mask: Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    if mask.shape != shape:
        yield f"a mask of {shape}, not of {tuple(mask.shape)}"
    if any(stride % 16 for stride in mask.stride()[:-1]):
        yield "rows of the mask that begin at multiples of 16"
