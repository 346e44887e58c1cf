"""The config of each architecture of GGUF that a model can have, from its entries and from what llama.cpp implies.

Each function reads every entry on which its numbers depend, or refuses it; an entry that a format leaves to its reader
has llama.cpp's value, never the default of a class of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from attention_service.modules.checkpoints.forms.gguf.entries import GgufEntries, UnreadableGguf
from attention_service.modules.checkpoints.forms.gguf.gemma_families import gemma2, gemma3, gemma4
from attention_service.modules.checkpoints.forms.gguf.rotations import Factors, rope_parameters, whole_heads
from attention_service.modules.checkpoints.forms.gguf.sizes import (
    LAYER_NORM,
    RMS_NORM,
    attention_sizes,
    biased_attention,
    count_of_experts,
    head_size,
    layer_types,
    longest,
    sizes,
    tied,
    vocabulary,
)

Build = Callable[[GgufEntries, Factors], dict[str, Any]]


@dataclass(frozen=True)
class GgufFamily:
    """An architecture of GGUF as transformers computes it."""

    build: Build
    """The entries of its config, with ``model_type`` and ``architectures``. Raises UnreadableGguf."""
    converted_by_transformers: bool = False
    """True if transformers' newer reader makes its config and its tensors."""


def _llama(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    if entries.number("expert_count", 0):
        return _mixtral(entries, factors)
    window = entries.number("attention.sliding_window", 0)
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    whole_heads(entries, common["head_dim"])
    if not window:
        return common | {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": biased_attention(entries),
            "mlp_bias": entries.has("ffn_up.bias") or entries.has("ffn_down.bias"),
        }  # fmt: skip
    if biased_attention(entries) or entries.has("ffn_up.bias"):
        raise UnreadableGguf("it has a window and biases, which no class of transformers has together")
    return common | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}


def _mixtral(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    if entries.has("ffn_up_shexp.weight"):
        raise UnreadableGguf("it has experts that all tokens share, which Mixtral of transformers has not")
    if entries.has("attn_q.bias"):
        raise UnreadableGguf("it has experts and biases of its attention, which no class of transformers has together")
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    whole_heads(entries, common["head_dim"])
    entries.skip("expert_feed_forward_length")
    return common | count_of_experts(entries, "num_local_experts") | {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
        "intermediate_size": entries.rows("blk.0.ffn_down_exps.weight", 2),
        "sliding_window": entries.number("attention.sliding_window", None) or None,
    }  # fmt: skip


def _qwen2(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    entries.shape("blk.0.attn_q.bias")  # which the class always has
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    return common | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    return common | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": biased_attention(entries),
        "use_sliding_window": False,
    }  # fmt: skip


def _expert_layers(entries: GgufEntries) -> dict[str, Any]:
    """Experts in every layer, whose weights llama.cpp finds by their tensors."""
    entries.skip("expert_feed_forward_length", "feed_forward_length")
    return count_of_experts(entries, "num_experts") | {
        "moe_intermediate_size": entries.rows("blk.0.ffn_down_exps.weight", 2), "decoder_sparse_step": 1,
        "mlp_only_layers": [], "use_sliding_window": False,
    }  # fmt: skip


def _qwen2moe(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    entries.skip("expert_shared_feed_forward_length")
    return common | _expert_layers(entries) | {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": False,
        "qkv_bias": entries.has("attn_q.bias"),
        "shared_expert_intermediate_size": entries.rows("blk.0.ffn_up_shexp.weight"),
    }  # fmt: skip


def _qwen3moe(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    return common | _expert_layers(entries) | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True,
        "attention_bias": biased_attention(entries),
    }  # fmt: skip


def _gpt_oss(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors)
    # Published models of this class end the blend of yarn between dimensions. llama.cpp ends it at whole ones.
    rope = common["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    entries.skip("expert_feed_forward_length", "feed_forward_length")
    return common | count_of_experts(entries, "num_local_experts") | {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "tie_word_embeddings": False,
        "intermediate_size": entries.rows("blk.0.ffn_down_exps.weight", 2), "rope_parameters": rope,
        "sliding_window": entries.count("attention.sliding_window"),
        "layer_types": layer_types(entries, common["num_hidden_layers"], 2),
    }  # fmt: skip


def _minimax_m2(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    gating = entries.number("expert_gating_func", 2)
    if gating not in {1, 2}:
        raise UnreadableGguf(f"its expert_gating_func is {gating}; expected 1 (softmax) or 2 (sigmoid)")
    entries.skip("expert_feed_forward_length", "feed_forward_length")
    return common | count_of_experts(entries, "num_local_experts") | {
        "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"],
        "intermediate_size": entries.rows("blk.0.ffn_down_exps.weight", 2),
        "scoring_func": "softmax" if gating == 1 else "sigmoid", "use_routing_bias": entries.has("exp_probs_b.bias"),
        "rotary_dim": entries.count("rope.dimension_count", common["head_dim"]),
    }  # fmt: skip


def _falcon(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    common = sizes(entries, {"attention.layer_norm_epsilon": "layer_norm_epsilon"}) | vocabulary(entries)
    width = head_size(entries)
    whole_heads(entries, width)
    layout = entries.text("tensor_data_layout", "jploski")
    if layout != "jploski":
        raise UnreadableGguf(f"its tensor_data_layout is {str(layout)[:80]!r}; expected 'jploski'")
    heads = entries.count("attention.head_count_kv", common["num_attention_heads"])
    several = heads > 1
    return common | tied(entries) | {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "alibi": False, "bias": False,
        "parallel_attn": True, "multi_query": not several, "new_decoder_architecture": several, "num_kv_heads": heads,
        "num_ln_in_parallel_attn": 2 if entries.has("attn_norm_2.weight") else 1,
        "ffn_hidden_size": entries.count("feed_forward_length"),
        "rope_parameters": rope_parameters(entries, width, longest(entries), factors),
    }  # fmt: skip


def _phi3(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    if entries.number("expert_count", 0):
        raise UnreadableGguf("it has experts, which Phi3 of transformers has not")
    common = sizes(entries, RMS_NORM) | attention_sizes(entries, factors) | tied(entries)
    del common["head_dim"]
    return common | {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"],
        # llama.cpp reads this window and leaves it out, as it says itself; the model has it.
        "sliding_window": entries.number("attention.sliding_window", None) or None,
        "original_max_position_embeddings": entries.count(
            "rope.scaling.original_context_length", common["max_position_embeddings"]
        ),
    }  # fmt: skip


def _stablelm(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    entries.skip("use_parallel_residual")  # llama.cpp goes by the tensors
    common = sizes(entries, LAYER_NORM) | attention_sizes(entries, factors) | tied(entries)
    return common | {
        "model_type": "stablelm", "architectures": ["StableLmForCausalLM"],
        "use_qkv_bias": entries.has("attn_q.bias"), "qk_layernorm": entries.has("attn_q_norm.weight"),
        "use_parallel_residual": not entries.has("ffn_norm.weight"),
    }  # fmt: skip


def _starcoder2(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    norm = {"attention.layer_norm_epsilon": "norm_epsilon"}
    common = sizes(entries, norm) | attention_sizes(entries, factors) | tied(entries)
    return common | {
        "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "use_bias": entries.has("attn_q.bias"),
        "sliding_window": entries.number("attention.sliding_window", None) or None,
    }  # fmt: skip


def _nemotron(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    entries.skip("attention.layer_norm_rms_epsilon")
    common = sizes(entries, {"attention.layer_norm_epsilon": "norm_eps"}) | attention_sizes(entries, factors)
    rope = {"partial_rotary_factor": 1.0} | common["rope_parameters"]
    return common | tied(entries) | {
        "model_type": "nemotron", "architectures": ["NemotronForCausalLM"], "rope_parameters": rope,
        "partial_rotary_factor": rope["partial_rotary_factor"], "attention_bias": biased_attention(entries),
        "mlp_bias": entries.has("ffn_up.bias"),
    }  # fmt: skip


def _gpt2(entries: GgufEntries, _: Factors) -> dict[str, Any]:
    return vocabulary(entries) | tied(entries) | {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": entries.layers(),
        "n_head": entries.count("attention.head_count"), "n_embd": entries.count("embedding_length"),
        "n_inner": entries.count("feed_forward_length"), "n_positions": entries.rows("position_embd.weight"),
        "layer_norm_epsilon": entries.number("attention.layer_norm_epsilon"), **_skipped(entries, "context_length"),
    }  # fmt: skip


def _bloom(entries: GgufEntries, _: Factors) -> dict[str, Any]:
    width, inner = entries.count("embedding_length"), entries.count("feed_forward_length", None)
    if inner not in {None, 4 * width}:
        raise UnreadableGguf(f"its feed_forward_length is {inner}; BLOOM has 4 times its width, {4 * width}")
    return vocabulary(entries) | tied(entries) | {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": entries.layers(),
        "n_head": entries.count("attention.head_count"), "hidden_size": width,
        "layer_norm_epsilon": entries.number("attention.layer_norm_epsilon"),
        **_skipped(entries, "context_length", "attention.head_count_kv"),
    }  # fmt: skip


def _mamba(entries: GgufEntries, _: Factors) -> dict[str, Any]:
    width, inner = entries.count("embedding_length"), entries.count("ssm.inner_size")
    if inner % width:
        raise UnreadableGguf(f"its ssm.inner_size {inner} is no multiple of its embedding_length {width}")
    normed = entries.flag("ssm.dt_b_c_rms")
    kind, name = ("falcon_mamba", "FalconMamba") if normed else ("mamba", "Mamba")
    return vocabulary(entries) | tied(entries) | {
        "model_type": kind, "architectures": [f"{name}ForCausalLM"], "hidden_size": width, "expand": inner // width,
        "num_hidden_layers": entries.layers(), "state_size": entries.count("ssm.state_size"),
        "conv_kernel": entries.count("ssm.conv_kernel"), "time_step_rank": entries.count("ssm.time_step_rank"),
        "layer_norm_epsilon": entries.number("attention.layer_norm_rms_epsilon"),
        "use_bias": entries.has("ssm_in.bias"), "use_conv_bias": entries.has("ssm_conv1d.bias"),
        **_skipped(entries, "context_length", "feed_forward_length", "attention.head_count"),
    }  # fmt: skip


def _t5(entries: GgufEntries, _: Factors) -> dict[str, Any]:
    layers = entries.layers()
    # A bias of distances in every layer, not in the first alone, makes it UMT5.
    several = "enc.blk.1.attn_rel_b.weight" in entries.tensors
    kind, name = ("umt5", "UMT5") if several else ("t5", "T5")
    separate = "output.weight" in entries.tensors
    entries.skip("attention.layer_norm_epsilon", "attention.head_count_kv", "attention.value_length")
    given = vocabulary(entries)
    pad = given["pad_token_id"] or 0
    return given | {
        "model_type": kind, "architectures": [f"{name}ForConditionalGeneration"], "is_encoder_decoder": True,
        "d_model": entries.count("embedding_length"), "d_ff": entries.count("feed_forward_length"),
        "d_kv": head_size(entries), "num_heads": entries.count("attention.head_count"), "num_layers": layers,
        "num_decoder_layers": entries.layers("decoder_block_count", layers), "pad_token_id": pad,
        "relative_attention_num_buckets": entries.count("attention.relative_buckets_count"),
        "layer_norm_epsilon": entries.number("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if "enc.blk.0.ffn_gate.weight" in entries.tensors else "relu",
        "decoder_start_token_id": entries.number("decoder_start_token_id", pad),
        # T5 1.0, whose output is the embedding, divides the last states by the root of their width.
        "tie_word_embeddings": not separate, "n_positions": entries.count("context_length", 512),
    }  # fmt: skip


def _skipped(entries: GgufEntries, *names: str) -> dict[str, Any]:
    entries.skip(*names)
    return {}


def _without_class(reason: str) -> Build:
    def build(entries: GgufEntries, _: Factors) -> dict[str, Any]:
        raise UnreadableGguf(reason)

    return build


_QWEN35_READ: Final = (
    "context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "full_attention_interval",
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", "rope.freq_base",
    "rope.dimension_sections", "rope.dimension_count", "nextn_predict_layers",
)  # fmt: skip


def _newer(kind: str, name: str, *read: str) -> Build:
    """An architecture whose config transformers' newer reader makes; what that leaves out is refused here."""

    def build(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
        entries.skip(*read)
        if factors or entries.text("rope.scaling.type", "none") != "none":
            raise UnreadableGguf(f"it scales rotations, which transformers does not read for {name}")
        if entries.number("attention.sliding_window", 0):
            raise UnreadableGguf(f"its attention.sliding_window is set, and {name} of transformers has no window")
        key = entries.number("attention.key_length", None)
        if entries.number("attention.value_length", key) != key:
            raise UnreadableGguf("its values are of another width than its keys")
        recurrent = entries.take("attention.recurrent_layers", None)
        interval = entries.count("full_attention_interval", 4)
        if isinstance(recurrent, list) and kind.startswith("qwen3_5"):
            layers = entries.layers() - entries.count("nextn_predict_layers", 0, least=0)
            if [bool(flag) for flag in recurrent[:layers]] != [(1 + i) % interval != 0 for i in range(layers)]:
                raise UnreadableGguf("its recurrent_layers are others than full_attention_interval says")
        for required in ("attention.head_count", "embedding_length"):
            entries.count(required)
        entries.number("rope.freq_base")
        entries.layers()
        if "tokenizer.ggml.tokens" not in entries.header.metadata:
            raise UnreadableGguf("it has no tokenizer, from which transformers counts its tokens")
        return {"model_type": kind, "architectures": [name]}

    return build


_LFM2_READ: Final = (
    "context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "shortconv.l_cache", "rope.freq_base", "vocab_size",
    "rope.dimension_count",
)  # fmt: skip
_MOE_READ: Final = (
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
)  # fmt: skip

FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": GgufFamily(_llama),
    "qwen2": GgufFamily(_qwen2),
    "qwen2moe": GgufFamily(_qwen2moe),
    "qwen3": GgufFamily(_qwen3),
    "qwen3moe": GgufFamily(_qwen3moe),
    "gpt-oss": GgufFamily(_gpt_oss),
    "minimax-m2": GgufFamily(_minimax_m2),
    "gemma2": GgufFamily(gemma2),
    "gemma3": GgufFamily(gemma3),
    "gemma4": GgufFamily(gemma4),
    "phi3": GgufFamily(_phi3),
    "falcon": GgufFamily(_falcon),
    "bloom": GgufFamily(_bloom),
    "gpt2": GgufFamily(_gpt2),
    "stablelm": GgufFamily(_stablelm),
    "starcoder2": GgufFamily(_starcoder2),
    "nemotron": GgufFamily(_nemotron),
    "mamba": GgufFamily(_mamba),
    "t5": GgufFamily(_t5),
    "t5encoder": GgufFamily(
        _without_class("it is the encoder of a T5 alone, and the class T5Model of transformers has a decoder too")
    ),
    "deci": GgufFamily(
        _without_class("transformers has no class whose layers differ as those of Deci do (heads, and layers without)")
    ),
    "lfm2": GgufFamily(_newer("lfm2", "Lfm2ForCausalLM", *_LFM2_READ), converted_by_transformers=True),
    "qwen35": GgufFamily(_newer("qwen3_5_text", "Qwen3_5ForCausalLM", *_QWEN35_READ), converted_by_transformers=True),
    "qwen35moe": GgufFamily(
        _newer("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", *_QWEN35_READ, *_MOE_READ), converted_by_transformers=True
    ),
}
"""The families, by the name that a file gives as ``general.architecture``."""
