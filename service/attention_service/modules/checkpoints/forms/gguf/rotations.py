"""Rotations that a GGUF file implies: base, width and scaling, as llama.cpp reads them."""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any, Final

from attention_service.modules.checkpoints.forms.gguf.entries import GgufEntries, UnreadableGguf

FREQUENCY_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that divide the frequencies of rotations."""
Factors = Mapping[str, Sequence[float]]
_BASE: Final = 10000.0
"""The base of a file that names none, in llama.cpp for every architecture."""


def rope_parameters(entries: GgufEntries, head_size: int, longest: int, factors: Factors) -> dict[str, Any]:
    """The ``rope_parameters`` of a config. ``longest``: the length of the context. ``factors``: by name of tensor."""
    width = entries.count("rope.dimension_count", head_size)
    entries.skip("rope.scaling.finetuned")
    partial = {} if width == head_size else {"partial_rotary_factor": width / head_size}
    return {
        "rope_type": "default", "rope_theta": float(entries.number("rope.freq_base", _BASE)), **partial,
        **scaling(entries, longest, factors),
    }  # fmt: skip


def base_with_window(entries: GgufEntries, default: float = _BASE) -> float:
    """The base of the rotations of layers with a window, where they have one of their own."""
    return float(entries.number("rope.freq_base_swa", default))


def whole_heads(entries: GgufEntries, head_size: int) -> None:
    """Raise UnreadableGguf for a width of rotations other than the head's, as llama.cpp does."""
    width = entries.count("rope.dimension_count", head_size)
    if width != head_size:
        raise UnreadableGguf(f"its rope.dimension_count is {width}, and its heads have {head_size} numbers")


def scaling(entries: GgufEntries, longest: int, factors: Factors) -> dict[str, Any]:
    """The scaling of rotations; empty without one."""
    kind = entries.text("rope.scaling.type", "none")
    factor = entries.number("rope.scaling.factor", None)
    linear = entries.number("rope.scale_linear", None)
    if factor is None and linear is not None:
        factor, kind = linear, "linear"
    original = entries.count("rope.scaling.original_context_length", longest)
    stretch = float(entries.number("rope.scaling.attn_factor", 1.0))
    if factors:
        # Llama 3 writes its scaling as factors, which are those of LongRoPE without two lengths.
        alike = factors.get("rope_freqs.weight")
        short = factors.get("rope_factors_short.weight", alike)
        long = factors.get("rope_factors_long.weight", alike)
        if short is None or long is None or (factor not in {None, 1.0} and kind not in {"longrope", "none"}):
            raise UnreadableGguf(f"its rotations are scaled in two ways ({kind}, {', '.join(factors)})")
        return {
            "rope_type": "longrope", "short_factor": [*short], "long_factor": [*long], "attention_factor": stretch,
            "original_max_position_embeddings": longest if alike else original,
        }  # fmt: skip
    if kind not in {"none", "linear", "yarn", "longrope"}:
        raise UnreadableGguf(f"its rope.scaling.type is {str(kind)[:80]!r}; expected none, linear, yarn or longrope")
    if kind == "none" or factor in {None, 0, 1.0}:
        return {}
    if factor < 0:
        raise UnreadableGguf(f"its rope.scaling.factor is {factor}; expected a number above zero")
    if kind == "longrope":
        raise UnreadableGguf("its rope.scaling.type is longrope, and it has no factors of frequencies")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if entries.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise UnreadableGguf("its rope.scaling.yarn_ext_factor is not 1")
    own = entries.number("rope.scaling.yarn_attn_factor", stretch)
    return {
        "rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original,
        "beta_fast": float(entries.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(entries.number("rope.scaling.yarn_beta_slow", 1.0)),
        "attention_factor": own * (1 + 0.1 * log(factor)),
    }  # fmt: skip
