"""Entries of GGUF files that are alike for most architectures: sizes, heads, experts and tokens."""

from collections.abc import Mapping
from typing import Any, Final

from attention_service.modules.checkpoints.forms.gguf.entries import GgufEntries, UnreadableGguf
from attention_service.modules.checkpoints.forms.gguf.rotations import Factors, rope_parameters

RMS_NORM: Final = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM: Final = {"attention.layer_norm_epsilon": "layer_norm_eps"}
_TOKEN_IDS: Final = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def longest(entries: GgufEntries) -> int:
    """The length of the context."""
    return int(entries.count("context_length"))


def head_size(entries: GgufEntries) -> int:
    """Numbers of a head, in llama.cpp the width by the heads unless an entry says it. Values are as wide as keys."""
    width = entries.count("embedding_length") // entries.count("attention.head_count")
    size = entries.count("attention.key_length", width)
    if size < 1:
        raise UnreadableGguf("its embedding_length is less than its attention.head_count")
    value = entries.count("attention.value_length", size)
    if value != size:
        raise UnreadableGguf(f"its attention.value_length is {value}, and its key_length {size}")
    return int(size)


def sizes(entries: GgufEntries, norm: Mapping[str, str]) -> dict[str, Any]:
    """Width, layers, heads and context. ``norm``: the field of a norm's epsilon, by the entry."""
    (entry, field), *_ = norm.items()
    if entries.number("nextn_predict_layers", 0):
        raise UnreadableGguf("it has layers that predict further tokens, which its class has not")
    return {
        "hidden_size": entries.count("embedding_length"),
        "num_hidden_layers": entries.layers(),
        "num_attention_heads": entries.count("attention.head_count"),
        "max_position_embeddings": longest(entries),
        field: entries.number(entry),
    }


def attention_sizes(entries: GgufEntries, factors: Factors) -> dict[str, Any]:
    """Heads, their width, the MLP's width, rotations and tokens of a decoder with rotations."""
    size = head_size(entries)
    inner = entries.number("feed_forward_length", None)
    return vocabulary(entries) | {
        "num_key_value_heads": entries.count("attention.head_count_kv", entries.count("attention.head_count")),
        "head_dim": size,
        **({} if not inner else {"intermediate_size": inner}),
        "rope_parameters": rope_parameters(entries, size, longest(entries), factors),
    }


def vocabulary(entries: GgufEntries) -> dict[str, Any]:
    """The number of tokens by the rows of the embedding, and the special ones."""
    entries.skip("vocab_size")
    count = entries.rows("token_embd.weight")
    special = {}
    for entry, field in _TOKEN_IDS.items():
        token = entries.header.metadata.get(f"tokenizer.ggml.{entry}")
        special[field] = token if type(token) is int and 0 <= token < count else None
    return {"vocab_size": count, **special}


def tied(entries: GgufEntries) -> dict[str, Any]:
    """True without a matrix for the output: the embedding is it."""
    return {"tie_word_embeddings": "output.weight" not in entries.tensors}


def biased_attention(entries: GgufEntries) -> bool:
    """True if a projection of the attention has a bias. Those that a file leaves out are zero in llama.cpp."""
    return any(entries.has(f"attn_{name}.bias") for name in ("q", "k", "v", "output"))


def count_of_experts(entries: GgufEntries, field: str) -> dict[str, Any]:
    """The number of experts, and of those that a token takes."""
    if not (entries.has("ffn_gate_exps.weight") or entries.has("ffn_gate_up_exps.weight")):
        raise UnreadableGguf("its experts are not in joined tensors (ffn_gate_exps), as files since 2024 have them")
    return {field: entries.count("expert_count"), "num_experts_per_tok": entries.count("expert_used_count")}


def layer_types(entries: GgufEntries, layers: int, period: int) -> list[str]:
    """The kind of each layer's attention: by an array of the file, or one of ``period`` without a window."""
    pattern = entries.take("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise UnreadableGguf(f"its sliding_window_pattern has {len(pattern)} entries for {layers} layers")
        windows = [bool(flag) for flag in pattern[:layers]]
    else:
        every = entries.count("attention.sliding_window_pattern", period)
        windows = [layer % every < every - 1 for layer in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in windows]
