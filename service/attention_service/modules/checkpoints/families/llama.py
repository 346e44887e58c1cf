"""Llama and the decoders that share its tensor names. Source: Touvron et al. 2023; ``transformers.LlamaModel``."""

from typing import Final

from attention_contract.spec import AttentionSpec, Causal
from attention_service.modules.checkpoints.family import Attention, BlockNames, Entries, Family, linear
from attention_service.modules.checkpoints.rope_entries import rope_of

_NAMES: Final = linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="o_proj")
_BLOCKS: Final = (BlockNames("layers.{layer}.self_attn.", _NAMES),)


def _llama(entries: Entries) -> Attention:
    heads = entries.count("num_attention_heads", default=32)
    head_dim = entries.count("head_dim", default=entries.count("hidden_size", default=4096) // heads)
    return Attention(
        AttentionSpec(position=rope_of(entries, head_dim), masks=[Causal()]),
        heads,
        kv_heads=entries.count("num_key_value_heads", default=heads),
        head_dim=head_dim,
    )


FAMILIES: Final = (Family("llama", frozenset({"llama"}), _BLOCKS, _llama),)
