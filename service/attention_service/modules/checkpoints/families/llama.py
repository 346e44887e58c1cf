"""Llama and the decoders that share its tensor names. Source: Touvron et al. 2023; ``transformers.LlamaModel``."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from attention_contract.positions import NoPosition, QKNorm
from attention_contract.spec import AttentionSpec, Causal, Mask, ScaledDot, SlidingWindow, Softmax
from attention_service.modules.checkpoints.cuts import unequal
from attention_service.modules.checkpoints.family import (
    AttentionDescription,
    BlockNames,
    Entries,
    Family,
    Pieces,
    fused,
    linear,
    one,
)
from attention_service.modules.checkpoints.rope_entries import rope_of, with_rotation_of

NAMES: Final[Pieces] = linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="o_proj")
NORMS: Final[Pieces] = one(q_norm__weight="q_norm.weight", k_norm__weight="k_norm.weight")


def blocks(pieces: Pieces) -> tuple[BlockNames, ...]:
    """The blocks of a decoder with Llama's path."""
    return (BlockNames("layers.{layer}.self_attn.", pieces),)


def decoder(
    entries: Entries,
    *,
    heads: int = 32,
    hidden: int = 4096,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    window: int | None = None,
    rotary: bool = True,
    rope: dict[str, Any] | None = None,
    **spec: Any,
) -> AttentionDescription:
    """A causal block with rotary positions, from the entries that these families share.

    ``heads``, ``hidden``, ``kv_heads`` and ``head_dim`` are the family's defaults, ``window`` the block's own;
    ``rope`` goes to ``rope_of``, and ``spec`` to the spec.
    """
    heads = entries.count("num_attention_heads", default=heads)
    width = entries.optional_count("head_dim", head_dim) or entries.count("hidden_size", default=hidden) // heads
    return AttentionDescription(
        AttentionSpec(
            position=rope_of(entries, width, **(rope or {})) if rotary else NoPosition(), masks=masks(window), **spec
        ),
        heads,
        kv_heads=entries.optional_count("num_key_value_heads", kv_heads) or heads,
        head_dim=width,
    )


def masks(window: int | None) -> list[Mask]:
    """Causal, and within the last ``window`` keys, the query's own among them."""
    return [Causal()] if window is None else [Causal(), SlidingWindow(left=window - 1)]


def slides(entries: Entries, pattern: Callable[[int], bool]) -> bool:
    """True if the layer is one of a sliding window, by ``layer_types`` or by the family's pattern of layers."""
    kind = entries.of_layer("layer_types")
    if kind not in (None, "sliding_attention", "full_attention"):
        raise entries.unsupported("layer_types", "expected sliding_attention or full_attention")
    return pattern(entries.layer) if kind is None else bool(kind == "sliding_attention")


def _every(period: int) -> Callable[[int], bool]:
    """The pattern in which each ``period``-th layer sees all keys, and the others slide."""
    return lambda layer: (layer + 1) % period != 0


def _windowed(entries: Entries, window: int | None = None, **defaults: Any) -> AttentionDescription:
    """Every layer slides if the config has a window; ``window`` is the family's default."""
    return decoder(entries, window=entries.optional_count("sliding_window", window), **defaults)


def _qwen(entries: Entries, **defaults: Any) -> AttentionDescription:
    first = entries.number("max_window_layers", default=28)
    return _if_allowed(entries, lambda layer: layer >= first, **defaults)


def _qwen2_moe(entries: Entries) -> AttentionDescription:
    end = entries.number("max_window_layers", default=28)
    return _if_allowed(entries, lambda layer: layer < end and layer % 2 == 0, heads=16, hidden=2048, kv_heads=16)


def _if_allowed(entries: Entries, pattern: Callable[[int], bool], **defaults: Any) -> AttentionDescription:
    """Layers of a pattern slide if the config says so at all."""
    window = None
    if entries.flag("use_sliding_window", default=False) and slides(entries, pattern):
        window = entries.optional_count("sliding_window", 4096)
    return decoder(entries, window=window, **defaults)


def _qwen3(entries: Entries) -> AttentionDescription:
    return _qwen(entries, head_dim=128, qk_norm=QKNorm(eps=entries.number("rms_norm_eps", default=1e-6)))


def _gpt_oss(entries: Entries) -> AttentionDescription:
    if entries.get("rope_parameters", "rope_scaling") is None:
        raise entries.unsupported("rope_parameters", "expected the parameters of gpt-oss's rotation")
    window = entries.optional_count("sliding_window", 128) if slides(entries, _every(2)) else None
    return decoder(
        entries,
        heads=64,
        hidden=2880,
        kv_heads=8,
        head_dim=64,
        window=window,
        rope={"theta": 150_000.0},
        normalizer=Softmax(sinks=True),
    )


def _phi(entries: Entries, **defaults: Any) -> AttentionDescription:
    entries.must_be("qk_layernorm", False)
    return decoder(entries, **defaults)


def _unclipped(entries: Entries, **defaults: Any) -> AttentionDescription:
    if entries.get("clip_qkv") is not None:
        raise entries.unsupported("clip_qkv", "expected null: modules do not clip queries, keys and values")
    return decoder(entries, **defaults)


def _olmo2(entries: Entries) -> AttentionDescription:
    norm = QKNorm(eps=entries.number("rms_norm_eps", default=1e-5), over="all_heads")
    return decoder(entries, qk_norm=norm)


def _olmo3(entries: Entries) -> AttentionDescription:
    sliding = slides(entries, _every(4))
    own = with_rotation_of(entries, sliding=sliding, local=5e5, full=entries.number("rope_theta", default=5e5))
    window = entries.optional_count("sliding_window", 4096) if sliding else None
    norm = QKNorm(eps=entries.number("rms_norm_eps", default=1e-5), over="all_heads")
    return decoder(own, window=window, qk_norm=norm)


def _olmoe(entries: Entries) -> AttentionDescription:
    norm = QKNorm(eps=entries.number("rms_norm_eps", default=1e-5), over="all_heads")
    return _unclipped(entries, heads=16, hidden=2048, qk_norm=norm)


def _ministral(entries: Entries) -> AttentionDescription:
    window = entries.optional_count("sliding_window", 4096)
    return decoder(entries, kv_heads=8, window=window if slides(entries, lambda _: window is not None) else None)


def _qwen3_moe(entries: Entries) -> AttentionDescription:
    sliding = entries.flag("use_sliding_window", default=False)
    window = entries.optional_count("sliding_window", 4096) if sliding else None
    norm = QKNorm(eps=entries.number("rms_norm_eps", default=1e-6))
    return decoder(entries, hidden=2048, kv_heads=4, window=window, qk_norm=norm)


def _cohere(entries: Entries) -> AttentionDescription:
    entries.must_be("use_qk_norm", False)
    return decoder(entries, heads=64, hidden=8192, rope={"theta": 500_000.0, "interleaved": True})


def _cohere2(entries: Entries) -> AttentionDescription:
    sliding = slides(entries, _every(entries.count("sliding_window_pattern", default=4)))
    window = entries.optional_count("sliding_window", 4096) if sliding else None
    return decoder(entries, heads=64, hidden=8192, window=window, rotary=window is not None, rope={"interleaved": True})


def _granite(entries: Entries) -> AttentionDescription:
    entries.must_be("position_embedding_type", "rope")
    return decoder(entries, score=ScaledDot(scale=entries.number("attention_multiplier", default=1.0)))


def _smollm3(entries: Entries) -> AttentionDescription:
    rotary = entries.of_layer("no_rope_layers")  # 1 for layers with rotary positions
    if rotary is None:
        rotary = (entries.layer + 1) % entries.count("no_rope_layer_interval", default=4) != 0
    window = None
    if entries.flag("use_sliding_window", default=False) and slides(entries, lambda _: not rotary):
        window = entries.optional_count("sliding_window", None)
    return decoder(
        entries, heads=16, hidden=2048, kv_heads=4, window=window, rotary=bool(rotary), rope={"theta": 2_000_000.0}
    )


_LLAMA: Final = blocks(NAMES)
_NORMED: Final = blocks({**NAMES, **NORMS})
_GLM: Final[dict[str, Any]] = {"kv_heads": 2, "head_dim": 128, "rope": {"partial": 0.5, "interleaved": True}}

FAMILIES: Final = (
    Family("llama", frozenset({"llama"}), _LLAMA, decoder),
    Family("mistral", frozenset({"mistral"}), _LLAMA, partial(_windowed, window=4096, kv_heads=8)),
    Family("mixtral", frozenset({"mixtral"}), _LLAMA, partial(_windowed, kv_heads=8, rope={"theta": 1e6})),
    Family("qwen2", frozenset({"qwen2"}), _LLAMA, _qwen),
    Family("qwen3", frozenset({"qwen3"}), _NORMED, _qwen3),
    Family("gpt-oss", frozenset({"gpt_oss"}), blocks({**NAMES, **one(sinks="sinks")}), _gpt_oss),
    Family(
        "phi",
        frozenset({"phi"}),
        blocks({**NAMES, **linear(o_proj="dense")}),
        partial(_phi, hidden=2048, rope={"partial": 0.5}),
    ),
    Family("phi3", frozenset({"phi3"}), blocks(fused("qkv_proj", "o_proj", unequal)), partial(_windowed, hidden=3072)),
    Family("starcoder2", frozenset({"starcoder2"}), _LLAMA, partial(_windowed, heads=24, hidden=3072, kv_heads=2)),
    Family("olmo", frozenset({"olmo"}), _LLAMA, _unclipped),
    Family("olmo2", frozenset({"olmo2"}), _NORMED, _olmo2),
    Family("cohere", frozenset({"cohere"}), _LLAMA, _cohere),
    Family("cohere2", frozenset({"cohere2"}), _LLAMA, _cohere2),
    Family("granite", frozenset({"granite"}), _LLAMA, _granite),
    Family("smollm3", frozenset({"smollm3"}), _LLAMA, _smollm3),
    Family("stablelm", frozenset({"stablelm"}), _LLAMA, partial(_phi, hidden=2560, rope={"partial": 0.25})),
    Family("qwen2-moe", frozenset({"qwen2_moe"}), _LLAMA, _qwen2_moe),
    Family("qwen3-moe", frozenset({"qwen3_moe"}), _NORMED, _qwen3_moe),
    Family("granitemoe", frozenset({"granitemoe"}), _LLAMA, _granite),
    Family("olmo3", frozenset({"olmo3"}), _NORMED, _olmo3),
    Family("olmoe", frozenset({"olmoe"}), _NORMED, _olmoe),
    Family("ministral", frozenset({"ministral"}), _LLAMA, _ministral),
    Family("seed-oss", frozenset({"seed_oss"}), _LLAMA, partial(decoder, heads=80, kv_heads=8, head_dim=128)),
    Family("arcee", frozenset({"arcee"}), _LLAMA, partial(decoder, hidden=2560)),
    Family("nemotron", frozenset({"nemotron"}), _LLAMA, partial(decoder, heads=48, hidden=6144, rope={"partial": 0.5})),
    Family("glm", frozenset({"glm"}), _LLAMA, partial(decoder, **_GLM)),
    Family("glm4", frozenset({"glm4"}), _LLAMA, partial(decoder, **_GLM)),
)
