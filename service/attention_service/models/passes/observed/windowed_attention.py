"""The attention of Longformer and of LED's encoder, as weights over all pairs of tokens.

Their modules keep the weights of a query side by side: those of the global tokens, then those of its window. The
weights of a global query are kept apart, and texts are padded to whole windows. Here such a module makes the same
weights as one matrix over the tokens of the text alone, in steps that ``own_functions`` sees. Source: Beltagy et al.
2020, Longformer, section 3.1. Notation as in ``core.problem``; L tokens.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_service.models.passes.unrun_models import NOT_RUNNING

_ROUNDINGS: Final = 64
"""The largest difference from the module's own output that counts as none, in roundings of the dtype."""
_COARSE_TOLERANCE: Final = 0.02
"""The same, as a share of the largest number, of dtypes with few digits."""
_SIDE, _TOKENS = 2, 12
"""Tokens on each side of the windows of the trial, and those of its texts: three windows."""


def attend_over_pairs(model: nn.Module) -> None:
    """Let the modules of a model that attend within windows make weights over all pairs, if a trial succeeds."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "one_sided_attn_window_size")]
    kinds = {type(module): module for module in modules}
    if not all(map(_is_same, kinds.values())):
        return
    for module in modules:
        module.forward = partial(_attend, module)
    for part in model.modules():
        if hasattr(part, "_pad_to_window_size"):
            vars(part)["_pad_to_window_size"] = _unpadded


def _attend(
    module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *, is_index_masked: Tensor,
    is_index_global_attn: Tensor, is_global_attn: bool = False, output_attentions: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The output ``[B, L, width]`` of a module, and its weights ``[B, L, H, L]`` if they are wanted.

    ``is_index_masked``, ``is_index_global_attn``: bool ``[B, L]``, True for padding and for a global token.
    """

    def split(project: Callable[[Tensor], Tensor]) -> Tensor:  # [B, H, L, D]
        return project(hidden_states).view(*hidden_states.shape[:2], module.num_heads, -1).transpose(1, 2)

    def scored(query: Callable[[Tensor], Tensor], key: Callable[[Tensor], Tensor]) -> Tensor:  # [B, H, L, L]
        return (split(query) / math.sqrt(module.head_dim)) @ split(key).transpose(-1, -2)

    place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    seen = (place[:, None] - place).abs() <= module.one_sided_attn_window_size  # [L, L]
    scores, of_global = scored(module.query, module.key), is_index_global_attn[:, None, :, None]
    if is_global_attn:
        scores = torch.where(of_global, scored(module.query_global, module.key_global), scores)
        seen = seen | of_global | of_global.transpose(-1, -2)
    # The lowest number, so that a row of padding without keys has numbers.
    scores = scores.masked_fill(~seen | is_index_masked[:, None, None], torch.finfo(scores.dtype).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).type_as(
        scores
    )
    if is_global_attn:  # rows of two kinds of values, so that neither is that of all
        near, far = weights.masked_fill(of_global, 0), weights.masked_fill(~of_global, 0)
        context = near @ split(module.value) + far @ split(module.value_global)
    else:
        context = weights @ split(module.value)
    output = context.transpose(1, 2).flatten(2).masked_fill(is_index_masked[..., None], 0)
    by_query = weights.transpose(1, 2)
    if not output_attentions:
        return (output,)
    return (output, by_query, by_query) if is_global_attn else (output, by_query)


def _unpadded(*, pad_token_id: int, **inputs: Tensor | None) -> tuple[Any, ...]:
    """The inputs of a model in the place of those that are padded to whole windows: 0 tokens are added."""
    return (0, *inputs.values())


@torch.no_grad()
def _is_same(module: Any) -> bool:
    """True if a module returns the same here as by its own code, with padding, and with a global token or without."""
    weight, whole = module.query.weight, module.one_sided_attn_window_size
    device = "cpu" if weight.is_meta else weight.device
    states = torch.randn(2, _TOKENS, module.embed_dim, generator=torch.Generator().manual_seed(0))
    states, mask = states.to(device, weight.dtype), torch.zeros(2, _TOKENS, device=device)
    mask[1, -_SIDE:] = -1
    module.one_sided_attn_window_size = _SIDE
    try:
        for has_global in (False, True):
            mask[0, 1] = has_global
            facts: dict[str, Any] = {
                "is_index_masked": mask < 0,
                "is_index_global_attn": mask > 0,
                "is_global_attn": has_global,
            }
            own, pairwise = module.forward(states, mask, **facts)[0], _attend(module, states, mask, **facts)[0]
            most = min(_ROUNDINGS * torch.finfo(own.dtype).eps, _COARSE_TOLERANCE) * own.abs().max()
            if own.shape != pairwise.shape or not bool((own - pairwise).abs().max() <= most):
                return False
    except NOT_RUNNING:
        return False
    finally:
        module.one_sided_attn_window_size = whole
    return True
