"""Facts of GGUF files for the list of models: the config that they stand for, and the reason for a refusal."""

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from attention_service.models.checkpoint_facts import Input
from attention_service.modules.checkpoints.gguf_header import GgufHeader

_SPLIT: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_TYPES: Final = {
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2",
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
    "t5encoder": "t5",
}  # fmt: skip
"""Model types of transformers by the architecture of a file, where they differ."""
_TABLES: Final = "integrations/ggml.py", "integrations/gguf/gguf_config_mapping.py"
_TABLE: Final = {"GGUF_CONFIG_MAPPING", "GGUF_CONFIG_ARCHS"}
_ENCODING: Final = ("t5", "umt5")
OTHER_NUMBERS: Final = (
    "logit_scale", "residual_scale", "embedding_scale", "attention.scale", "attention.clamp_kqv",
    "attention.max_alibi_bias", "attention.temperature_scale", "attention.temperature_length", "expert_weights_scale",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
"""Entries that change what a model computes, and that transformers does not read for any architecture."""
_CLASS: Final = re.compile(r'\("([\w-]+)", "(\w+(?:ForCausalLM|LMHeadModel|T5ForConditionalGeneration))"\)')
"""A row of the tables of transformers, from a model type to the class that generates."""
_NEUTRAL: Final = {0, 1}


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The entries of a config.json that the list of models reads."""
    kind = _TYPES.get(header.architecture, header.architecture)
    if kind == "llama" and header.of_model("attention.sliding_window"):
        kind = "mistral"
    named = _class_names().get(kind)
    classes = {} if named is None else {"architectures": [named]}
    return {"model_type": kind, "is_encoder_decoder": kind in _ENCODING, **classes}


def takes_of(header: GgufHeader) -> list[Input]:
    """The inputs that the tokenizer in a file allows."""
    if "tokenizer.ggml.model" not in header.metadata:
        return []
    spoken: list[Input] = ["messages"] if "tokenizer.chat_template" in header.metadata else []
    pairs: list[Input] = ["target"] if header.architecture in _ENCODING else []
    return ["text", *spoken, *pairs]


def refusal_of_gguf(file: Path, header: GgufHeader) -> str | None:
    """The reason for which a GGUF file is no model; None if a process can try."""
    kind = header.architecture
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
    known = architectures()
    if known and kind not in known and kind.replace("-", "_") not in known and _TYPES.get(kind) not in known:
        return (
            f"transformers reads no GGUF file of architecture {kind[:80]!r}; take the checkpoint that it was made from"
        )
    for name in OTHER_NUMBERS:
        value = header.of_model(name)
        if value is not None and value not in _NEUTRAL:
            return (
                f"its entry {kind}.{name} is {value}, which transformers does not read from a GGUF file, so that the "
                "numbers would be others; take the checkpoint that it was made from"
            )
    return None


@lru_cache(maxsize=1)
def architectures() -> frozenset[str]:
    """The architectures that transformers reads, from the source of its tables: its import takes seconds."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    names: set[str] = set()
    for table in _TABLES:
        file = Path(found.origin).parent / table
        tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.Module([], [])
        for node in tree.body:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)):
                continue
            if isinstance(target := node.targets[0], ast.Name) and target.id in _TABLE:
                names |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return frozenset(names - {"general", "tokenizer"})


@lru_cache(maxsize=1)
def _class_names() -> dict[str, str]:
    found = find_spec("transformers")
    file = Path((found and found.origin) or "").parent / "models" / "auto" / "modeling_auto.py"
    return dict(reversed(_CLASS.findall(file.read_text("utf-8")))) if file.is_file() else {}


def entries_of(header: GgufHeader) -> Mapping[str, Any]:
    """The entries about the model, by their names without its architecture."""
    start = f"{header.architecture}."
    return {name.removeprefix(start): value for name, value in header.metadata.items() if name.startswith(start)}
