"""The models that can be spread over devices, by their files: what is divided, and why others are refused."""

import math
from collections.abc import Mapping
from typing import Any, Final

from attention_service.modules.checkpoints.forms.form import Facts

SPREAD_TYPES: Final = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "audioflamingo3", "axk1", "axk2", "aya_vision", "beam", "cohere",
    "cohere2", "cohere2_moe", "cohere_compass_text", "cosmos3_edge_text", "cwm", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "dots1", "dots3_note", "dots3_note_text", "ernie4_5", "ernie4_5_moe", "eurobert",
    "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_text",
    "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe_text", "glm4v_text",
    "glm_image_text", "glm_moe_dsa", "glm_ocr_text", "glmasr", "gpt_neox", "gpt_oss", "granite", "granite_docling_text",
    "granite_speech", "granite_speech_plus", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared",
    "helium", "higgs_audio_v2", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "idefics3", "internlm3", "internvl",
    "iquestcoder", "jais2", "kolibri1", "lfm2_moe", "llama", "llama4", "llama4_text", "llava", "llava_next",
    "llava_onevision", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text",
    "ministral", "ministral3", "mistral", "mistral3", "mistral4", "mistral_large4_text", "mixtral",
    "moss_transcribe_diarize", "musicflamingo", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi",
    "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_audio", "qwen2_moe",
    "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_asr", "qwen3_moe", "qwen3_vl_moe_text", "seed_oss", "smollm3",
    "smolvlm", "solar_open", "starcoder2", "t5gemma", "t5gemma2", "ultrabert", "ultravbert", "vaultgemma",
    "vibevoice_asr", "voxtral", "youtu",
))  # fmt: skip
"""The types that answer on two devices as on one, in float64 ≤ 1e-12, as ``python -m tools.models_walk.two_devices``
finds: a plan of transformers is no promise, since that of Gemma 3n computes something else on two devices."""
_BY_EXPERTS: Final = frozenset({"gpt_oss"})
"""Types for whose layers transformers has a plan of expert parallelism alone: each device has its own experts, and all
attentions."""


def spread_refusal(facts: Facts, devices: int) -> str | None:
    """The reason for which a model is not spread over so many devices; None if it is."""
    if facts.packed is not None:
        return f"its tensors are {facts.packed}, which are unpacked on one device alone"
    if facts.library is not None:
        return f"it is a checkpoint of {facts.library}, which is read on one device alone"
    kind = facts.config.get("model_type")
    if kind not in SPREAD_TYPES:
        return f"models of the type {kind} are not spread; docs/models-table.md lists those that are"
    for name, count in _divided(facts.config).items():
        if count % devices:
            return f"its {count} {name} do not divide by {devices} devices"
    return None


def bytes_on_all(facts: Facts, tensors: int, width: int, devices: int) -> int:
    """The bytes of a model on all its devices, from those of its tensors, of so many bytes a number.

    What transformers' plans leave whole beside divided layers is little, and not counted.
    """
    config = facts.config
    if config.get("model_type") not in _BY_EXPERTS:
        return tensors
    names = "num_hidden_layers", "num_local_experts", "hidden_size", "intermediate_size"
    sizes = [size for name in names if isinstance(size := config.get(name), int)]
    experts = 3 * width * math.prod(sizes) if len(sizes) == len(names) else 0
    return tensors + (devices - 1) * max(tensors - experts, 0)


def _divided(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of what is divided, by names: the heads of an attention, or the experts of a layer."""
    if config.get("model_type") in _BY_EXPERTS:
        named = {"experts": config.get("num_local_experts")}
    else:
        part = config.get("text_config")
        of_text = part if isinstance(part, Mapping) else config
        heads, grouped = of_text.get("num_attention_heads"), of_text.get("num_key_value_heads")
        named = {"heads": heads, "heads of keys and values": grouped}
    return {name: count for name, count in named.items() if isinstance(count, int)}
