"""Gemma 2, 3 and 4 as GGUF files: scales, windows and rotations by their sizes, as llama.cpp has them."""

from typing import Any, Final

from attention_service.modules.checkpoints.forms.gguf.entries import GgufEntries, UnreadableGguf
from attention_service.modules.checkpoints.forms.gguf.rotations import (
    Factors,
    base_with_window,
    rope_parameters,
    scaling,
)
from attention_service.modules.checkpoints.forms.gguf.sizes import (
    RMS_NORM,
    attention_sizes,
    layer_types,
    sizes,
    vocabulary,
)

_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}
"""Layers by which llama.cpp knows the largest of a family, whose scale is not the one of its heads."""


def gemma2(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    """The config of Gemma 2."""
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors)
    _same_bases(entries, common["rope_parameters"]["rope_theta"])
    return common | _scale(entries, common) | {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "tie_word_embeddings": True,
        "sliding_window": entries.count("attention.sliding_window", 4096),
        "layer_types": layer_types(entries, common["num_hidden_layers"], 2),
        "attn_logit_softcapping": entries.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": entries.number("final_logit_softcapping", 30.0),
    }  # fmt: skip


def gemma3(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    """The config of Gemma 3. Rotations of layers with a window have a base of their own, and no scaling."""
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors)
    window = entries.number("attention.sliding_window", 0)
    whole = common["rope_parameters"]
    if window:
        kinds = layer_types(entries, common["num_hidden_layers"], 6)
        if whole["rope_type"] not in {"default", "linear"}:
            raise UnreadableGguf(f"its rotations are scaled as {whole['rope_type']} beside layers with a window")
    else:
        entries.skip("attention.sliding_window_pattern")
        kinds = ["full_attention"] * common["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": base_with_window(entries)}
    return common | _scale(entries, common) | {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": "output.weight" not in entries.tensors, "sliding_window": window or None,
        "layer_types": kinds, "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": entries.number("final_logit_softcapping", 0.0) or None,
    }  # fmt: skip


def gemma4(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    """The config of Gemma 4, whose layers without a window have other heads and turn a part of their numbers."""
    if entries.number("expert_count", 0):
        raise UnreadableGguf("it is a Gemma 4 with experts, whose tensors transformers does not read from GGUF files")
    common = sizes(entries, RMS_NORM) | vocabulary(entries)
    layers, width = common["num_hidden_layers"], entries.count("attention.key_length")
    kinds = layer_types(entries, layers, 6)
    full = [place for place, kind in enumerate(kinds) if kind == "full_attention"]
    if not full or full[-1] != layers - 1:
        raise UnreadableGguf("its last layer has a window, which transformers' class does not allow")
    local = entries.count("attention.key_length_swa", width)
    entries.skip("attention.value_length", "attention.value_length_swa")
    heads = _by_kind(entries, "attention.head_count_kv", kinds)
    values = {place for place in full if f"blk.{place}.attn_v.weight" in entries.tensors}
    alike = any(f"blk.{place}.attn_k.weight" in entries.tensors and place not in values for place in full)
    shared = entries.count("attention.shared_kv_layers", 0, least=0)
    inner = entries.by_layer("feed_forward_length", layers)
    first = inner[0]
    wide = inner[-1] != first
    if wide and inner != [first * (2 if place >= layers - shared else 1) for place in range(layers)]:
        raise UnreadableGguf("the widths of its MLPs differ otherwise than those of Gemma 4")
    per_layer = entries.count("embedding_length_per_layer_input", 0, least=0)
    return common | {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"],
        "tie_word_embeddings": "output.weight" not in entries.tensors, "intermediate_size": first,
        "use_double_wide_mlp": wide, "head_dim": local, "global_head_dim": width,
        "num_key_value_heads": heads["sliding_attention"], "num_global_key_value_heads": heads["full_attention"],
        "attention_k_eq_v": alike or heads["sliding_attention"] != heads["full_attention"],
        "sliding_window": entries.count("attention.sliding_window"), "layer_types": kinds,
        "num_kv_shared_layers": shared, "hidden_size_per_layer_input": per_layer,
        "final_logit_softcapping": entries.number("final_logit_softcapping", 30.0) or None,
        "rope_parameters": _rotations_of_gemma4(entries, common, local, width, factors),
        **({"vocab_size_per_layer_input": entries.rows("per_layer_token_embd.weight")} if per_layer else {}),
    }  # fmt: skip


def _rotations_of_gemma4(
    entries: GgufEntries, common: dict[str, Any], local: int, width: int, factors: Factors
) -> dict[str, Any]:
    """Rotations of both kinds of layers. Factors of 1e30 stand for numbers that are not turned."""
    whole = rope_parameters(entries, width, common["max_position_embeddings"], {})
    if scaling(entries, common["max_position_embeddings"], {}) or "partial_rotary_factor" in whole:
        raise UnreadableGguf("it scales rotations otherwise than Gemma 4 of transformers can")
    turned = factors.get("rope_freqs.weight", [])
    if set(turned) - {1.0} and min(set(turned) - {1.0}) < 1e29:
        raise UnreadableGguf("its rope_freqs are other numbers than 1 and 1e30")
    share = 1.0 if not turned else sum(factor == 1.0 for factor in turned) / len(turned)
    if (own := entries.count("rope.dimension_count_swa", local)) != local:
        raise UnreadableGguf(f"its rope.dimension_count_swa is {own}, and its heads with a window have {local}")
    base = base_with_window(entries)
    return {
        "full_attention": whole | {"rope_type": "proportional", "partial_rotary_factor": share},
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }


def _by_kind(entries: GgufEntries, name: str, kinds: list[str]) -> dict[str, Any]:
    """A number by the kind of layer, from one number or an array with one a layer."""
    numbers = entries.by_layer(name, len(kinds))
    by_kind: dict[str, Any] = {}
    for number, kind in zip(numbers, kinds, strict=True):
        if by_kind.setdefault(kind, number) != number:
            raise UnreadableGguf(f"its {name} differs between layers of one kind")
    return {"sliding_attention": numbers[0], **by_kind}


def _scale(entries: GgufEntries, common: dict[str, Any]) -> dict[str, Any]:
    """The number by whose root scores are divided: of the largest model the width by the heads, of others the head's.

    Source: https://github.com/google/gemma_pytorch/blob/014acb7ac4563a5f77c76d7ff98f31b568c16508/gemma/config.py#L173
    """
    largest = common["num_hidden_layers"] == _LAYERS_OF_27B[entries.header.architecture]
    by_width = common["hidden_size"] // common["num_attention_heads"]
    return {"query_pre_attn_scalar": by_width if largest else common["head_dim"]}


def _same_bases(entries: GgufEntries, base: float) -> None:
    if (own := base_with_window(entries, base)) != base:
        raise UnreadableGguf(f"its rope.freq_base_swa is {own}, and Gemma 2 of transformers has one base, {base}")
