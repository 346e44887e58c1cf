"""Rotary positions of a config.json: ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``."""

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_contract.positions import Rope
from attention_service.modules.checkpoints.family import Entries, is_number

_LENGTH: Final = "original_max_position_embeddings"


def rope_of(
    entries: Entries, head_dim: int, *, theta: float = 10_000.0, partial: float = 1.0, interleaved: bool = False
) -> Rope:
    """The rotation of a block's queries and keys.

    ``theta`` and ``partial`` (the part of a head that turns) are the family's defaults.
    Raises InvalidCheckpoint for a scaling that modules do not have.
    """
    given = parameters_of(entries)
    part = _number(
        given, "partial_rotary_factor", entries.number("partial_rotary_factor", "rotary_pct", default=partial)
    )
    dim = int(head_dim * part)
    return Rope.model_validate(
        {
            "theta": _number(given, "rope_theta", entries.number("rope_theta", "rotary_emb_base", default=theta)),
            "dim": None if dim == head_dim else dim,
            "style": "interleaved" if interleaved else "half",
            "scaling": _scaling(entries, given),
        }
    )


def with_rotation_of(entries: Entries, *, sliding: bool, local: float, full: float) -> Entries:
    """The entries with the rotation of one type of layer in place of those by type.

    Layers that slide have the theta ``local`` and no scaling, the others ``full``, unless ``rope_parameters``
    says more. ``rope_scaling`` changes those of the layers that do not slide.
    """
    given = entries.get("rope_parameters")
    own = given.get("sliding_attention" if sliding else "full_attention") if isinstance(given, Mapping) else None
    rotation: dict[str, Any] = {"rope_theta": local if sliding else full}
    for entry in own, None if sliding else entries.get("rope_scaling"):
        rotation |= entry if isinstance(entry, Mapping) else {}
    own_entries = {"rope_parameters": rotation, "rope_scaling": None, "rope_theta": None}
    return replace(entries, config={**entries.config, **own_entries})


def parameters_of(entries: Entries) -> Mapping[str, Any]:
    """The object that describes the rotation; empty where there is none. Transformers prefers ``rope_scaling``."""
    name = "rope_scaling" if entries.get("rope_scaling") else "rope_parameters"
    given = entries.get(name, default={})
    if not isinstance(given, Mapping):
        raise InvalidCheckpoint(f"{name} of config.json is not an object", param="checkpoint")
    return given


def _scaling(entries: Entries, given: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if "short_factor" in given:
        kind = "longrope"  # Phi-3's first checkpoints call it yarn
    if kind in {"default", None}:
        return None
    longest = entries.get("max_position_embeddings")
    original = entries.get(_LENGTH) or given.get(_LENGTH) or longest
    match kind:
        case "linear":
            return {"name": "linear", "factor": given.get("factor")}
        case "dynamic":
            length = entries.count("max_position_embeddings")
            return {"name": "ntk", "factor": given.get("factor"), _LENGTH: length}
        case "llama3":
            names = "factor", "low_freq_factor", "high_freq_factor"
            return {"name": "llama3", _LENGTH: original} | {name: given.get(name) for name in names}
        case "yarn":
            return {"name": "yarn", _LENGTH: original} | _yarn(given, original, longest)
        case "longrope":
            return {
                "name": "longrope",
                _LENGTH: original,
                "factor": _factor(given, original, longest),
                "short_factor": given.get("short_factor"),
                "long_factor": given.get("long_factor"),
                "attention_factor": given.get("attention_factor"),
            }
    raise InvalidCheckpoint(
        f"config.json says rope_type {str(kind)[:80]!r}, which is not supported; expected one of default, linear, "
        "dynamic, llama3, yarn, longrope",
        param="checkpoint",
        entry="rope_type",
    )


def _yarn(given: Mapping[str, Any], original: Any, longest: Any) -> dict[str, Any]:
    factor = _factor(given, original, longest)
    scaling = {"factor": factor} | {
        name: given[name]
        for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")
        if given.get(name) is not None
    }
    mscale, all_dims = (_number(given, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if "attention_factor" not in scaling and mscale and all_dims and is_number(factor) and factor > 1:
        scaling["attention_factor"] = (0.1 * mscale * log(factor) + 1) / (0.1 * all_dims * log(factor) + 1)
    return scaling


def _factor(given: Mapping[str, Any], original: Any, longest: Any) -> Any:
    """The factor, or the ratio of the lengths."""
    factor = given.get("factor")
    if factor is not None or not original or not longest:
        return factor
    for name, value in (("max_position_embeddings", longest), (_LENGTH, original)):
        if not is_number(value):
            raise _no_number(name, value)
    return longest / original


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = default if given.get(name) is None else given[name]
    if not is_number(value):
        raise _no_number(name, value)
    return float(value)


def _no_number(name: str, value: Any) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"config.json says {name} {str(value)[:80]!r} of its rotary positions; expected a number", param="checkpoint",
        entry=name,
    )  # fmt: skip
