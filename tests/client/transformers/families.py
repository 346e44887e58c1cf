"""Tiny randomly initialised models of the families that run their attention through transformers' interface."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

WINDOW = 4
_TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_LATENT = (
    _SIZES
    | {"num_key_value_heads": 4, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
    | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
)
_ALTERNATING = ["sliding_attention", "full_attention"]
DECODERS: dict[str, dict[str, Any]] = {
    "cohere2": _GROUPED | {"sliding_window": WINDOW, "layer_types": _ALTERNATING},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8},
    "gemma": _GROUPED | {"head_dim": 8},
    "gemma2": _GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 0.5}
    | {"sliding_window": WINDOW, "layer_types": _ALTERNATING},
    "gemma3_text": _GROUPED | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    "glm4": _GROUPED | {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    "gpt_neox": _SIZES | {"max_position_embeddings": 64},
    "gpt_oss": _GROUPED | _EXPERTS | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _ALTERNATING},
    "granite": _GROUPED | {"attention_multiplier": 0.3},
    "granite_swa": _GROUPED | {"sliding_window": WINDOW},
    "lfm2": _GROUPED | {"layer_types": ["conv", "full_attention"]},
    "llama": _GROUPED,
    "llama4_text": _GROUPED | {"head_dim": 8, "attention_chunk_size": WINDOW, "num_local_experts": 2}
    | {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 48}
    | {"layer_types": ["chunked_attention", "full_attention"]},
    "mistral": _GROUPED | {"sliding_window": WINDOW},
    "mixtral": _GROUPED | _EXPERTS,
    "nemotron": _GROUPED,
    "olmo2": _GROUPED,
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "phi": _GROUPED,
    "phi3": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 8},
    "smollm3": _GROUPED,
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED | {"sliding_window": WINDOW},
}  # fmt: skip
"""The options of each decoder family's config, beside those of all."""
_TEXT = _SIZES | {"max_position_embeddings": 64}
_PICTURE = _SIZES | {"image_size": 8, "patch_size": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": _TEXT | {"embedding_size": 16, "num_hidden_layers": 3},
    "bert": _TEXT,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    "electra": _TEXT | {"embedding_size": 16},
    "modernbert": _TEXT | {"local_attention": WINDOW, "global_attn_every_n_layers": 2},
    "roberta": _TEXT,
    "siglip_vision_model": _PICTURE | {"vision_use_head": False},
    "vit": _PICTURE,
}
PAIRS: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
}
"""Encoders with decoders."""


def tiny(family: str, implementation: str = "eager", **options: Any) -> PreTrainedModel:
    """Return a model of a family with the same parameters in every run."""
    own = DECODERS.get(family) or ENCODERS.get(family) or PAIRS[family]
    auto = AutoModelForCausalLM if family in DECODERS else AutoModel if family in ENCODERS else AutoModelForSeq2SeqLM
    picture = "image_size" in own
    config = CONFIG_MAPPING[family](**({} if picture else _TOKENS), **own | options)
    torch.manual_seed(7)
    model = auto.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or "sinks" in name or "position_embedding" in name:
                parameter.normal_(std=0.3)  # scores of about 1, so that masks and heads count
    return model


def prompt(length: int = 9, padding: int = 3) -> dict[str, torch.Tensor]:
    """Return two sequences of tokens; the first begins with padding."""
    tokens = torch.randint(3, 96, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    tokens[0, :padding] = mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}
