"""Facts of GGUF files for the list of models: the config that they stand for, and the reason for a refusal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attention_service.models.checkpoint_facts import Input
from attention_service.models.gguf.entries import GgufEntries, UnreadableGguf
from attention_service.models.gguf.families import FAMILIES
from attention_service.models.gguf.rotations import FREQUENCY_FACTORS
from attention_service.modules.checkpoints.gguf_header import GgufHeader

_SPLIT: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PAIRED: Final = "t5"
"""The architecture whose models read a text and write another."""
OTHER_NUMBERS: Final = (
    "logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.clamp_kqv",
    "attention.max_alibi_bias", "attention.temperature_scale", "attention.temperature_length", "expert_weights_scale",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.alpha", "expert_group_count", "leading_dense_block_count",
)  # fmt: skip
"""Entries that change what a model computes, and that no class here has, with values that say nothing: 0 and 1."""
_NEUTRAL: Final = frozenset[Any]({0, 1})
_GATES: Final[dict[str, frozenset[Any]]] = {
    "expert_gating_func": frozenset({0, 1}), "attention.causal": frozenset({True}),
}  # fmt: skip
"""Entries that every class has with one value, unless its family reads them, with what stands for that value."""


@dataclass(frozen=True)
class GgufConfig:
    """The config that a file stands for."""

    fields: Mapping[str, Any]
    """The entries of a config.json."""
    unread: Sequence[str]
    """The entries of the file about the model that say nothing of it, by their whole names, sorted."""


def read_config(header: GgufHeader, factors: Mapping[str, Sequence[float]] | None = None) -> GgufConfig:
    """The whole config of a file. ``factors``: the tensors that divide the frequencies of rotations, by name.

    Without them only their number is known, which is enough for a list. Raises UnreadableGguf.
    """
    family = FAMILIES.get(header.architecture)
    if family is None:
        raise UnreadableGguf(
            f"this server reads no GGUF file of architecture {header.architecture[:80]!r}; take the checkpoint that "
            "it was made from"
        )
    entries = GgufEntries(header)
    if factors is None:
        factors = {name: [1.0] * entries.rows(name) for name in FREQUENCY_FACTORS if name in header.tensors}
    fields = family.build(entries, factors)
    for name in (name for name in (*OTHER_NUMBERS, *_GATES) if name not in entries.read):
        value = entries.take(name, None)
        if value is not None and (isinstance(value, list) or value not in _GATES.get(name, _NEUTRAL)):
            raise UnreadableGguf(
                f"its entry {header.architecture}.{name} is {str(value)[:80]}, which transformers does not read, so "
                "that the numbers would be others; take the checkpoint that it was made from"
            )
    return GgufConfig(fields, entries.unread)


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The entries of a config.json for the list of models; without those of a file that is refused."""
    try:
        return dict(read_config(header).fields)
    except UnreadableGguf:
        return {"model_type": header.architecture}


def takes_of(header: GgufHeader) -> list[Input]:
    """The inputs that the tokenizer in a file allows."""
    if "tokenizer.ggml.model" not in header.metadata:
        return []
    spoken: list[Input] = ["messages"] if "tokenizer.chat_template" in header.metadata else []
    pairs: list[Input] = ["target"] if header.architecture == _PAIRED else []
    return ["text", *spoken, *pairs]


def refusal_of_gguf(file: Path, header: GgufHeader) -> str | None:
    """The reason for which a GGUF file is no model; None if a process can try."""
    if _SPLIT.search(file.name):
        return "it is a part of a divided GGUF file, which is not read; join the parts (llama-gguf-split --merge)"
    strange = sorted({kind for kind, _ in header.tensors.values() if kind.startswith("type ")})
    if strange:
        return f"it holds tensors of {strange[0]} of ggml, which the package gguf does not dequantize"
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            return (
                f"it is a GGUF file, and transformers needs {package} to read it, which this server lacks; install its "
                "extra (attention-service[gguf])"
            )
    try:
        read_config(header)
    except UnreadableGguf as fault:
        return str(fault)
    return None
