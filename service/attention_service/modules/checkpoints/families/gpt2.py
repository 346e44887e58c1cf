"""GPT-2, whose weights are transposed, and its kin. Source: Radford et al. 2019; ``transformers.GPT2Model``."""

from typing import Final

from attention_contract.spec import AttentionSpec, Causal, ScaledDot
from attention_service.modules.checkpoints.cuts import by_group, row_part, transposed, transposed_thirds
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    BlockNames,
    Entries,
    Family,
    Piece,
    Pieces,
    fused,
)

_OUT: Final[Pieces] = {f"o_proj.{kind}": (Piece(f"c_proj.{kind}", transposed),) for kind in ("weight", "bias")}
_SELF: Final[Pieces] = {**fused("c_attn", "c_proj", transposed_thirds), **_OUT}
_CROSS: Final[Pieces] = {
    **{f"q_proj.{kind}": (Piece(f"q_attn.{kind}", transposed),) for kind in ("weight", "bias")},
    **{
        f"{role}_proj.{kind}": (Piece(f"c_attn.{kind}", row_part(place, 2, before=transposed)),)
        for place, role in enumerate("kv")
        for kind in ("weight", "bias")
    },
    **_OUT,
}


def _describe(entries: Entries) -> AttentionDescription:
    heads = entries.count("n_head", "num_attention_heads", default=12)
    scale = (entries.count("n_embd", "hidden_size", default=768) // heads) ** -0.5
    if not entries.flag("scale_attn_weights", default=True):
        scale = 1.0
    if entries.flag("scale_attn_by_inverse_layer_idx", default=False):
        scale /= entries.layer + 1
    masks = [Causal()] if entries.part == "self" else []
    return AttentionDescription(AttentionSpec(score=ScaledDot(scale=scale), masks=masks), heads)


def _bigcode(entries: Entries) -> AttentionDescription:
    """GPT-2 with plain weights, whose heads share one key and value, or lie one behind the other."""
    entries.must_be("add_cross_attention", False)
    heads = entries.count("n_head", "num_attention_heads", default=12)
    shared = entries.flag("multi_query", default=True)
    width = entries.count("n_embd", "hidden_size", default=768) // heads
    scale = None if entries.flag("scale_attn_weights", default=True) else 1.0
    spec = AttentionSpec(score=ScaledDot(scale=scale), masks=[Causal()])
    return AttentionDescription(spec, heads, kv_heads=1 if shared else heads, head_dim=width)


FAMILIES: Final = (
    Family(
        name="gpt2",
        model_types=frozenset({"gpt2"}),
        blocks=(BlockNames("h.{layer}.attn.", _SELF), BlockNames("h.{layer}.crossattention.", _CROSS, part="cross")),
        describe=_describe,
    ),
    Family(
        name="gpt-bigcode",
        model_types=frozenset({"gpt_bigcode"}),
        blocks=(BlockNames("h.{layer}.attn.", fused("c_attn", "c_proj", by_group)),),
        describe=_bigcode,
    ),
)
