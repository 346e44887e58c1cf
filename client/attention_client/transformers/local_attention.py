"""The attention that a model computed before, for the layers that stay local.

All layers of a model share one mask, and that of the service is a bool mask or None, as SDPA takes it. Eager attention
takes a float mask, and always one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attention_client.array_likes import as_array
from attention_client.transformers.attached import attending_by
from attention_contract.tensors import Array
from attention_transformers.model_layers import LayerKey, UnsupportedModel, attention_modules
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
            f"a model with attn_implementation={implementation!r} cannot keep layers local beside remote ones, since "
            "its masks are of another kind; load it with attn_implementation='sdpa' or 'eager'",
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


@contextmanager
def local_taps(model: PreTrainedModel) -> Iterator[dict[LayerKey, dict[str, Array]]]:
    """Yield a dict that each pass fills with q, k, v, weights and context by layer, with their batch dimension.

    The model attends by its own eager functions until the block ends. Raises UnsupportedModel for a model that does not
    use the attention interface of transformers.
    """
    modules = attention_modules(model)
    taps: dict[LayerKey, dict[str, Array]] = {}
    keys = {id(one.module): one.keys for one in modules}
    functions = {id(one.module): local_attention(one.module, "eager") for one in modules}
    calls: dict[int, int] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        place = id(module)
        calls[place] = calls.get(place, -1) + 1
        layer = keys[place][calls[place] % len(keys[place])]
        output, weights = functions[place](module, query, key, value, mask, *args, **options)
        found = {"q": query, "k": key, "v": value, "weights": weights, "context": output.transpose(1, 2)}
        taps[layer] = {tap: as_array(tensor) for tap, tensor in found.items() if tensor is not None}
        return output, weights

    with attending_by(model, attend):
        yield taps
