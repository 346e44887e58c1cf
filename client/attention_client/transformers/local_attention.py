"""The attention that a model computed before, for the layers that stay local.

All layers of a model share one mask, and that of the service is a bool mask or None, as SDPA takes it. Eager attention
takes a float mask, and always one.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_transformers.model_layers import UnsupportedModel
from attention_transformers.model_masks import MASK_FUNCTION, additive, causal_mask

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


def local_attention(module: nn.Module, implementation: str) -> AttentionFunction:
    """Return the attention function of a module under a former implementation.

    Raises UnsupportedModel if that implementation takes masks of another kind.
    """
    if implementation == "eager":
        return _with_float_masks(vars(sys.modules[type(module).__module__])["eager_attention_forward"])
    if implementation != "sdpa" and ALL_MASK_ATTENTION_FUNCTIONS.get(implementation) is not MASK_FUNCTION:
        raise UnsupportedModel.at(
            "layers",
            f"a model with attn_implementation={implementation!r} cannot have local and remote layers, because "
            "its masks have another format; load it with attn_implementation='sdpa' or 'eager'",
        )
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS[implementation]
    return function


def _with_float_masks(eager: AttentionFunction) -> AttentionFunction:
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if mask is None and causal and query.shape[2] > 1:
            mask = causal_mask(query.shape[2], key.shape[2], query.device)
        if mask is not None and mask.dtype == torch.bool:
            mask = additive(mask, query.dtype)
        return eager(module, query, key, value, mask, *args, **options)

    return forward
