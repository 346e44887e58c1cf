"""MLX: groups of columns as scale · number + bias."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from attention_service.modules.checkpoints.forms.form import Headers, Read
from attention_service.modules.checkpoints.forms.quantized.numbers import PACKED_BITS, named, scaled, spread, unpacked
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    FLOATS,
    WORDS,
    QuantizedForm,
    StoredPart,
    is_size,
)

_BITS: Final = (2, 4, 8)


def mlx(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that an entry ``quantization`` states, or the reason for which it is not read.

    Layers may have entries of their own, by their names.
    """
    entries = [stated, *(settings for settings in stated.values() if isinstance(settings, Mapping))]
    for entry in entries:
        bits, group, mode = (entry.get(name, stated.get(name)) for name in ("bits", "group_size", "mode"))
        if type(bits) is not int or bits not in _BITS or not is_size(group) or (mode is not None and mode != "affine"):
            return (
                f"MLX of {str(bits)[:40]} bits in groups of {str(group)[:40]}, mode {str(mode)[:40]}, is not read; 2, "
                "4 and 8 bits, affine, are"
            )

    def bits_of(prefix: str) -> int:
        own = stated.get(prefix.rstrip("."))
        return int((own if isinstance(own, Mapping) else {}).get("bits", stated["bits"]))

    def unpack(prefix: str, read: Read) -> Tensor:
        numbers = unpacked(read(f"{prefix}weight"), bits_of(prefix))
        return scaled(numbers, named(read, f"{prefix}scales")) + spread(named(read, f"{prefix}biases"), numbers)

    def size(prefix: str, headers: Headers, _: Read) -> Sequence[int]:
        rows, words = headers[f"{prefix}weight"].shape
        return rows, words * (PACKED_BITS // bits_of(prefix))

    parts = StoredPart("weight", WORDS), StoredPart("scales", FLOATS), StoredPart("biases", FLOATS)
    return QuantizedForm(f"MLX int{stated['bits']}", parts, unpack, size)
