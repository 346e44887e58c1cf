"""State dicts of ``torch.nn.MultiheadAttention``, and of torch's transformer layers, which are made of it.

The masks of self-attention are arguments of their forward pass, and ``add_zero_attn`` leaves no trace in a state dict:
an import asks for both. Layers of a transformer never have ``add_zero_attn``, and their cross-attention has no mask
unless a call brings one.
"""

from functools import partial
from typing import Final

from attention_contract.spec import AttentionSpec
from attention_service.modules.checkpoints.cuts import flat, thirds
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    BlockNames,
    Entries,
    Family,
    Piece,
    Pieces,
    linear,
)

_NAMES: Final[Pieces] = {
    **{f"{role}_proj.weight": (Piece("in_proj_weight", thirds(role)), Piece(f"{role}_proj_weight")) for role in "qkv"},
    **{f"{role}_proj.bias": (Piece("in_proj_bias", thirds(role)),) for role in "qkv"},
    **linear(o_proj="out_proj"),
    "bias_k": (Piece("bias_k", flat),),
    "bias_v": (Piece("bias_v", flat),),
}


def _attention(entries: Entries, *, alone: bool) -> AttentionDescription:
    unknown = ("masks", "add_zero_attn") if alone else ("masks",) if entries.part == "self" else ()
    return AttentionDescription(
        AttentionSpec(add_bias_kv="bias_k" in entries.parameters),
        heads=entries.known_count("num_attention_heads", "num_heads", "nhead"),
        unknown=unknown,
    )


FAMILIES: Final = (
    Family(
        name="torch-transformer",
        model_types=frozenset(),
        blocks=(
            BlockNames("layers.{layer}.self_attn.", _NAMES),
            BlockNames("layers.{layer}.multihead_attn.", _NAMES, part="cross"),
            BlockNames("self_attn.", _NAMES),
            BlockNames("multihead_attn.", _NAMES, part="cross"),
        ),
        describe=partial(_attention, alone=False),
        without_config=True,
    ),
    Family(
        name="torch",
        model_types=frozenset(),
        blocks=(BlockNames("layers.{layer}.", _NAMES, part=None), BlockNames("", _NAMES, part=None)),
        describe=partial(_attention, alone=True),
        without_config=True,
    ),
)
