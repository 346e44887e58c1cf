"""Engines whose attention is not told of, by their configuration."""

from collections.abc import Iterator
from typing import Any, Final

_WHOLE_CACHES: Final = frozenset({"auto", "float16", "bfloat16", "float32", "half", "float"})
"""The types of keys and values that are numbers of 16 or 32 bits."""
_PARALLEL: Final = {
    "pipeline_parallel_size": "pipeline parallel",
    "data_parallel_size": "data parallel",
    "decode_context_parallel_size": "context parallel",
    "prefill_context_parallel_size": "context parallel",
}


def refused_engine(config: Any) -> str | None:
    """Return the reason why asks are refused under a ``VllmConfig``; None if they are answered."""
    return next(_reasons(config), None)


def _reasons(config: Any) -> Iterator[str]:
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    if getattr(model, "use_mla", False):
        yield "multi-head latent attention (MLA): its pages hold no keys of heads"
    if getattr(model, "is_encoder_decoder", False):
        yield "an encoder-decoder"
    if str(cache.cache_dtype) not in _WHOLE_CACHES:
        yield f"keys and values kept as {cache.cache_dtype}"
    for field, what in _PARALLEL.items():
        if getattr(parallel, field, 1) > 1:
            yield f"{what} ({field} = {getattr(parallel, field)})"
    if getattr(parallel, "enable_dbo", False):
        yield "dual batch overlap (enable_dbo)"
    if config.speculative_config is not None:
        yield "speculative decoding: several queries choose tokens in one pass"
    if getattr(config, "kv_transfer_config", None) is not None:
        yield "keys and values that come from elsewhere (kv_transfer_config)"
