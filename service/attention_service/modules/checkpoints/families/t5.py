"""T5 and its kin: scores without a scale, and a bias by distance that all layers share with layer 0.

Source: Raffel et al. 2020; names of ``transformers.T5Model``.
"""

from functools import partial
from typing import Final

from attention_contract.positions import NoPosition, RelativeBias
from attention_contract.schemas.modules import Stack
from attention_contract.spec import AttentionSpec, Causal, Dot
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    BlockNames,
    Entries,
    Family,
    Piece,
    Pieces,
    linear,
)

_NAMES: Final = linear(q_proj="q", k_proj="k", v_proj="v", o_proj="o")
_BIAS: Final = "relative_attention_bias.weight"


def _self(shared: bool) -> Pieces:
    return {**_NAMES, "relative_bias.weight": (Piece(_BIAS, layer=0 if shared else None),)}


def _blocks(shared: bool) -> tuple[BlockNames, ...]:
    stacks: tuple[Stack, ...] = ("encoder", "decoder")
    return (
        *(
            BlockNames(f"{stack}.block.{{layer}}.layer.0.SelfAttention.", _self(shared), stack=stack)
            for stack in stacks
        ),
        BlockNames("decoder.block.{layer}.layer.1.EncDecAttention.", _NAMES, part="cross", stack="decoder"),
    )


def _describe(entries: Entries, heads: int = 8) -> AttentionDescription:
    heads, width = (
        entries.count("num_heads", "num_attention_heads", default=heads),
        entries.count("d_kv", "head_dim", default=64),
    )
    if entries.part == "cross":
        return AttentionDescription(AttentionSpec(score=Dot(), position=NoPosition()), heads, head_dim=width)
    decoder = entries.stack == "decoder"
    position = RelativeBias(
        num_buckets=entries.count("relative_attention_num_buckets", default=32),
        max_distance=entries.count("relative_attention_max_distance", default=128),
        bidirectional=not decoder,
    )
    spec = AttentionSpec(score=Dot(), position=position, masks=[Causal()] if decoder else [])
    return AttentionDescription(spec, heads, head_dim=width)


FAMILIES: Final = (
    Family("t5", frozenset({"t5"}), _blocks(shared=True), _describe),
    Family("mt5", frozenset({"mt5"}), _blocks(shared=True), partial(_describe, heads=6)),
    Family("umt5", frozenset({"umt5"}), _blocks(shared=False), partial(_describe, heads=6)),
)
