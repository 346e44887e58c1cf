"""Gemma, whose norms multiply by 1 + weight, and whose layers alternate. Source: Gemma 1 to 3; ``transformers``."""

from functools import partial
from typing import Any, Final

from attention_contract.positions import QKNorm
from attention_contract.spec import ScaledDot
from attention_service.modules.checkpoints.families.llama import NAMES, NORMS, blocks, decoder, slides
from attention_service.modules.checkpoints.family import AttentionDescription, Entries, Family
from attention_service.modules.checkpoints.rope_entries import with_rotation_of


def _gemma(entries: Entries) -> AttentionDescription:
    entries.must_be("use_bidirectional_attention", False)
    return decoder(entries, heads=16, hidden=3072, kv_heads=16, head_dim=256)


def _gemma3(entries: Entries) -> AttentionDescription:
    period = entries.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
    sliding = slides(entries, lambda layer: (layer + 1) % period != 0)
    local = entries.number("rope_local_base_freq", default=1e4)
    own = with_rotation_of(entries, sliding=sliding, local=local, full=entries.number("rope_theta", default=1e6))
    norm = QKNorm(eps=entries.number("rms_norm_eps", default=1e-6), unit_offset=True)
    return _alternating(own, period, softcap=None, qk_norm=norm)


def _alternating(entries: Entries, period: int, softcap: float | None, **spec: Any) -> AttentionDescription:
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
    Family("gemma2", frozenset({"gemma2"}), blocks(NAMES), partial(_alternating, period=2, softcap=50.0)),
    Family("gemma3", frozenset({"gemma3_text"}), blocks({**NAMES, **NORMS}), _gemma3),
)
