"""Small models of every architecture of GGUF that is read, and their files as llama.cpp's converter writes them.

Entries and changes of tensors are those of the folder ``conversion`` of llama.cpp 0.5.0.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

TOKENS = 40
LENGTH = 48
_COMMON = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MAIN = {
    "block_count": 3, "context_length": LENGTH, "embedding_length": 32, "feed_forward_length": 48,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip
_RMS = {"attention.layer_norm_rms_epsilon": 1e-3}
_NORM = {"attention.layer_norm_epsilon": 1e-3}
_BASE = {"rope.freq_base": 500.0}


@dataclass(frozen=True)
class Family:
    """A model of transformers, and the entries of its file."""

    architecture: str
    name: str
    """Of its class, up to its head."""
    config: Mapping[str, Any]
    entries: Mapping[str, Any]
    head: str = "ForCausalLM"
    layers: int = 3
    alone: bool = False
    """True if its config has other names than the common ones."""
    tensors: Mapping[str, Any] = field(default_factory=dict)

    def model(self, **changes: Any) -> Any:
        """The model, whose vectors are random too, so that each says something."""
        config = getattr(transformers, f"{self.name}Config")(
            **(({} if self.alone else _COMMON) | self.config | changes)
        )
        torch.manual_seed(0)
        kind = getattr(transformers, self.name.removesuffix("Text") + self.head)
        model = kind._from_config(config, attn_implementation="eager").eval()
        if (
            self.config.get("tie_word_embeddings") is False and model.config.tie_word_embeddings
        ):  # as T5's config forces
            model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))
            model.config.tie_word_embeddings = False
        with torch.no_grad():
            for name, values in [*model.named_parameters(), *model.named_buffers()]:
                odd = name.endswith("correction_bias") or (values.ndim == 1 and values.is_floating_point())
                if odd and not name.endswith(("inv_freq", "A_log", "dt_bias")) and "dt_proj" not in name:
                    values.add_(0.2 * torch.randn(values.shape))
        return model


def rope(theta: float = 500.0, **entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | entries}


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_OF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
_LINEAR = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    **rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
}  # fmt: skip
_OF_LINEAR = _MAIN | _BASE | {
    "block_count": 4, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 16, "attention.value_length": 16,
    "full_attention_interval": 4, "ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 32, "rope.dimension_sections": [2, 1, 1, 0], "rope.dimension_count": 8,
}  # fmt: skip
_T5 = {
    "vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16, "layer_norm_epsilon": 1e-3, "decoder_start_token_id": 3, "pad_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
_OF_T5 = _RMS | {
    "context_length": LENGTH, "embedding_length": 32, "feed_forward_length": 48, "block_count": 3,
    "decoder_block_count": 2, "attention.head_count": 4, "attention.key_length": 8, "attention.value_length": 8,
    "attention.layer_norm_epsilon": 1e-3, "attention.relative_buckets_count": 16, "decoder_start_token_id": 3,
}  # fmt: skip
_WIDE = {"attention.key_length": 16, "attention.value_length": 16}
_GEMMA4 = ["sliding_attention", "full_attention"] * 3
FAMILIES = {
    "llama": Family("llama", "Llama", {"rms_norm_eps": 1e-3, **rope()}, _MAIN | _RMS | _BASE | {
        "rope.dimension_count": 8}),
    "llama-biases": Family(
        "llama", "Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3, "head_dim": 16, **rope()},
        _MAIN | _RMS | _BASE | _WIDE | {"rope.dimension_count": 16},
    ),
    "mistral": Family("llama", "Mistral", {"sliding_window": 3, "rms_norm_eps": 1e-3, **rope()},
                      _MAIN | _RMS | _BASE | {"attention.sliding_window": 3}),
    "mixtral": Family(
        "llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-3, **rope()},
        _MAIN | _RMS | _BASE | {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2": Family("qwen2", "Qwen2", {"rms_norm_eps": 1e-3, **rope()}, _MAIN | _RMS | _BASE),
    "qwen2-yarn": Family(
        "qwen2", "Qwen2",
        {"rms_norm_eps": 1e-3, **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=12)},
        _MAIN | _RMS | _BASE | {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                "rope.scaling.original_context_length": 12},
    ),
    "qwen2moe": Family(
        "qwen2moe", "Qwen2Moe", _EXPERTS | {"rms_norm_eps": 1e-3, "shared_expert_intermediate_size": 24, **rope()},
        _MAIN | _RMS | _BASE | _OF_EXPERTS | {"expert_shared_feed_forward_length": 24},
    ),
    "qwen3": Family("qwen3", "Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-3, **rope()}, _MAIN | _RMS | _BASE | _WIDE),
    "qwen3moe": Family(
        "qwen3moe", "Qwen3Moe", _EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "rms_norm_eps": 1e-3, **rope()},
        _MAIN | _RMS | _BASE | _WIDE | _OF_EXPERTS,
    ),
    "gpt-oss": Family(
        "gpt-oss", "GptOss",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3, "rms_norm_eps": 1e-3,
         **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=12, beta_fast=32.0, beta_slow=1.0,
                truncate=False)},
        _MAIN | _RMS | _BASE | _WIDE | {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention.sliding_window": 3,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 12,
        },
    ),
    "minimax-m2": Family(
        "minimax-m2", "MiniMaxM2",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid", "rotary_dim": 8,
         "use_routing_bias": True, "rms_norm_eps": 1e-3, **rope(partial_rotary_factor=0.5)},
        _MAIN | _RMS | _BASE | _WIDE | {
            "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48, "expert_gating_func": 2,
            "rope.dimension_count": 8,
        },
    ),
    "gemma2": Family(
        "gemma2", "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0, "rms_norm_eps": 1e-3, **rope(10000.0)},
        _MAIN | _RMS | _WIDE | {"attention.sliding_window": 3, "attn_logit_softcapping": 5.0,
                                "final_logit_softcapping": 3.0},
    ),
    "gemma2-27b": Family(
        "gemma2", "Gemma2",
        {"num_hidden_layers": 46, "head_dim": 16, "query_pre_attn_scalar": 8, "sliding_window": 3, "rms_norm_eps": 1e-3,
         "intermediate_size": 16, **rope(10000.0)},
        _MAIN | _RMS | _WIDE | {"block_count": 46, "attention.sliding_window": 3, "feed_forward_length": 16},
        layers=46,
    ),
    "gemma3": Family(
        "gemma3", "Gemma3Text",
        {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3, "rms_norm_eps": 1e-3,
         "final_logit_softcapping": None,
         "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
         }},
        _MAIN | _RMS | _WIDE | {
            "block_count": 7, "attention.sliding_window": 3, "rope.freq_base": 1000.0, "rope.freq_base_swa": 100.0,
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
        layers=7,
    ),
    "gemma3-27b": Family(
        "gemma3", "Gemma3Text",
        {"num_hidden_layers": 62, "head_dim": 16, "query_pre_attn_scalar": 8, "sliding_window": 3, "rms_norm_eps": 1e-3,
         "intermediate_size": 16},
        _MAIN | _RMS | _WIDE | {
            "block_count": 62, "attention.sliding_window": 3, "feed_forward_length": 16, "rope.freq_base": 1e6,
        },
        layers=62,
    ),
    "gemma4": Family(
        "gemma4", "Gemma4Text",
        {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 3, "num_kv_shared_layers": 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": TOKENS, "final_logit_softcapping": 3.0,
         "rms_norm_eps": 1e-3, "layer_types": _GEMMA4},
        _MAIN | _RMS | _WIDE | {
            "block_count": 6, "attention.sliding_window": 3, "attention.shared_kv_layers": 2,
            "embedding_length_per_layer_input": 8, "final_logit_softcapping": 3.0, "attention.key_length_swa": 8,
            "attention.value_length_swa": 8, "rope.dimension_count": 16, "rope.dimension_count_swa": 8,
            "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in _GEMMA4],
        },
        layers=6, tensors={"rope_freqs.weight": [1.0, 1.0, *[1e30] * 6]},
    ),
    "gemma4-global-heads": Family(
        "gemma4", "Gemma4Text",
        {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 3, "num_kv_shared_layers": 0,
         "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
         "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-3, "layer_types": _GEMMA4},
        _MAIN | _RMS | _WIDE | {
            "block_count": 6, "attention.sliding_window": 3, "attention.shared_kv_layers": 0,
            "attention.head_count_kv": [2, 1] * 3, "embedding_length_per_layer_input": 0, "attention.key_length_swa": 8,
            "attention.value_length_swa": 8, "rope.dimension_count": 16, "rope.dimension_count_swa": 8,
            "rope.freq_base": 1e6,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in _GEMMA4],
        },
        layers=6, tensors={"rope_freqs.weight": [1.0, 1.0, *[1e30] * 6]},
    ),
    "phi3": Family(
        "phi3", "Phi3",
        {"rms_norm_eps": 1e-3, "sliding_window": 3, "original_max_position_embeddings": LENGTH,
         **rope(partial_rotary_factor=0.5)},
        _MAIN | _RMS | _BASE | {"rope.dimension_count": 4, "attention.sliding_window": 3,
                                "rope.scaling.original_context_length": LENGTH},
    ),
    "phi3-long": Family(
        "phi3", "Phi3",
        {"rms_norm_eps": 1e-3, "sliding_window": None, "original_max_position_embeddings": 8,
         **rope(rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 3.5],
                attention_factor=1.25, original_max_position_embeddings=8)},
        _MAIN | _RMS | _BASE | {
            "rope.dimension_count": 8, "attention.sliding_window": 0, "rope.scaling.original_context_length": 8,
            "rope.scaling.attn_factor": 1.25,
        },
        tensors={"rope_factors_long.weight": [2.0, 2.5, 3.0, 3.5], "rope_factors_short.weight": [1.0, 1.1, 1.2, 1.3]},
    ),
    "falcon-7b": Family(
        "falcon", "Falcon", {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                             "initializer_range": 0.2, "layer_norm_epsilon": 1e-3},
        {name: value for name, value in _MAIN.items() if "feed" not in name} | _NORM | {
            "attention.head_count_kv": 1, "feed_forward_length": 128, "tensor_data_layout": "jploski",
        },
        alone=True,
    ),
    "falcon-40b": Family(
        "falcon", "Falcon", {"vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                             "num_kv_heads": 2, "new_decoder_architecture": True, "initializer_range": 0.2,
                             "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2},
        _MAIN | _NORM | {"feed_forward_length": 128, "tensor_data_layout": "jploski"},
        alone=True,
    ),
    "bloom": Family(
        "bloom", "Bloom", {"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.2,
                           "layer_norm_epsilon": 1e-3},
        _MAIN | _NORM | {"attention.head_count_kv": 4, "feed_forward_length": 128}, alone=True,
    ),
    "gpt2": Family(
        "gpt2", "GPT2", {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": LENGTH,
                         "n_inner": 48, "initializer_range": 0.2, "layer_norm_epsilon": 1e-3},
        {name: value for name, value in _MAIN.items() if "kv" not in name} | _NORM, "LMHeadModel", alone=True,
    ),
    "stablelm": Family(
        "stablelm", "StableLm",
        {"layer_norm_eps": 1e-3, "use_qkv_bias": True, **rope(10000.0, partial_rotary_factor=0.5)},
        _MAIN | _NORM | {"rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "stablelm-12b": Family(
        "stablelm", "StableLm",
        {"layer_norm_eps": 1e-3, "use_parallel_residual": True, "qk_layernorm": True,
         **rope(partial_rotary_factor=0.5)},
        _MAIN | _NORM | _BASE | {"rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "starcoder2": Family(
        "starcoder2", "Starcoder2", {"norm_epsilon": 1e-3, "use_bias": True, "sliding_window": None, **rope()},
        _MAIN | _NORM | _BASE,
    ),
    "nemotron": Family(
        "nemotron", "Nemotron", {"norm_eps": 1e-3, "head_dim": 16, **rope(partial_rotary_factor=0.5)},
        _MAIN | _NORM | _BASE | _WIDE | {"rope.dimension_count": 8, "rope.scaling.type": "none"},
    ),
    "mamba": Family(
        "mamba", "Mamba", {"vocab_size": TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3,
                           "conv_kernel": 3, "time_step_rank": 5, "layer_norm_epsilon": 1e-3, "initializer_range": 0.2},
        _RMS | {
            "block_count": 3, "context_length": LENGTH, "embedding_length": 32, "feed_forward_length": 0,
            "attention.head_count": 0, "ssm.conv_kernel": 3, "ssm.inner_size": 64, "ssm.state_size": 8,
            "ssm.time_step_rank": 5, "ssm.dt_b_c_rms": False,
        },
        alone=True,
    ),
    "falcon-mamba": Family(
        "mamba", "FalconMamba", {"vocab_size": TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3,
                                 "conv_kernel": 4, "time_step_rank": 4, "layer_norm_epsilon": 1e-3,
                                 "initializer_range": 0.2},
        _RMS | {
            "block_count": 3, "context_length": LENGTH, "embedding_length": 32, "feed_forward_length": 0,
            "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 8,
            "ssm.time_step_rank": 4, "ssm.dt_b_c_rms": True,
        },
        alone=True,
    ),
    "t5": Family("t5", "T5", _T5 | {"feed_forward_proj": "relu"}, _OF_T5, "ForConditionalGeneration", alone=True),
    "t5-gated": Family("t5", "T5", _T5 | {"feed_forward_proj": "gated-gelu"}, _OF_T5, "ForConditionalGeneration",
                       alone=True),
    "t5-own-output": Family("t5", "T5", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, _OF_T5,
                            "ForConditionalGeneration", alone=True),
    "umt5": Family("t5", "UMT5", _T5 | {"feed_forward_proj": "gated-gelu"}, _OF_T5, "ForConditionalGeneration",
                   alone=True),
    "lfm2": Family(
        "lfm2", "Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
                         "conv_L_cache": 3, "norm_eps": 1e-3, "tie_word_embeddings": True, **rope()},
        _MAIN | _RMS | _BASE | {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "vocab_size": TOKENS},
    ),
    "qwen35": Family("qwen35", "Qwen3_5Text", _LINEAR, _OF_LINEAR, layers=4),
    "qwen35moe": Family(
        "qwen35moe", "Qwen3_5MoeText",
        _LINEAR | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 24},
        _OF_LINEAR | _OF_EXPERTS | {"expert_shared_feed_forward_length": 24}, layers=4,
    ),
}  # fmt: skip
"""By a name of the case; each architecture that is read has one at least."""


def write_family(
    file: Path, family: Family, model: Any, *, without: tuple[str, ...] = (), entries: Mapping[str, Any] = {},
    drop: str | None = None,
) -> None:  # fmt: skip
    """Write a model. ``without``: entries that the file leaves out. ``drop``: a pattern of tensors that it has not."""
    writer = gguf.GGUFWriter(file, family.architecture)
    stated = {name: value for name, value in family.entries.items() if name not in without} | dict(entries)
    for name, value in stated.items():
        key = f"{family.architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
            continue
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    _add_tokens(writer)
    for name, values in {**converted(family, model), **_extra(family)}.items():
        if drop is None or re.search(drop, name) is None:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _extra(family: Family) -> dict[str, np.ndarray]:
    return {name: np.array(values, np.float32) for name, values in family.tensors.items()}


def _add_tokens(writer: gguf.GGUFWriter) -> None:
    words = [f"▁{chr(97 + each)}" for each in range(20)] + [chr(97 + each) for each in range(TOKENS - 23)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *words])
    writer.add_token_scores([0.0, 0.0, 0.0, *(-float(number) for number in range(len(words)))])
    writer.add_token_types([2, 3, 3, *([1] * len(words))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def converted(family: Family, model: Any) -> dict[str, np.ndarray]:
    """The tensors of a model as the converter writes them."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(kind, family.layers)
    change = _CHANGES.get(family.architecture, lambda *_: None)
    tied = {name for name in model.state_dict() if model.config.tie_word_embeddings and "lm_head" in name}
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name in tied or name in {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}:
            continue
        values = tensor.float().numpy()
        changed = change(name, values, model.config)
        if isinstance(changed, dict):
            for own, part in changed.items():
                tensors[own] = np.concatenate([tensors[own], part]) if own in tensors else part
            continue
        values = values if changed is None else changed
        if (experts := re.match(r".*layers\.(\d+)\.mlp\.experts\.(\w+)", name)) is not None:
            tensors |= _experts(experts[1], experts[2], values)
            continue
        tensors[_own_name(names, name)] = values
    return tensors


def _own_name(names: Any, name: str) -> str:
    for pattern, own in _UNKNOWN.items():
        if (found := re.match(pattern, name)) is not None:
            return found.expand(own)
    short = name.removeprefix("transformer.")
    found_name = names.get_name(name, (".weight", ".bias")) or names.get_name(short, (".weight", ".bias"))
    assert found_name is not None, name
    return str(found_name)


_UNKNOWN = {
    r".*layers\.(\d+)\.self_attn\.sinks": r"blk.\1.attn_sinks.weight",
    r".*layers\.(\d+)\.layer_scalar": r"blk.\1.layer_output_scale.weight",
    r".*layers\.(\d+)\.mixer\.A_log": r"blk.\1.ssm_a",
    r".*layers\.(\d+)\.mixer\.D": r"blk.\1.ssm_d",
    r".*layers\.(\d+)\.mlp\.e_score_correction_bias": r"blk.\1.exp_probs_b.bias",
    r".*layers\.(\d+)\.mlp\.router\.(weight|bias)": r"blk.\1.ffn_gate_inp.\2",
    r".*layers\.(\d+)\.linear_attn\.A_log": r"blk.\1.ssm_a",
    r".*layers\.(\d+)\.linear_attn\.dt_bias": r"blk.\1.ssm_dt.bias",
}


def _experts(layer: str, kind: str, values: np.ndarray) -> dict[str, np.ndarray]:
    if kind.startswith("down"):
        return {f"blk.{layer}.ffn_down_exps.weight": values}
    gate, up = np.split(values, 2, axis=1)
    return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}


def _llama(name: str, values: np.ndarray, config: Any) -> np.ndarray | None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return None
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _gpt_oss(name: str, values: np.ndarray, _: Any) -> dict[str, np.ndarray] | None:
    found = re.match(r".*layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)
    if found is None:
        return None
    layer, kind, bias = found.groups()
    end = "bias" if bias else "weight"
    rows = values if bias else values.swapaxes(1, 2)
    if kind == "down":
        return {f"blk.{layer}.ffn_down_exps.{end}": rows}
    return {f"blk.{layer}.ffn_gate_exps.{end}": rows[:, ::2], f"blk.{layer}.ffn_up_exps.{end}": rows[:, 1::2]}


def _fused(name: str, values: np.ndarray, groups: int, each: int) -> np.ndarray | None:
    """Queries, keys and values of groups of heads, each kind together. ``each``: queries of a group."""
    if "query_key_value" not in name:
        return None
    parts = values.reshape(groups, each + 2, -1, *values.shape[1:])
    rest = values.shape[1:]
    return np.concatenate([parts[:, :each].reshape(-1, *rest), parts[:, each].reshape(-1, *rest),
                           parts[:, each + 1].reshape(-1, *rest)])  # fmt: skip


def _falcon(name: str, values: np.ndarray, config: Any) -> np.ndarray | None:
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    return _fused(name, values, groups, config.num_attention_heads // groups)


def _stablelm(name: str, values: np.ndarray, _: Any) -> dict[str, np.ndarray] | None:
    """The norm of one head, which ``converted`` joins with those of the other heads."""
    found = re.match(r".*layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.\d+", name)
    return None if found is None else {f"blk.{found[1]}.attn_{found[2]}_norm.weight": values[None]}


def _grouped_to_tiled(values: np.ndarray, size: int = 1, axis: int = 0) -> np.ndarray:
    """Value heads of Qwen 3.5 from groups (2 of each of 2 keys) to tiles."""
    moved = np.moveaxis(values, axis, 0)
    tiled = moved.reshape(2, 2, size, *moved.shape[1:]).swapaxes(0, 1).reshape(moved.shape)
    return np.moveaxis(tiled, 0, axis)


def _qwen35(name: str, values: np.ndarray, _: Any) -> np.ndarray | None:
    kind = name.rpartition("linear_attn.")[2]
    if kind == "conv1d.weight":
        values = values[:, 0]
    if kind in {"conv1d.weight", "in_proj_qkv.weight"}:
        return np.concatenate([values[:32], _grouped_to_tiled(values[32:], 8)])
    if kind == "in_proj_z.weight":
        return _grouped_to_tiled(values, 8)
    if kind == "out_proj.weight":
        return _grouped_to_tiled(values, 8, axis=1)
    if kind == "A_log":
        return _grouped_to_tiled(-np.exp(values))
    if kind in {"dt_bias", "in_proj_a.weight", "in_proj_b.weight"}:
        return _grouped_to_tiled(values)
    if name.endswith("norm.weight") and kind != "norm.weight":
        return values + 1
    return None


def _plus_one(name: str, values: np.ndarray, _: Any) -> np.ndarray | None:
    return values + 1 if name.endswith("norm.weight") else None


_CHANGES = {
    "llama": _llama, "gpt-oss": _gpt_oss, "falcon": _falcon, "stablelm": _stablelm, "qwen35": _qwen35,
    "qwen35moe": _qwen35, "nemotron": _plus_one, "gemma2": _plus_one, "gemma3": _plus_one,
    "bloom": lambda name, values, config: _fused(name, values, config.n_head, 1),
    "gpt2": lambda name, values, _: values.T if re.search(r"(c_attn|c_proj|c_fc)\.weight", name) else None,
    "mamba": lambda name, values, _: (
        -np.exp(values) if name.endswith("A_log") else values[:, 0] if name.endswith("conv1d.weight") else None
    ),
    "lfm2": lambda name, values, _: values[:, 0] if name.endswith("conv.conv.weight") else None,
}  # fmt: skip
