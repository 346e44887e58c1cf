"""Gemma, whose norms multiply by 1 + weight, and whose layers alternate. Source: Gemma 1 to 3; ``transformers``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from attention_contract.positions import QKNorm
from attention_contract.spec import ScaledDot
from attention_service.modules.checkpoints.families.llama import NAMES, NORMS, blocks, decoder, slides
from attention_service.modules.checkpoints.family import Attention, Entries, Family

_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"


def _gemma(entries: Entries) -> Attention:
    entries.must_be("use_bidirectional_attention", False)
    return decoder(entries, heads=16, hidden=3072, kv_heads=16, head_dim=256)


def _gemma2(entries: Entries) -> Attention:
    return _alternating(entries, period=2, softcap=50.0)


def _gemma3(entries: Entries) -> Attention:
    period = entries.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    sliding = slides(entries, lambda layer: (layer + 1) % period != 0)
    rotation = _rotation(entries.config, sliding)
    own = replace(entries, config={**entries.config, "rope_parameters": rotation, "rope_theta": None})
    norm = QKNorm(eps=entries.number("rms_norm_eps", default=1e-6), unit_offset=True)
    return _alternating(own, period, softcap=None, qk_norm=norm)


def _rotation(config: Mapping[str, Any], sliding: bool) -> dict[str, Any]:
    """The rotation of a layer: local layers have a smaller theta and no scaling."""
    kind, entry, theta = (_SLIDING, "rope_local_base_freq", 1e4) if sliding else (_FULL, "rope_theta", 1e6)
    given = config.get("rope_parameters")
    own = given.get(kind) if isinstance(given, Mapping) else None
    if own is None and not sliding:
        own = config.get("rope_scaling")
    base = config.get(entry)
    return {"rope_theta": theta if base is None else base} | (dict(own) if isinstance(own, Mapping) else {})


def _alternating(entries: Entries, period: int, softcap: float | None, **spec: Any) -> Attention:
    entries.must_be("use_bidirectional_attention", False)
    sliding = slides(entries, lambda layer: (layer + 1) % period != 0)
    scale = entries.number("query_pre_attn_scalar", default=256) ** -0.5
    if "attn_logit_softcapping" in entries.config:
        softcap = entries.get("attn_logit_softcapping")
    return decoder(
        entries,
        heads=8,
        hidden=2304,
        kv_heads=4,
        head_dim=256,
        window=entries.optional_count("sliding_window", 4096) if sliding else None,
        score=ScaledDot(scale=scale),
        softcap=softcap,
        **spec,
    )


FAMILIES: Final = (
    Family("gemma", frozenset({"gemma"}), blocks(NAMES), _gemma),
    Family("gemma2", frozenset({"gemma2"}), blocks(NAMES), _gemma2),
    Family("gemma3", frozenset({"gemma3_text"}), blocks({**NAMES, **NORMS}), _gemma3),
)
