"""The class of transformers that stored tensors belong to: that whose tensors have their names and shapes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from attention_client.conversion.stored_tensors import ConversionError

_KINDS: Final = (
    "MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
)  # fmt: skip
"""The tasks of the classes that are tried, besides the model without a head: of a decoder, the causal ones first."""
_MARKS: Final = {
    "attention.self.query.weight": "bert",
    "attention.q_lin.weight": "distilbert",
    "albert_layers.0.attention.query.weight": "albert",
    "SelfAttention.q.weight": "t5",
    "attn.c_attn.weight": "gpt2",
    "mlp.gate_proj.weight": "llama",
    "attention.query_key_value.weight": "gpt_neox",
}
"""The ending of a tensor's name that tells a type of models."""
_OLD_ENDINGS: Final = {".gamma": ".weight", ".beta": ".bias"}
"""Names of the tensors of norms before transformers 2, and now."""
_MATRIX: Final = 2
_MOST_SEGMENTS: Final = 3
"""Parts of a name that a training program may have put before it."""


def model_type_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor], wanted: str | None) -> tuple[str, str]:
    """Return the type of a model and the reason to take it. Raises ConversionError."""
    known = transformers.CONFIG_MAPPING
    if wanted is not None:
        if wanted not in known:
            raise ConversionError(f"transformers knows no model type {wanted!r}; take one such as bert, gpt2 or llama")
        return wanted, "as it is asked for"
    if (said := config.get("model_type")) in known:
        return str(said), "as config.json says"
    for ending, kind in _MARKS.items():
        if (mark := next((name for name in tensors if name.endswith(ending)), None)) is not None:
            return kind, f"its tensor {mark} is named as those of such models"
    raise ConversionError(
        f"config.json has the model_type {said!r}, which transformers does not know; name one with --as"
    )


@dataclass(frozen=True)
class ClassMatch:
    """The tensors of a checkpoint as those of one class."""

    kind: Any
    """The class of transformers."""
    config: Any
    names: Mapping[str, str]
    """The stored name of each tensor of the class."""
    missing: Sequence[str]
    """Tensors of the class that no stored one is."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """The names among these that only shapes tell."""

    @property
    def prefixes(self) -> Counter[tuple[str, str]]:
        """The beginnings of names that were taken away and put before, with the number of tensors."""
        renamings = Counter[tuple[str, str]]()
        for name, stored in self.names.items():
            if name in self.heads or name == stored:
                continue
            common = _common_end(name, stored)
            renamings[stored[: len(stored) - common], name[: len(name) - common]] += 1
        return renamings


def matched_class(config: Mapping[str, Any], model_type: str, tensors: Mapping[str, Tensor]) -> ClassMatch:
    """Return the class that has a place for most of the tensors, and lacks none. Raises ConversionError."""
    matches = [_match(kind, made, tensors) for kind, made in _candidates(config, model_type, tensors)]
    whole = [match for match in matches if not match.missing]
    if not whole:
        if not matches:
            raise ConversionError(f"transformers has no class of {model_type} that could be tried")
        best = min(matches, key=lambda match: len(match.missing))
        names = ", ".join(best.missing[:5]) + (f" and {len(best.missing) - 5} more" if len(best.missing) > 5 else "")
        raise ConversionError(
            f"no class of {model_type} has all its tensors: {best.kind.__name__} lacks {names}. Correct the sizes in "
            "config.json, or name another type with --as"
        )
    return max(whole, key=lambda match: len(match.names) - len(match.heads) / 2)  # the first of those alike


def _candidates(
    config: Mapping[str, Any], model_type: str, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """Yield the classes of a type, that of config.json first, each with its config."""
    own = [name for name in config.get("architectures") or () if isinstance(name, str)]
    kinds = sorted(_KINDS, key=lambda task: task != "CAUSAL_LM") if config.get("is_decoder") else _KINDS
    mappings = [vars(modeling_auto).get(f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in kinds]
    listed = [mapping.get(model_type) for mapping in (*mappings, modeling_auto.MODEL_MAPPING_NAMES)]
    names = [name for listing in (own, *listed) for name in ([listing] if isinstance(listing, str) else listing or ())]
    kind = transformers.CONFIG_MAPPING[model_type]
    for name in dict.fromkeys(names):
        candidate = getattr(transformers, name, None)
        if getattr(candidate, "config_class", None) is kind:
            for classes in _class_counts(config, name, tensors):
                given = {key: value for key, value in config.items() if key not in {"model_type", "auto_map"}}
                with _config_faults(name):
                    made = kind.from_dict(given | classes)
                yield candidate, made


@contextmanager
def _config_faults(name: str) -> Iterator[None]:
    """Raise ConversionError for what a config that no model of a class can have makes transformers raise."""
    try:
        yield
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError, RuntimeError) as fault:
        reason = f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
        raise ConversionError(f"config.json makes no {name} ({reason})") from None


def _class_counts(config: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The numbers of classes that a head may have: that of config.json, or those of the matrices of the checkpoint."""
    if "Classification" not in name or {"id2label", "num_labels"} & config.keys():
        return [{}]
    width = config.get("hidden_size", config.get("d_model", config.get("n_embd", config.get("dim"))))
    counts = {len(x) for key, x in tensors.items() if x.ndim == _MATRIX and x.shape[1] == width and _is_last(key)}
    return [{"num_labels": count} for count in sorted(counts) if count != width] or [{}]


def _is_last(name: str) -> bool:
    """True for a tensor outside the layers, as those of heads are."""
    return not any(part.isdecimal() for part in name.split(".")[:-2]) and "embedding" not in name


def _match(kind: Any, config: Any, tensors: Mapping[str, Tensor]) -> ClassMatch:
    with _config_faults(kind.__name__), torch.device("meta"):
        model = kind(config)
    expected: dict[str, Tensor] = model.state_dict(keep_vars=True)
    prefix = f"{model.base_model_prefix}."
    names = dict[str, str]()
    for stored, tensor in tensors.items():
        for name in _possible_names(stored, prefix):
            if name in expected and name not in names and expected[name].shape == tensor.shape:
                names[name] = stored
                break
    alike = dict[int, list[str]]()
    for name, parameter in expected.items():
        alike.setdefault(id(parameter), []).append(name)
    groups = [group for group in alike.values() if not any(name in names for name in group)]
    heads = _by_shape(groups, expected, {name: x for name, x in tensors.items() if name not in names.values()})
    missing = [group[0] for group in groups if group[0] not in heads]
    return ClassMatch(kind, config, names | heads, missing, heads)


def _possible_names(stored: str, prefix: str) -> Iterator[str]:
    """The names that a stored tensor may have in a class, the likeliest first."""
    ending = next((old for old in _OLD_ENDINGS if stored.endswith(old)), None)
    if ending is not None:
        stored = stored.removesuffix(ending) + _OLD_ENDINGS[ending]
    parts = stored.split(".")
    for count in range(min(_MOST_SEGMENTS, len(parts) - 1) + 1):
        rest = ".".join(parts[count:])
        yield from (rest, prefix + rest)


def _by_shape(
    groups: Sequence[Sequence[str]], expected: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> dict[str, str]:  # fmt: skip
    """The tensors of a head by their shapes, if all that are missing are such and each has one alone."""
    names = dict[str, str]()
    for group in groups:
        name = group[0]
        ending = name.rpartition(".")[2]
        fits = [
            stored for stored, x in left.items()
            if x.shape == expected[name].shape and stored.endswith(ending) and _is_last(stored)
        ]  # fmt: skip
        if len(fits) != 1 or not _is_last(name) or fits[0] in names.values():
            return {}
        names[name] = fits[0]
    return names


def _common_end(one: str, other: str) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[-1 - count] == other[-1 - count]:
        count += 1
    return count
