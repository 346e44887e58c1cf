"""Tiny decoders: both layers of each, so that alternating ones are compared in both of their forms."""

from tests.modules.checkpoints.tiny_models import LLAMA, SIZES, decoder

OLD = SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 8,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 4.0, 5.0,
    6.0],
}  # fmt: skip
TWO = ["sliding_attention", "full_attention"]
EXPERTS_OF_QWEN = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = LLAMA | {
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5, "moe_intermediate_size": 8, "first_k_dense_replace": 2,
}  # fmt: skip
WITHOUT_Q = LATENT | {"q_lora_rank": None}
MSCALES = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32.0,
    "beta_slow": 1.0, "original_max_position_embeddings": 16,
}  # fmt: skip

DECODERS = [
    *decoder("gpt-neo", "GPTNeo", "h.{}.attn.attention", o="out_proj", **OLD | {"num_layers": 2}, num_heads=4,
             attention_types=[[["global", "local"], 1]], window_size=3, max_position_embeddings=16),
    *decoder("gpt-j", "GPTJ", "h.{}.attn", o="out_proj", **SIZES, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
             n_positions=16),
    *decoder("gpt-neox", "GPTNeoX", "layers.{}.attention", "query_key_value", "dense", **OLD, intermediate_size=16),
    *decoder("opt", "OPT", "decoder.layers.{}.self_attn", o="out_proj", **OLD, ffn_dim=16, max_position_embeddings=16,
             word_embed_proj_dim=32),
    *decoder("bloom", "Bloom", "h.{}.self_attention", "query_key_value", "dense", **SIZES, hidden_size=24, n_layer=2,
             n_head=3),
    *decoder("mpt", "Mpt", "blocks.{}.attn", "Wqkv", "out_proj", **SIZES, d_model=24, n_layers=2, n_heads=3,
             max_seq_len=16),
    *decoder("falcon", "Falcon", "h.{}.self_attention", "query_key_value", "dense", **OLD, label="multi-query"),
    *decoder("falcon", "Falcon", "h.{}.self_attention", "query_key_value", "dense", **OLD, label="multi-head",
             multi_query=False, bias=True),
    *decoder("falcon", "Falcon", "h.{}.self_attention", "query_key_value", "dense", **OLD, label="grouped",
             new_decoder_architecture=True, num_kv_heads=2),
    *decoder("mistral", "Mistral", **LLAMA, sliding_window=3),
    *decoder("mixtral", "Mixtral", **LLAMA, **EXPERTS),
    *decoder("qwen2", "Qwen2", **LLAMA, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    *decoder("qwen3", "Qwen3", **LLAMA, head_dim=12),
    *decoder("gemma", "Gemma", **LLAMA, head_dim=12),
    *decoder("gemma2", "Gemma2", **LLAMA, head_dim=12, sliding_window=3, query_pre_attn_scalar=20,
             attn_logit_softcapping=2.0),
    *decoder("gemma3", "Gemma3TextModel", **LLAMA, head_dim=12, sliding_window=3, query_pre_attn_scalar=20,
             layer_types=TWO),
    *decoder("gpt-oss", "GptOss", **LLAMA, **EXPERTS, head_dim=12, sliding_window=3, rope_parameters=YARN),
    *decoder("phi", "Phi", o="dense", **LLAMA),
    *decoder("phi3", "Phi3", q="qkv_proj", **LLAMA | {"max_position_embeddings": 64}, sliding_window=4,
             original_max_position_embeddings=16, rope_parameters=LONG),
    *decoder("starcoder2", "Starcoder2", **LLAMA, sliding_window=3),
    *decoder("olmo", "Olmo", **LLAMA),
    *decoder("olmo2", "Olmo2", **LLAMA),
    *decoder("cohere", "Cohere", **LLAMA),
    *decoder("cohere2", "Cohere2", **LLAMA, sliding_window=3, layer_types=TWO),
    *decoder("granite", "Granite", **LLAMA, attention_multiplier=0.2, attention_bias=True),
    *decoder("smollm3", "SmolLM3", **LLAMA, no_rope_layers=[1, 0]),
    *decoder("stablelm", "StableLm", **LLAMA, use_qkv_bias=True),
    *decoder("glm", "Glm", **LLAMA, head_dim=8),
    *decoder("glm4", "Glm4", **LLAMA, head_dim=8),
    *decoder("qwen2-moe", "Qwen2Moe", **LLAMA, **EXPERTS_OF_QWEN),
    *decoder("qwen3-moe", "Qwen3Moe", **LLAMA, **EXPERTS_OF_QWEN, head_dim=8,
             use_sliding_window=True, sliding_window=3),
    *decoder("granitemoe", "GraniteMoe", **LLAMA, **EXPERTS, attention_multiplier=0.2),
    *decoder("olmo3", "Olmo3", **LLAMA, sliding_window=3, layer_types=TWO),
    *decoder("olmoe", "Olmoe", **LLAMA, num_experts=2, num_experts_per_tok=1),
    *decoder("ministral", "Ministral", **LLAMA, head_dim=8, sliding_window=3, layer_types=TWO),
    *decoder("seed-oss", "SeedOss", **LLAMA, head_dim=12),
    *decoder("arcee", "Arcee", **LLAMA),
    *decoder("nemotron", "Nemotron", **LLAMA),
    *decoder("gpt-bigcode", "GPTBigCode", "h.{}.attn", "c_attn", "c_proj", **SIZES, n_embd=32, n_layer=2, n_head=4,
             n_positions=16),
    *decoder("deepseek-v2", "DeepseekV2", **WITHOUT_Q),
    *decoder("deepseek-v2", "DeepseekV2", q="q_a_proj", **LATENT, attention_bias=True, rope_parameters=MSCALES,
             label="with-queries"),
    *decoder("deepseek-v3", "DeepseekV3", q="q_a_proj", **LATENT, rope_parameters=MSCALES),
    *decoder("deepseek-v3", "DeepseekV3", q="q_a_proj", **LATENT, rope_interleave=False, attention_bias=True,
             label="half"),
    *decoder("axk1", "AXK1", q="q_a_proj", **LATENT),
    *decoder("glm4-moe-lite", "Glm4MoeLite", q="q_a_proj", **LATENT, mlp_layer_types=["dense"] * 2),
    *decoder("kimi-linear", "KimiLinear", **WITHOUT_Q, layer_types=["full_attention"] * 2,
             mlp_layer_types=["dense"] * 2),
    *decoder("minicpm3", "MiniCPM3", q="q_a_proj", **LATENT),
    *decoder("youtu", "Youtu", q="q_a_proj", **LATENT),
    *decoder("gpt-bigcode", "GPTBigCode", "h.{}.attn", "c_attn", "c_proj", **SIZES, n_embd=32, n_layer=2, n_head=4,
             n_positions=16, multi_query=False, label="multi-head"),
]  # fmt: skip
"""Every block that is compared."""
