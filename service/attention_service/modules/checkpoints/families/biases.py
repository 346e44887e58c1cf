"""The projections of each family that have a bias, as the classes of ``transformers`` make them from config.json."""

from collections.abc import Callable, Mapping
from typing import Final

from attention_service.modules.checkpoints.family import Entries

Biases = Callable[[Entries], str]
"""The roles, among "qkvo", of the projections with a bias; "d" stands for those to latents."""


def _always(roles: str) -> Biases:
    return lambda _: roles


def _by(entry: str, *, default: bool = False, roles: str = "qkvo", rest: str = "") -> Biases:
    """``roles`` where an entry is true, and ``rest`` in any case."""
    return lambda entries: (roles if entries.flag(entry, default=default) else "") + rest


def _seed_oss(entries: Entries) -> str:
    out = "o" if entries.flag("attention_out_bias", default=False) else ""
    return _by("attention_bias", default=True, roles="qkv")(entries) + out


def _all(rule: Biases, *families: str) -> dict[str, Biases]:
    return dict.fromkeys(families, rule)


BIASES: Final[Mapping[str, Biases]] = {
    **_all(_always("qkvo"), "albert", "bart", "bert", "bloom", "clip-text", "clip-vision", "distilbert", "gpt-bigcode"),
    **_all(_always("qkvo"), "gpt2", "longformer", "phi", "siglip", "wav2vec2"),
    **_all(_always(""), "gpt-j", "ministral", "mistral", "mixtral", "mpt", "mt5", "phi3", "t5", "umt5"),
    "gpt-neo": _always("o"),
    "qwen2": _always("qkv"),
    "whisper": _always("qvo"),
    **_all(_by("attention_bias"), "arcee", "cohere", "cohere2", "gemma", "gemma2", "gemma3", "granite", "granitemoe"),
    **_all(_by("attention_bias"), "llama", "modernbert", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "qwen3"),
    **_all(_by("attention_bias"), "qwen3-moe", "smollm3"),
    **_all(_by("attention_bias", roles="od"), "axk1", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "kimi-linear"),
    **_all(_by("attention_bias", roles="od"), "minicpm3", "youtu"),
    **_all(_by("attention_bias", default=True), "gpt-neox", "gpt-oss"),
    **_all(_by("attention_bias", default=True, roles="qkv"), "glm", "glm4"),
    "falcon": _by("bias"),
    "opt": _by("enable_bias", default=True),
    "qwen2-moe": _by("qkv_bias", default=True, roles="qkv"),
    "seed-oss": _seed_oss,
    "stablelm": _by("use_qkv_bias", roles="qkv"),
    "starcoder2": _by("use_bias", default=True),
    "vit": _by("qkv_bias", default=True, roles="qkv", rest="o"),
}
"""Rules by family. One that is told by its tensors alone has none: what is there counts."""
