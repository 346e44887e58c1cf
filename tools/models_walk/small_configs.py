"""The config of any model type of transformers, made small: its own defaults with few layers, heads and numbers."""

from collections.abc import Mapping
from typing import Any, Final

from tests.models.inputs.images.small_detectors import LEVELS, OF_LEVELS, RESNET
from tests.models.inputs.sounds.small_sounds import HEARS
from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCABULARY: Final = 96
_MOST: Final[dict[int, str]] = {
    1: "topk_group first_k_dense_replace",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers layers
        num_encoder_layers depth num_hidden_layer encoder_num_hidden_layers decoder_num_hidden_layers
        num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num linear_num_key_heads swa_num_key_value_heads
        num_query_groups decoder_num_key_value_heads num_global_key_value_heads num_experts_per_tok moe_topk moe_k
        num_experts_per_token top_k_experts num_selected_experts n_group experts_per_token index_n_heads patch_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        decoder_num_attention_heads linear_num_value_heads swa_num_attention_heads encoder_num_heads num_experts
        num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim index_topk rope_head_dim
        sliding_window attention_window_size local_attention attention_chunk_size sliding_window_size mamba_n_heads
        mamba_num_heads n_mamba_heads linear_num_heads""",
    8: """head_dim kv_channels d_kv attention_head_dim key_length swa_head_dim swa_v_head_dim linear_key_head_dim
        linear_value_head_dim linear_head_dim global_head_dim attn_head_dim d_head v_head_dim qk_nope_head_dim
        index_head_dim image_size input_size img_size mamba_chunk_size chunk_size hidden_size_per_layer_input""",
    16: """pronunciation_embed_dim shape_embed_dim entity_emb_size embedding_size q_lora_rank kv_lora_rank o_lora_rank
        mamba_d_state ssm_state_size state_size mamba_head_dim
        mamba_headdim mamba_d_head time_step_rank d_state""",
    32: """hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim encoder_hidden_dim embedding_dim
        projection_dim output_dim out_hidden_size mm_hidden_size vision_dim text_dim decoder_hidden_size lru_width
        text_embed_dim encoder_hidden_size vision_output_dim projector_dim projection_hidden_size model_dim embed_size
        mamba_d_ssm mamba_d_inner attention_hidden_size text_hidden_size audio_hidden_size condition_dim""",
    48: """intermediate_size ffn_dim d_ff ffn_hidden_size encoder_ffn_dim decoder_ffn_dim moe_intermediate_size
        shared_expert_intermediate_size hidden_dim intermediate_size_mlp expert_ffn_hidden_size
        moe_shared_expert_intermediate_size shared_intermediate_size d_inner mlp_hidden_size expert_ffn_size
        feed_forward_hidden_size decoder_intermediate_size block_ff_dim""",
    64: """max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len context_length
        max_target_positions model_max_length max_encoder_position_embeddings max_decoder_position_embeddings
        max_position_embedding""",
    300: "max_source_positions",
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input decoder_vocab_size entity_vocab_size "
    "pronunciation_vocab_size shape_vocab_size",
}  # fmt: skip
SMALL: Final = {name: most for most, names in _MOST.items() for name in names.split()}
"""The largest value of an entry by its name."""
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KINDS: Final = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
"""Lists that say what each layer is: a layer of each kind stays."""
_SECTIONED: Final = frozenset([
    "cosmos3_edge_text", "glm46v_text", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_ocr_text",
    "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text",
])  # fmt: skip
"""Types whose rotation has sections for time, rows and columns, of sizes that no entry says."""
_SPECIAL: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NAMED: Final = frozenset(
    {"transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id"}
    | {"out_features", "out_indices", "stage_names"}
)

_SWIN: Final = {
    "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "drop_path_rate": 0.0,
}  # fmt: skip
_SAM: Final = {"window_size": 3, "global_attn_indexes": [1]}
_OBJECTS: Final = {"num_queries": 5, "backbone_config": RESNET}
_TOKENIZER: Final = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
OWN: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(("detr", "conditional_detr", "table-transformer", "dab-detr"), _OBJECTS),
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), OF_LEVELS | {"num_queries": 5}),
    "d_fine": OF_LEVELS | {"num_queries": 5, "decoder_n_points": 2},
    "deformable_detr": {"num_queries": 5, "backbone_config": LEVELS, "num_feature_levels": 3},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4},
    "bit": {"num_groups": 8},
    "mistral_large4_text": {"kv_source_layers": None},
    "swin2sr": {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "mimi": {"upsample_groups": 32},
    "efficientloftr": {"hidden_size": 256},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    **dict.fromkeys(
        ("vibevoice_acoustic_tokenizer", "vibevoice_acoustic_tokenizer_encoder",
         "vibevoice_acoustic_tokenizer_decoder"), _TOKENIZER,
    ),
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1, 1, 1, 1],
        "vision_config": {"hidden_size": 64},
    },
    "maskformer": {
        "backbone_config": {
            "model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4], "window_size": 2,
            "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "decoder_config": {"model_type": "detr", "num_queries": 5, "decoder_layers": 2, "encoder_layers": 2},
    },
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "bridgetower": {"hidden_size": 64},
    "lw_detr": {"projector_scale_factors": [1.0], "num_feature_levels": 1, "num_queries": 5},
    "pocket_tts_audio_tokenizer": {"upsample_groups": 32},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 4},  # as its checkpoints have
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 4},
    "axk1": {"head_dim": 4},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "head_dim": 4},
    "deepseek_v3": {"head_dim": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "mobilebert": {"normalization_type": "layer_norm"},
    "squeezebert": {"embedding_size": 32},
    "reformer": {"is_decoder": False, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_blocks": 2},  # of which it rounds parts up to 64
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 2},
    "marian": {"decoder_vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"head_dim": 4},
    "longcat_flash": {"qk_head_dim": 12, "head_dim": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_nb_functions": 1},
    "bailing_hybrid": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "hc_lowrank": 8, "num_experts": 4, "num_experts_per_tok": 2,
    },
    "dots3_note_text": {
        "head_dim": 12, "num_key_value_heads": 4, "n_routed_experts": 4,
        "per_layer_config": {2: {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16,
                                 "kv_lora_rank": 16, "head_dim": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
                                 "v_head_dim": 8}},
    },
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_routed_experts": 4,
    },
    "ernie4_5_vl_moe_text": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [3, 3, 2]},
    },
    "hunyuan_vl_text": {
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 1, 1]},
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "step3p5": {"sliding_window": 4},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1],
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4,
    },
    "neomme_text": {"head_dim": 16},
    "neomme": {"head_dim": 16},
    "glm5_next_text": {"index_kpool": 2},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": 6, "head_dim": 8},
    "led": {"attention_window": [4, 4]},
    "lilt": {"hidden_size": 48},
    "granite_speech5_encoder": {"context_size": 16},
    "longformer": {"attention_window": [4, 4]},
    "ministral": {"head_dim": 8},
    "nemotron_h": {"n_groups": 2},
    "siglip2_text_model": {"projection_size": 32},
    "siglip_text_model": {"projection_size": 32},
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), _SWIN),
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model", "sam3_vit_model"), _SAM),
    "yolos": {"image_size": [8, 8], "num_detection_tokens": 2},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
}  # fmt: skip
"""Entries that a model type needs besides, also as a part of another."""


def small_config(kind: str) -> PreTrainedConfig:
    """Return the config of a model type, made small. Raises what transformers raises for one that it cannot make."""
    made = CONFIG_MAPPING[kind]
    if kind in HEARS:
        return made(**HEARS[kind][2])
    try:
        whole = made()
    except Exception:  # a type whose own defaults its validators refuse
        whole = made(**OWN.get(kind, {}))
    entries = shrunk(whole.to_dict())
    entries.pop("model_type", None)
    return made(**entries)


def shrunk(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config with small sizes, the configs within it too."""
    name = next((name for name in _LAYERS if isinstance(entries.get(name), int)), None)
    count = entries[name] if name else 0
    by_layer = {
        key: each for key, each in entries.items() if count > 2 and isinstance(each, list) and len(each) == count
    }
    kept = _one_of_each_kind(by_layer, count)
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if key in _NAMED:
            continue
        if key == name:
            found[key] = len(kept)
        elif key == "per_layer_config" and isinstance(value, dict):
            by_number = {int(at): each for at, each in value.items()}
            found[key] = {new: shrunk(by_number[at]) for new, at in enumerate(kept) if at in by_number} or None
        elif key in by_layer:
            found[key] = [value[at] for at in kept]
        elif isinstance(value, dict):
            found[key] = shrunk(value) if {"model_type", "hidden_size"} & value.keys() else value
        elif "token_id" in key or "token_index" in key:
            found[key] = _token(key, value)
        elif key in SMALL and isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = min(value, SMALL[key])
        else:
            found[key] = value
    for heads, groups in (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads")):
        if isinstance(entries.get(heads), int) and entries.get(heads) == entries.get(groups):
            found[groups] = found[heads]
    if entries.get("model_type") in _SECTIONED and isinstance(rotation := entries.get("rope_parameters"), dict):
        pairs = int(SMALL["head_dim"] * rotation.get("partial_rotary_factor", 1.0)) // 2
        found["rope_parameters"] = rotation | {"mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}
    own = OWN.get(str(entries.get("model_type")), {})
    within = {key: found[key] | value for key, value in own.items() if key.endswith("_config") and found.get(key)}
    return found | own | within


def _one_of_each_kind(by_layer: Mapping[str, list[Any]], count: int) -> list[int]:
    """Return the layers to keep: the first of each kind, at least two, at most four."""
    seen: dict[str, int] = {}
    for at in range(count):
        seen.setdefault(str([each[at] for name, each in by_layer.items() if name in _KINDS]), at)
    found = sorted(seen.values())[:4]
    return found if len(found) > 1 else [0, 1]


def _token(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [2]
    return _SPECIAL.get(key, 3) if isinstance(value, int) and value >= VOCABULARY else value
