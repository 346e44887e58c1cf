"""Entries of config.json that ask for a computation that modules do not have: each is refused by its name."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """One value of an entry, in a family, and the reason that it cannot be exact."""

    family: str
    config: dict[str, Any]
    """The entries that are changed."""
    entry: str
    why: str


REFUSED = [
    Refused("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type", "distances in the scores"),
    Refused("falcon", {"alibi": True}, "alibi", "the bias is rounded to bfloat16"),
    Refused("mpt", {"attn_config": {"clip_qkv": 8.0}}, "clip_qkv", "queries, keys and values are clipped"),
    Refused("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln", "a layer norm of queries and keys"),
    Refused("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm", "the prefix comes with each call"),
    Refused("mpt", {"attn_config": {"alibi": False}}, "alibi", "positions are learned, before the first layer"),
    Refused("mpt", {"is_causal": False}, "is_causal", "no such model of transformers runs"),
    Refused("llama", {"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config", "layers differ in their sizes"),
    Refused("olmo", {"clip_qkv": 8.0}, "clip_qkv", "queries, keys and values are clipped"),
    Refused("phi", {"qk_layernorm": True}, "qk_layernorm", "a layer norm of queries and keys"),
    Refused("stablelm", {"qk_layernorm": True}, "qk_layernorm", "a layer norm of queries and keys"),
    Refused("cohere", {"use_qk_norm": True}, "use_qk_norm", "a layer norm of queries and keys"),
    Refused("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "another mask"),
    Refused("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "another mask"),
    Refused(
        "llama", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type", "another scaling of the rotation"
    ),
    Refused("qwen2", {"use_sliding_window": True, "layer_types": ["chunked"] * 9}, "layer_types", "another mask"),
    Refused("gpt-neo", {"attention_layers": ["strided"] * 9}, "attention_layers", "another mask"),
]
