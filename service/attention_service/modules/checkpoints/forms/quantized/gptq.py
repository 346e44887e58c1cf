"""GPTQ: words along the rows of the transposed weight, with the group of each. Version 1 stores zero points less 1."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_service.modules.checkpoints.forms.form import Headers, Read
from attention_service.modules.checkpoints.forms.quantized.numbers import (
    PACKED_BITS,
    checked_groups,
    named,
    optional,
    unlike,
    unpacked,
)
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    FLOATS,
    WORDS,
    QuantizedForm,
    StoredPart,
)


def gptq(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    bits = stated.get("bits")
    if type(bits) is not int or bits not in {2, 4, 8}:
        return f"GPTQ of {str(bits)[:40]} bits is not read"
    offset = 0 if stated.get("checkpoint_format") == "gptq_v2" else 1

    def unpack(prefix: str, read: Read) -> Tensor:
        stored = unpacked(read(f"{prefix}qweight").T.contiguous(), bits).T
        scales, zeros = named(read, f"{prefix}scales"), named(read, f"{prefix}qzeros")
        groups, columns = scales.values.shape
        if columns != stored.shape[1]:
            raise unlike(scales.name, scales.values.shape, stored.shape)
        if zeros.values.shape != (groups, math.ceil(columns * bits / PACKED_BITS)):
            raise unlike(zeros.name, zeros.values.shape, stored.shape)
        given = optional(read, f"{prefix}g_idx")
        if given is None:
            order = torch.arange(len(stored)) // math.ceil(len(stored) / groups)
        else:
            order = checked_groups(given, len(stored), groups)
        zero = unpacked(zeros.values, bits)[:, :columns] + offset
        return ((stored - zero[order]) * scales.values.float()[order]).T.contiguous()

    def size(prefix: str, headers: Headers, _: Read) -> Sequence[int]:
        rows, columns = headers[f"{prefix}qweight"].shape
        return columns, rows * (PACKED_BITS // bits)

    parts = (
        StoredPart("qweight", WORDS),
        StoredPart("scales", FLOATS),
        StoredPart("qzeros", WORDS),
        StoredPart("g_idx", frozenset({"I32", "I64"}), (1,), required=stated.get("desc_act") is True),
    )
    return QuantizedForm(f"GPTQ int{bits}", parts, unpack, size)
