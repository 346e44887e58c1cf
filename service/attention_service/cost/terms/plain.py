"""Plain attention: softmax over scaled dot products, causal or not. Most requests are plain."""

from attention_contract.spec import AttentionSpec, Causal, Dot, ScaledDot, Softmax

_PLAIN = AttentionSpec()


def is_plain(spec: AttentionSpec) -> bool:
    """Return True for plain attention, with any scale and temperature."""
    if not isinstance(spec.score, Dot | ScaledDot) or not isinstance(spec.normalizer, Softmax):
        return False
    options = {"score": spec.score, "normalizer": spec.normalizer, "masks": spec.masks}
    return spec == _PLAIN.model_copy(update=options) and all(isinstance(mask, Causal) for mask in spec.masks)
