"""BLOOM, MPT and Falcon: decoders with fused projections. Names of the models of ``transformers``."""

from typing import Final

from attention_contract.positions import Alibi
from attention_contract.spec import AttentionSpec, Causal, ScaledDot
from attention_service.modules.checkpoints.cuts import by_group, thirds
from attention_service.modules.checkpoints.family import AttentionDescription, BlockNames, Entries, Family, fused
from attention_service.modules.checkpoints.rope_entries import rope_of


def _bloom(entries: Entries) -> AttentionDescription:
    if entries.get("pretraining_tp", default=1) != 1:
        entries.must_be("slow_but_exact", False)
    heads = entries.count("n_head", "num_attention_heads", default=8)
    width = entries.count("hidden_size", "n_embed", default=64) // heads
    spec = AttentionSpec(position=Alibi(symmetric=False), masks=[Causal()])
    return AttentionDescription(spec, heads, kv_heads=heads, head_dim=width)


def _mpt(entries: Entries) -> AttentionDescription:
    entries.must_be("is_causal", True)  # no such model of transformers runs
    own = entries.object("attn_config")
    own.must_be("attn_type", "multihead_attention").must_be("prefix_lm", False).must_be("qk_ln", False)
    own.must_be("attn_uses_sequence_id", False).must_be("alibi", True).must_be("alibi_bias_max", 8)
    if own.get("clip_qkv"):
        raise own.unsupported("clip_qkv", "expected null: modules do not clip queries, keys and values")
    scale = own.get("softmax_scale")
    score = ScaledDot(scale=None if scale is None else own.number("softmax_scale"))
    spec = AttentionSpec(score=score, position=Alibi(symmetric=False), masks=[Causal()])
    return AttentionDescription(spec, entries.count("n_heads", "num_attention_heads", default=16))


def _falcon(entries: Entries) -> AttentionDescription:
    if entries.flag("alibi", default=False):
        raise entries.unsupported("alibi", "expected false: Falcon rounds its bias to bfloat16")
    heads = entries.count("num_attention_heads", "n_head", default=71)
    if entries.flag("new_decoder_architecture", default=False):
        kv_heads = entries.optional_count("num_kv_heads", None) or heads
    else:
        kv_heads = 1 if entries.flag("multi_query", default=True) else heads
    width = entries.count("hidden_size", default=4544) // heads
    spec = AttentionSpec(position=rope_of(entries, width), masks=[Causal()])
    return AttentionDescription(spec, heads, kv_heads=kv_heads, head_dim=width)


_BLOCKS: Final = (BlockNames("h.{layer}.self_attention.", fused("query_key_value", "dense", by_group)),)

FAMILIES: Final = (
    Family("bloom", frozenset({"bloom"}), _BLOCKS, _bloom),
    Family("mpt", frozenset({"mpt"}), (BlockNames("blocks.{layer}.attn.", fused("Wqkv", "out_proj", thirds)),), _mpt),
    Family("falcon", frozenset({"falcon"}), _BLOCKS, _falcon),
)
