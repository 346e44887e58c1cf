"""GPT-Neo, GPT-J and GPT-NeoX of EleutherAI, and OPT. Names of the models of ``transformers``."""

from typing import Any, Final

from attention_contract.positions import Rope
from attention_contract.spec import AttentionSpec, Causal, Dot
from attention_service.modules.checkpoints.cuts import by_group
from attention_service.modules.checkpoints.families.llama import masks
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    BlockNames,
    Entries,
    Family,
    fused,
    linear,
)
from attention_service.modules.checkpoints.rope_entries import rope_of

_NAMES: Final = linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")


def _gpt_neo(entries: Entries) -> AttentionDescription:
    """Layers are global or see a window, and scores have no scale."""
    kind = entries.of_layer("attention_layers")
    if kind is None:
        kind = _repeated(entries.get("attention_types", default=[[["global", "local"], 12]]), entries.layer)
        if kind is None:
            raise entries.unsupported("attention_types", "expected [[[kinds], times], …] with all layers")
    if kind not in ("global", "local"):
        raise entries.unsupported("attention_layers", "expected global or local")
    window = entries.count("window_size", default=256) if kind == "local" else None
    heads = entries.count("num_heads", "num_attention_heads", default=16)
    return AttentionDescription(AttentionSpec(score=Dot(), masks=masks(window)), heads)


def _repeated(groups: Any, layer: int) -> Any:
    """The kind of a layer by groups of kinds, each repeated some times; None if they have none for it."""
    for group in groups if isinstance(groups, list) else ():
        kinds, times = group if isinstance(group, list) and len(group) == 2 else (None, None)
        if not isinstance(kinds, list) or type(times) is not int:
            return None
        if layer < len(kinds) * times:
            return kinds[layer % len(kinds)]
        layer -= len(kinds) * max(times, 0)
    return None


def _gptj(entries: Entries) -> AttentionDescription:
    heads = entries.count("n_head", "num_attention_heads", default=16)
    width = entries.count("n_embd", "hidden_size", default=4096) // heads
    dim = entries.optional_count("rotary_dim", 64)
    if dim is None:
        raise entries.unsupported("rotary_dim", "expected a number of dimensions")
    rope = Rope(dim=None if dim == width else dim, style="interleaved")
    return AttentionDescription(AttentionSpec(position=rope, masks=[Causal()]), heads, head_dim=width)


def _gpt_neox(entries: Entries) -> AttentionDescription:
    heads = entries.count("num_attention_heads", default=64)
    width = entries.count("hidden_size", default=6144) // heads
    rope = rope_of(entries, width, partial=0.25)
    return AttentionDescription(AttentionSpec(position=rope, masks=[Causal()]), heads, kv_heads=heads, head_dim=width)


def _opt(entries: Entries) -> AttentionDescription:
    return AttentionDescription(AttentionSpec(masks=[Causal()]), entries.count("num_attention_heads", default=12))


FAMILIES: Final = (
    Family(
        "gpt-neo",
        frozenset({"gpt_neo"}),
        (BlockNames("h.{layer}.attn.attention.", _NAMES),),
        _gpt_neo,
        own_causal_mask=True,
    ),
    Family("gpt-j", frozenset({"gptj"}), (BlockNames("h.{layer}.attn.", _NAMES),), _gptj),
    Family(
        "gpt-neox",
        frozenset({"gpt_neox"}),
        (BlockNames("layers.{layer}.attention.", fused("query_key_value", "dense", by_group)),),
        _gpt_neox,
    ),
    Family("opt", frozenset({"opt"}), (BlockNames("layers.{layer}.self_attn.", _NAMES),), _opt),
)
