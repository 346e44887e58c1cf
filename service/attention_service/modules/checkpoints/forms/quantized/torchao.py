"""torchao (0.18): numbers of a byte each with scales of rows or groups, as its safetensors files have them."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

from attention_service.modules.checkpoints.forms.form import Read
from attention_service.modules.checkpoints.forms.quantized.numbers import named, optional, scaled, unlike
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    ANY_RANK,
    FLOATS,
    FP8,
    SCALES,
    QuantizedForm,
    StoredPart,
    stored_shape,
)

_CONFIGS: Final = {
    "Int8WeightOnlyConfig": "int8", "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8WeightOnlyConfig": "FP8", "Float8DynamicActivationFloat8WeightConfig": "FP8",
    "IntxWeightOnlyConfig": "", "Int8DynamicActivationIntxWeightConfig": "",
}  # fmt: skip
"""The configs whose weights are numbers of a byte each, and the words for these; of Intx it names them."""
_MAIN: Final = "_weight_qdata"
_DEPTH: Final = 4
"""Levels of configs in configs that are looked through."""


def torchao(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    configs = dict(_configs(stated.get("quant_type"), _DEPTH))
    unread = sorted(configs.keys() - _CONFIGS.keys())
    if unread or not configs:
        return f"torchao's {unread[0][:80] if unread else 'quant_type'} is not read; {', '.join(_CONFIGS)} are"
    words = set()
    for name, options in configs.items():
        dtype, packing = (_value(options.get(key)) for key in ("weight_dtype", "intx_packing_format"))
        if packing is not None and packing != "UNPACKED_TO_INT8":
            return f"torchao's intx_packing_format {str(packing)[:40]} is not read; UNPACKED_TO_INT8 is"
        words.add(_CONFIGS[name] or str(dtype or "int8")[:8])

    def unpack(prefix: str, read: Read) -> Tensor:
        zero, before = (optional(read, f"{prefix}_weight_{part}") for part in ("zero_point", "act_pre_scale"))
        weight = scaled(read(f"{prefix}{_MAIN}").float(), named(read, f"{prefix}_weight_scale"), zero)
        if before is None:
            return weight
        if before.values.numel() not in {1, weight.shape[1]}:
            raise unlike(before.name, before.values.shape, weight.shape)
        return weight * before.values.float().flatten()  # which multiplies what the layer reads

    integers = frozenset({"I8", "I16", "I32", "I64"})
    parts = (
        StoredPart(_MAIN, FP8 | {"I8"}),
        StoredPart("_weight_scale", SCALES, ANY_RANK),
        # Only weights of Intx always have one: a file of the others without it says nothing of it.
        StoredPart(
            "_weight_zero_point", integers | FLOATS, ANY_RANK, required=all(not _CONFIGS[name] for name in configs)
        ),
        StoredPart("_weight_act_pre_scale", FLOATS, ANY_RANK, required=False),
    )
    return QuantizedForm(f"torchao {' and '.join(sorted(words))}", parts, unpack, stored_shape(_MAIN))


def _configs(stated: Any, depth: int) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The configs in the entry ``quant_type``, by their names: one for all layers, or several by the layers' names."""
    if not isinstance(stated, Mapping) or not depth:
        return
    name, options = str(stated.get("_type")), stated.get("_data")
    if name not in {"FqnToConfig", "ModuleFqnToConfig"} and isinstance(options, Mapping):
        yield name, options
        return
    for value in stated.values():
        yield from _configs(value, depth - 1)


def _value(stated: Any) -> Any:
    return stated.get("_data") if isinstance(stated, Mapping) else stated
