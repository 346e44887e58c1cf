"""The form of GGUF files: the config that they stand for, the entries that nobody reads, the reason for a refusal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attention_service.modules.checkpoints.forms.form import Facts, Form, FormReader, Input, Stored
from attention_service.modules.checkpoints.forms.gguf.entries import GgufEntries, UnreadableGguf
from attention_service.modules.checkpoints.forms.gguf.families import FAMILIES
from attention_service.modules.checkpoints.forms.gguf.gguf_header import FLOATS, GGUF, GgufHeader, read_header
from attention_service.modules.checkpoints.forms.gguf.rotations import FREQUENCY_FACTORS

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


def takes_of(header: GgufHeader) -> tuple[Input, ...]:
    """The inputs that the tokenizer in a file allows."""
    if "tokenizer.ggml.model" not in header.metadata:
        return ()
    spoken: tuple[Input, ...] = ("messages",) if "tokenizer.chat_template" in header.metadata else ()
    pairs: tuple[Input, ...] = ("target",) if header.architecture == _PAIRED else ()
    return ("text", *spoken, *pairs)


def _gguf(stored: Stored) -> Form | None:
    """The form of a GGUF file. Which of its tensors a model has is known once there is one."""
    file = stored.place
    if file.suffix != GGUF or not file.is_file():
        return None
    header = read_header(file)
    try:
        config, why = read_config(header), None
    except UnreadableGguf as fault:
        config, why = GgufConfig({"model_type": header.architecture}, ()), str(fault)
    plain = header.form in FLOATS.values()
    return Form(
        Facts(
            config.fields, packed=None if plain else header.form, dtype=header.form if plain else None,
            bytes=header.unpacked_bytes, takes=takes_of(header),
        ),
        left_out=tuple(config.unread),
        refusal=_refusal(file, header) or why,
        layerless=f"{file.name} is a GGUF file, of which layers cannot be imported as modules; ask the whole model "
        "(POST /v1/models), or convert it to safetensors",
    )  # fmt: skip


def _refusal(file: Path, header: GgufHeader) -> str | None:
    """The reason for which no GGUF file of this name, with tensors of such types, is read; None if it may be."""
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
    return None


GGUF_FILE: Final = FormReader(_gguf)
