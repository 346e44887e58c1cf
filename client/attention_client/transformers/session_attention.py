"""The attention of new tokens over a session, for a layer of a ``SessionCache``."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_client.torch.attention_function import tensor_like
from attention_client.transformers.identity_modules import RawAttention
from attention_client.transformers.session_layer import NewTokens
from attention_contract.schemas.attention import Edit
from attention_transformers.model_layers import UnsupportedModel
from attention_transformers.model_masks import known_mask

_ADVICE: Final = "generate with a DynamicCache, or without a cache"


def attend_in_session(
    tokens: NewTokens,
    query: Tensor,
    fields: Mapping[str, Tensor],
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: Mapping[str, Any] | None,
    edits: Sequence[Edit],
    taps: Sequence[str],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Append the new tokens and attend from them to all of the session.

    ``query [B, H, L, D]``; ``fields`` hold the masks of the step. Returns the output ``[B, H, L, Dv]`` and the taps.
    Raises what a step raises; the session then has its old length.
    """
    key, value = tokens.key, tokens.value
    heads, head_dim = query.shape[1], query.shape[3]
    raw = RawAttention(
        heads, key.shape[1], head_dim, value.shape[3], query.dtype, scale, softcap, tokens.layer.window
    )  # fmt: skip
    merged = _merged(query)
    if raw.width > merged.shape[2]:
        merged = nn.functional.pad(merged, (0, raw.width - merged.shape[2]))
    options = {"dropout": dropout} if dropout else {}
    step = {
        "query": merged, "key": _merged(key), "value": _merged(value), "edits": edits, "return_": ("output", *taps),
        **fields, **options,
    }  # fmt: skip
    reply = tokens.layer.step(tokens, raw, sinks, step)
    output = tensor_like(reply.output, query)[..., : heads * raw.value_dim]
    tapped = {tap: tensor_like(getattr(reply, tap), query) for tap in taps}
    return output.reshape(*output.shape[:2], heads, raw.value_dim).transpose(1, 2), tapped


def step_masks(tokens: NewTokens, query: Tensor, mask: Tensor | None, *, causal: bool) -> dict[str, Tensor]:
    """Return a mask of a pass as fields of a step: nothing, a ``key_mask [B, Lk]``, or the ``mask`` itself.

    The module of the session has a mask of its own, causal or a sliding window. Raises UnsupportedModel for a mask of
    other keys than those of the session, and for one that lets a query look where the module's does not.
    """
    count, past = query.shape[2], tokens.layer.length
    if tokens.key.shape[2] != count:
        raise UnsupportedModel.at(
            "past_key_values",
            f"{tokens.key.shape[2]} keys came with {count} queries, but a step needs equal numbers; {_ADVICE}",
        )
    if mask is None:
        if not causal and count > 1:
            raise _not_causal()
        return {}
    keys = past + count
    if mask.shape[-1] != keys:
        raise UnsupportedModel.at(
            "attention_mask",
            f"expected a mask over the {keys} tokens of the cache and the new ones; got one over {mask.shape[-1]}; "
            f"{_ADVICE}",
        )
    i = torch.arange(past, keys, device=mask.device)[:, None]
    j = torch.arange(keys, device=mask.device)
    window = tokens.layer.window
    band = (j <= i) if window is None else (j <= i) & (j > i - window)
    known = known_mask(mask)
    if known is not None:
        padding = known.padding
        expected = band if padding is None else band & padding[:, None]
        if torch.equal(mask[:, 0], expected.expand_as(mask[:, 0])):
            return {} if padding is None or bool(padding.all()) else {"key_mask": padding}
    if mask.dtype != torch.bool:  # the lowest number forbids
        mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    if bool((allowed & ~band).any()):
        raise _not_causal()
    one_row = count == 1 and mask.shape[1] == 1 and mask.dtype == torch.bool
    return {"key_mask": mask[:, 0, 0].expand(len(query), -1)} if one_row else {"mask": mask}


def _merged(heads: Tensor) -> Tensor:
    """``[B, H, L, D]`` as ``[B, L, H·D]``."""
    return heads.transpose(1, 2).flatten(2)


def _not_causal() -> UnsupportedModel:
    return UnsupportedModel.at(
        "attention_mask",
        "a token of this model sees later tokens, or tokens outside its window; in a session it sees only earlier "
        f"ones; {_ADVICE}",
    )
