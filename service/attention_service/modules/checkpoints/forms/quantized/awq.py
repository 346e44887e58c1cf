"""AWQ in its "gemm" order: eight columns in each word of the transposed weight."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from attention_service.modules.checkpoints.forms.form import Headers, Read
from attention_service.modules.checkpoints.forms.quantized.numbers import named, unlike, unpacked
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    FLOATS,
    WORDS,
    QuantizedForm,
    StoredPart,
)

_ORDER: Final = 0, 4, 1, 5, 2, 6, 3, 7
"""The nibble of a number of four bytes in which each of eight columns lies."""


def awq(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    bits, version = stated.get("bits"), str(stated.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        return f"AWQ of {str(bits)[:40]} bits and version {version[:40]} is not read; 4 bits of version gemm are"

    def columns(x: Tensor) -> Tensor:
        nibbles = unpacked(x, 4)
        return nibbles.view(len(x), -1, 8)[:, :, list(_ORDER)].reshape(len(x), -1)

    def unpack(prefix: str, read: Read) -> Tensor:
        stored = columns(read(f"{prefix}qweight"))
        scales, zeros = named(read, f"{prefix}scales"), named(read, f"{prefix}qzeros")
        zero = columns(zeros.values)
        if len(stored) % len(scales.values) or scales.values.shape[1] != stored.shape[1]:
            raise unlike(scales.name, scales.values.shape, stored.shape)
        if zero.shape != scales.values.shape:
            raise unlike(zeros.name, zeros.values.shape, stored.shape)
        group = len(stored) // len(zero)
        scale = scales.values.float().repeat_interleave(group, 0)
        return ((stored - zero.repeat_interleave(group, 0)) * scale).T.contiguous()

    def size(prefix: str, headers: Headers, _: Read) -> Sequence[int]:
        rows, words = headers[f"{prefix}qweight"].shape
        return words * 8, rows

    parts = StoredPart("qweight", WORDS), StoredPart("scales", FLOATS), StoredPart("qzeros", WORDS)
    return QuantizedForm("AWQ int4", parts, unpack, size)
