"""DeepSeek's latent attention: queries, keys and values of normed latents, a part of each head turned.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1; ``transformers.DeepseekV3Model``.
"""

from functools import partial
from math import log
from typing import Final

from attention_contract.positions import NoPosition
from attention_contract.schemas.modules import Latent
from attention_contract.spec import AttentionSpec, ScaledDot
from attention_service.modules.checkpoints.cuts import latent_keys, latent_values, shared_first
from attention_service.modules.checkpoints.families.llama import blocks, masks
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    Entries,
    Family,
    Piece,
    Pieces,
    linear,
    one,
)
from attention_service.modules.checkpoints.rope_entries import parameters_of, rope_of

_NAMES: Final[Pieces] = {
    **linear(q_down="q_a_proj", kv_down="kv_a_proj_with_mqa", o_proj="o_proj"),
    **one(q_down_norm__weight="q_a_layernorm.weight", kv_down_norm__weight="kv_a_layernorm.weight"),
    "q_proj.weight": (Piece("q_b_proj.weight", shared_first), Piece("q_proj.weight", shared_first)),
    "k_proj.weight": (Piece("kv_b_proj.weight", latent_keys),),
    "v_proj.weight": (Piece("kv_b_proj.weight", latent_values),),
}


def _latent(
    entries: Entries,
    *,
    heads: int = 32,
    query: int | None = 1536,
    key_value: int = 512,
    plain: int = 128,
    turned: int = 64,
    value_dim: int | None = 128,
    rotary: bool = True,
    interleaved: bool | None = None,
) -> AttentionDescription:
    """A causal block with latents; the arguments are the family's defaults.

    ``plain`` and ``turned`` are the widths of the two parts of a head. ``interleaved`` is by ``rope_interleave`` where
    it is None.
    """
    heads = entries.count("num_attention_heads", default=heads)
    if entries.get("num_key_value_heads", default=heads) != heads:
        raise entries.unsupported("num_key_value_heads", f"expected the number of heads, {heads}")
    shared = entries.count("qk_rope_head_dim", default=turned)
    head_dim = entries.count("qk_nope_head_dim", default=plain) + shared
    if interleaved is None:
        interleaved = entries.flag("rope_interleave", default=True)
    rope = rope_of(entries, shared, interleaved=interleaved) if rotary else None
    if rope is not None and rope.dim is not None:
        raise entries.unsupported("partial_rotary_factor", "expected 1: all of qk_rope_head_dim turns")
    if value_dim is None:
        value_dim = entries.count("hidden_size", default=2560) // heads
    return AttentionDescription(
        AttentionSpec(
            score=ScaledDot(scale=_scale(entries, head_dim) if rotary else None),
            position=NoPosition() if rope is None else rope.model_copy(update={"dim": shared}),
            masks=masks(None),
        ),
        heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=entries.optional_count("v_head_dim", value_dim) or value_dim,
        latent=Latent(
            query=entries.optional_count("q_lora_rank", query),
            key_value=entries.count("kv_lora_rank", default=key_value),
            shared=shared,
            bias=entries.flag("attention_bias", default=False),
        ),
    )


def _scale(entries: Entries, head_dim: int) -> float | None:
    """The factor of the scores where YaRN lengthens the rotation: mscale² / √head_dim. Source: Peng et al. 2023."""
    given = parameters_of(entries)
    every, factor = given.get("mscale_all_dim"), float(given.get("factor", 1.0))
    if given.get("rope_type", given.get("type", "default")) == "default" or not every:
        return None
    mscale = 0.1 * every * log(factor) + 1 if factor > 1 else 1.0
    return float(mscale * mscale * head_dim**-0.5)


_BLOCKS: Final = blocks(_NAMES)

FAMILIES: Final = (
    Family("deepseek-v2", frozenset({"deepseek_v2"}), _BLOCKS, partial(_latent, interleaved=True)),
    Family("deepseek-v3", frozenset({"deepseek_v3"}), _BLOCKS, partial(_latent, heads=128)),
    Family("axk1", frozenset({"axk1"}), _BLOCKS, partial(_latent, heads=64)),
    Family(
        "glm4-moe-lite",
        frozenset({"glm4_moe_lite"}),
        _BLOCKS,
        partial(_latent, heads=20, query=768, plain=192, value_dim=256),
    ),
    Family("kimi-linear", frozenset({"kimi_linear"}), _BLOCKS, partial(_latent, query=None, rotary=False)),
    Family(
        "minicpm3",
        frozenset({"minicpm3"}),
        _BLOCKS,
        partial(_latent, heads=40, query=768, key_value=256, plain=64, turned=32, value_dim=None, interleaved=False),
    ),
    Family("youtu", frozenset({"youtu"}), _BLOCKS, partial(_latent, heads=16)),
)
