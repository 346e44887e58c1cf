"""FP8 with a scale for each block of rows and columns, or for the whole, as DeepSeek V3 has it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attention_service.modules.checkpoints.forms.form import Read
from attention_service.modules.checkpoints.forms.quantized.numbers import named, scaled
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    ANY_RANK,
    FP8,
    SCALES,
    QuantizedForm,
    StoredPart,
    is_size,
    stored_shape,
)


def fp8(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    block = stated.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(is_size(size) for size in block)):
        return f"its weight_block_size is {str(block)[:40]}; expected two sizes"

    def unpack(prefix: str, read: Read) -> Tensor:
        return scaled(read(f"{prefix}weight").float(), named(read, f"{prefix}weight_scale_inv"), block=block)

    parts = StoredPart("weight", FP8), StoredPart("weight_scale_inv", SCALES, ANY_RANK)
    return QuantizedForm("FP8", parts, unpack, stored_shape("weight"))
