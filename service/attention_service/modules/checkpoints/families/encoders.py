"""Encoders, and pairs of encoder and decoder, with tensor names of their own.

Names of the models of ``transformers``.
"""

from functools import partial
from typing import Final

from attention_contract.schemas.modules import Stack
from attention_contract.spec import AnyOf, AttentionSpec, Causal, GlobalTokens, SlidingWindow
from attention_service.modules.checkpoints.cuts import thirds
from attention_service.modules.checkpoints.families.llama import slides
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    BlockNames,
    Entries,
    Family,
    Pieces,
    fused,
    linear,
)
from attention_service.modules.checkpoints.rope_entries import rope_of, with_rotation_of

_DISTILBERT: Final = linear(q_proj="q_lin", k_proj="k_lin", v_proj="v_lin", o_proj="out_lin")
_ALBERT: Final = linear(q_proj="query", k_proj="key", v_proj="value", o_proj="dense")
_LONGFORMER: Final[Pieces] = linear(
    q_proj="self.query",
    k_proj="self.key",
    v_proj="self.value",
    o_proj="output.dense",
    q_global="self.query_global",
    k_global="self.key_global",
    v_global="self.value_global",
)
_VIT: Final = linear(q_proj="attention.query", k_proj="attention.key", v_proj="attention.value", o_proj="output.dense")
_NEW_VIT: Final = linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="o_proj")
_OUT: Final = linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
_CLIP: Final = (BlockNames("encoder.layers.{layer}.self_attn.", _OUT),)


def _plain(entries: Entries, heads: int = 12, *, causal: bool = False) -> AttentionDescription:
    """Every token sees every token, or those up to its own."""
    return AttentionDescription(
        AttentionSpec(masks=[Causal()] if causal else []),
        entries.count("num_attention_heads", "n_heads", default=heads),
    )


def _albert(entries: Entries) -> AttentionDescription:
    """The layers of a group share one block: ``layer`` is the number of the group."""
    entries.must_be("inner_group_num", 1).must_be("position_embedding_type", "absolute")
    return _plain(entries, heads=64)


def _longformer(entries: Entries) -> AttentionDescription:
    """A window, and global tokens with projections of their own, which each request names by ``global_mask``."""
    window = entries.get("attention_window", default=512)
    if isinstance(window, list):
        window = entries.of_layer("attention_window")
    if not isinstance(window, int) or window < 2:
        raise entries.unsupported("attention_window", "expected an even number, or one a layer")
    side = window // 2
    tokens = GlobalTokens(positions=[], projections="separate")
    masks = [AnyOf(of=[SlidingWindow(left=side, right=side), tokens])]
    return AttentionDescription(AttentionSpec(masks=masks), entries.count("num_attention_heads", default=12))


def _modernbert(entries: Entries) -> AttentionDescription:
    period = entries.count("global_attn_every_n_layers", default=3)
    sliding = slides(entries, lambda layer: layer % period != 0)
    if entries.get("rope_scaling") is not None:
        raise entries.unsupported("rope_scaling", "expected rope_parameters by type of layer")
    rotation = with_rotation_of(
        entries,
        sliding=sliding,
        local=entries.number("local_rope_theta", default=10_000.0),
        full=entries.number("global_rope_theta", default=160_000.0),
    )
    heads = entries.count("num_attention_heads", default=12)
    width = entries.count("hidden_size", default=768) // heads
    side = entries.count("local_attention", default=128) // 2
    masks = [SlidingWindow(left=side, right=side)] if sliding else []
    return AttentionDescription(
        AttentionSpec(position=rope_of(rotation, width), masks=masks), heads, kv_heads=heads, head_dim=width
    )


def _seq2seq(entries: Entries, heads: int = 16) -> AttentionDescription:
    """An encoder without masks, and a decoder with a causal mask and cross-attention."""
    masks = [Causal()] if entries.stack == "decoder" and entries.part == "self" else []
    alias = ("num_attention_heads",) if entries.stack == "encoder" else ()
    return AttentionDescription(
        AttentionSpec(masks=masks), entries.count(f"{entries.stack}_attention_heads", *alias, default=heads)
    )


_STACKS: Final[tuple[Stack, ...]] = ("encoder", "decoder")
_SEQ2SEQ: Final = (
    *(BlockNames(f"{stack}.layers.{{layer}}.self_attn.", _OUT, stack=stack) for stack in _STACKS),
    BlockNames("decoder.layers.{layer}.encoder_attn.", _OUT, part="cross", stack="decoder"),
)

FAMILIES: Final = (
    Family("distilbert", frozenset({"distilbert"}), (BlockNames("layer.{layer}.attention.", _DISTILBERT),), _plain),
    Family(
        "albert",
        frozenset({"albert"}),
        (BlockNames("albert_layer_groups.{layer}.albert_layers.0.attention.", _ALBERT),),
        _albert,
    ),
    Family(
        "longformer",
        frozenset({"longformer"}),
        (BlockNames("encoder.layer.{layer}.attention.", _LONGFORMER),),
        _longformer,
    ),
    Family(
        "modernbert",
        frozenset({"modernbert"}),
        (BlockNames("layers.{layer}.attn.", fused("Wqkv", "Wo", thirds)),),
        _modernbert,
    ),
    Family(
        "vit",
        frozenset({"vit"}),
        (BlockNames("encoder.layer.{layer}.attention.", _VIT), BlockNames("layers.{layer}.attention.", _NEW_VIT)),
        _plain,
    ),
    Family("clip-text", frozenset({"clip_text_model"}), _CLIP, partial(_plain, heads=8, causal=True)),
    Family("clip-vision", frozenset({"clip_vision_model"}), _CLIP, _plain),
    Family("siglip", frozenset({"siglip_text_model", "siglip_vision_model"}), _CLIP, _plain),
    Family(
        "wav2vec2", frozenset({"wav2vec2", "hubert"}), (BlockNames("encoder.layers.{layer}.attention.", _OUT),), _plain
    ),
    Family("bart", frozenset({"bart", "mbart", "marian", "pegasus", "m2m_100"}), _SEQ2SEQ, _seq2seq),
    Family("whisper", frozenset({"whisper"}), _SEQ2SEQ, partial(_seq2seq, heads=6)),
)
