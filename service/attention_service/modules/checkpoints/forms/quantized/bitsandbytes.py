"""bitsandbytes (0.50): int8 with a scale for each row, and NF4 with scales that may be quantized themselves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Headers, Read
from attention_service.modules.checkpoints.forms.quantized.numbers import named, optional, unlike
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    FLOATS,
    QuantizedForm,
    StoredPart,
    is_size,
    stored_shape,
)
from attention_service.modules.checkpoints.json_objects import UnreadableJson, json_object

_STATE: Final = "weight.quant_state.bitsandbytes__nf4"
_STATE_BYTES: Final = 2**16
_NESTED: Final = "weight.nested_absmax", "weight.nested_quant_map"


def bitsandbytes(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    if stated.get("load_in_4bit") or stated.get("_load_in_4bit"):
        nf4 = stated.get("bnb_4bit_quant_type", "fp4") == "nf4"
        return _nf4() if nf4 else "its numbers of 4 bits are FP4; this server reads NF4"
    return _int8()


def _int8() -> QuantizedForm:
    def unpack(prefix: str, read: Read) -> Tensor:
        stored, scale = read(f"{prefix}weight").float(), named(read, f"{prefix}SCB")
        if len(scale.values) != len(stored):
            raise unlike(scale.name, scale.values.shape, stored.shape)
        return stored * (scale.values.float() / 127)[:, None]

    parts = StoredPart("weight", frozenset({"I8"})), StoredPart("SCB", FLOATS, (1,))
    return QuantizedForm("bitsandbytes int8", parts, unpack, stored_shape("weight"))


@dataclass(frozen=True)
class _QuantState:
    """The sizes of an NF4 weight, which a file has as JSON in a tensor of bytes."""

    shape: list[int]
    block: int
    """Numbers for each scale."""
    nested_block: int
    """Scales for each scale of scales."""
    nested_offset: float

    @classmethod
    def read(cls, prefix: str, read: Read) -> "_QuantState":
        """Read it. Raises InvalidCheckpoint if an entry is missing or has another type."""
        name = f"{prefix}{_STATE}"
        try:
            stated = json_object(bytes(read(name).tolist()))
        except UnreadableJson as why:
            raise InvalidCheckpoint.at("checkpoint", f"{name} {why}", tensor=name) from why
        shape, block, nested = stated.get("shape"), stated.get("blocksize"), stated.get("nested_blocksize", 1)
        offset = stated.get("nested_offset", 0.0)
        if not isinstance(shape, list) or not shape or not all(map(is_size, shape)):
            raise _wrong(name, "shape", shape, "a list of sizes")
        for entry, value in (("blocksize", block), ("nested_blocksize", nested)):
            if not is_size(value):
                raise _wrong(name, entry, value, "a whole number above zero")
        if type(offset) not in {int, float} or not abs(offset) < math.inf:
            raise _wrong(name, "nested_offset", offset, "a number")
        return cls(shape, int(block), nested, float(offset))  # type: ignore[arg-type]


def _wrong(name: str, entry: str, value: Any, expected: str) -> InvalidCheckpoint:
    return InvalidCheckpoint.at(
        "checkpoint", f"{name} says {entry} {str(value)[:80]}; expected {expected}", tensor=name, entry=entry
    )


def _nf4() -> QuantizedForm:
    def unpack(prefix: str, read: Read) -> Tensor:
        state = _QuantState.read(prefix, read)
        stored = read(f"{prefix}weight").flatten()
        levels = torch.stack([stored >> 4, stored & 15], 1).flatten().long()
        absmax = named(read, f"{prefix}weight.absmax")
        scales = absmax.values.float()
        if (codes := optional(read, f"{prefix}weight.nested_quant_map")) is not None:
            whole = named(read, f"{prefix}weight.nested_absmax")
            if len(codes.values) != 256:
                raise unlike(codes.name, codes.values.shape, stored.shape)
            outer = whole.values.float().repeat_interleave(state.nested_block)[: len(scales)]
            if len(outer) != len(scales):
                raise unlike(whole.name, whole.values.shape, stored.shape)
            scales = codes.values.float()[absmax.values.long()] * outer + state.nested_offset
        table = named(read, f"{prefix}weight.quant_map")
        if len(table.values) != 16:
            raise unlike(table.name, table.values.shape, stored.shape)
        count = math.prod(state.shape)
        scale = scales.repeat_interleave(min(state.block, count))[:count]
        if len(scale) != count or not len(levels) - 2 < count <= len(levels):
            raise unlike(absmax.name, absmax.values.shape, state.shape)
        return (table.values.float()[levels[:count]] * scale).view(state.shape)

    def size(prefix: str, headers: Headers, read: Read) -> Sequence[int]:
        shape = _QuantState.read(prefix, read).shape
        numbers = 2 * math.prod(headers[f"{prefix}weight"].shape)
        if not numbers - 2 < math.prod(shape) <= numbers:
            raise InvalidCheckpoint.at(
                "checkpoint", f"{prefix}{_STATE} says shape {str(shape)[:80]}, and {prefix}weight holds {numbers} "
                "numbers", tensor=f"{prefix}{_STATE}",
            )  # fmt: skip
        return shape

    def needs(prefix: str, headers: Headers) -> Iterable[str]:
        """Scales of a byte each have scales of their own."""
        absmax = headers.get(f"{prefix}weight.absmax")
        nested = any(prefix + name in headers for name in _NESTED) or (absmax is not None and absmax.dtype == "U8")
        return [prefix + name for name in _NESTED] if nested else ()

    parts = (
        StoredPart("weight", frozenset({"U8"}), (1, 2)),
        StoredPart(_STATE, frozenset({"U8"}), (1,), most=_STATE_BYTES),
        StoredPart("weight.absmax", FLOATS | {"U8"}, (1,)),
        StoredPart("weight.quant_map", FLOATS, (1,)),
        *(StoredPart(name, FLOATS, (1,), required=False) for name in _NESTED),
    )
    return QuantizedForm("bitsandbytes NF4", parts, unpack, size, needs)
