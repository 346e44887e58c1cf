"""compressed-tensors (0.20): numbers of a byte each, or packed into words, with scales of rows, groups or blocks."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.forms.form import Headers, Read
from attention_service.modules.checkpoints.forms.quantized.numbers import (
    PACKED_BITS,
    Named,
    checked_groups,
    named,
    optional,
    scaled,
    unlike,
    unpacked,
)
from attention_service.modules.checkpoints.forms.quantized.quantized_form import (
    ANY_RANK,
    FP8,
    SCALES,
    WORDS,
    QuantizedForm,
    StoredPart,
    is_size,
    stored_shape,
)

_BITS: Final = {"int4": 4, "int8": 8}
_STORED_DTYPES: Final = {"int8": frozenset({"I8"}), "float8": FP8}
_PLAIN_FORMATS: Final = {"int-quantized", "float-quantized", "naive-quantized"}
_INTEGERS: Final = frozenset({"I32", "I64"})


def compressed(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    groups = stated.get("config_groups")
    kinds = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()] if isinstance(
        groups, Mapping
    ) else []  # fmt: skip
    entries = [kind for kind in kinds if isinstance(kind, Mapping)]
    if not entries or len(entries) != len(kinds):
        return "its config_groups do not say how weights are stored"
    numbers = {f"{entry.get('type', 'int')}{entry.get('num_bits', 8)}"[:40] for entry in entries}
    form = str(stated.get("format"))[:40]
    zeros = all(entry.get("symmetric") is False for entry in entries)
    if form in _PLAIN_FORMATS and numbers <= _STORED_DTYPES.keys():
        return _plain(entries, numbers, zeros=zeros)
    if form == "pack-quantized" and len(numbers) == 1 and numbers <= _BITS.keys():
        ordered = all(entry.get("actorder") == "group" for entry in entries)
        return _packed(numbers.pop(), zeros=zeros, ordered=ordered)
    return f"compressed-tensors of format {form} with {' and '.join(sorted(numbers))} are not read"


def _plain(entries: Sequence[Mapping[str, Any]], numbers: set[str], *, zeros: bool) -> QuantizedForm:
    """Numbers of a byte each."""
    blocks = [entry.get("block_structure") for entry in entries if entry.get("strategy") == "block"]
    fits = bool(blocks) and isinstance(blocks[0], list) and len(blocks[0]) == 2 and all(map(is_size, blocks[0]))
    block = blocks[0] if fits else None

    def unpack(prefix: str, read: Read) -> Tensor:
        zero = optional(read, f"{prefix}weight_zero_point")
        return scaled(read(f"{prefix}weight").float(), named(read, f"{prefix}weight_scale"), zero, block)

    stored = frozenset[str]().union(*(_STORED_DTYPES[number] for number in numbers))
    parts = (
        StoredPart("weight", stored),
        StoredPart("weight_scale", SCALES, ANY_RANK),
        StoredPart("weight_zero_point", stored | _INTEGERS | SCALES, ANY_RANK, required=zeros),
    )
    label = "FP8" if numbers == {"float8"} else "int8"
    return QuantizedForm(f"compressed-tensors {label}", parts, unpack, stored_shape("weight"))


def _packed(numbers: str, *, zeros: bool, ordered: bool) -> QuantizedForm:
    """Numbers in words along the columns; their zero points in words along the rows."""
    bits = _BITS[numbers]
    middle = 2.0 ** (bits - 1)

    def unpack(prefix: str, read: Read) -> Tensor:
        words = read(f"{prefix}weight_packed")
        rows, columns = _shape(prefix, words.shape, read)
        stored = unpacked(words, bits)[:, :columns]
        scale, zero = named(read, f"{prefix}weight_scale"), optional(read, f"{prefix}weight_zero_point")
        if zero is not None:
            if (
                zero.values.shape[0] != -(-rows * bits // PACKED_BITS)
                or zero.values.shape[1:] != scale.values.shape[1:]
            ):
                raise unlike(zero.name, zero.values.shape, stored.shape)
            zero = Named(zero.name, unpacked(zero.values.T.contiguous(), bits)[:, :rows].T - middle)
        order = optional(read, f"{prefix}weight_g_idx")
        if order is not None and order.values.shape == (columns,) and int(order.values.max()) < 0:
            order = None  # -1 in each place: no order
        if order is not None:
            if scale.values.ndim != 2 or len(scale.values) != rows:
                raise unlike(scale.name, scale.values.shape, stored.shape)
            groups = checked_groups(order, columns, scale.values.shape[1])
            scale = Named(scale.name, scale.values[:, groups])
            zero = None if zero is None else Named(zero.name, zero.values[:, groups])
        return scaled(stored - middle, scale, zero)

    def _shape(prefix: str, words: Sequence[int], read: Read) -> tuple[int, int]:
        """The rows and columns that a file states. Raises InvalidCheckpoint if they are not those of its words."""
        stated = read(f"{prefix}weight_shape").tolist()
        most = words[1] * (PACKED_BITS // bits)
        if len(stated) != 2 or stated[0] != words[0] or not most - PACKED_BITS // bits < stated[1] <= most:
            raise InvalidCheckpoint.at(
                "checkpoint", f"{prefix}weight_shape says {stated}, and {prefix}weight_packed holds {words[0]} rows of "
                f"up to {most} columns", tensor=f"{prefix}weight_shape",
            )  # fmt: skip
        return int(stated[0]), int(stated[1])

    def size(prefix: str, headers: Headers, read: Read) -> Sequence[int]:
        return _shape(prefix, headers[f"{prefix}weight_packed"].shape, read)

    parts = (
        StoredPart("weight_packed", WORDS),
        StoredPart("weight_scale", SCALES, ANY_RANK),
        StoredPart("weight_shape", _INTEGERS, (1,), most=2),
        StoredPart("weight_zero_point", WORDS, required=zeros),
        StoredPart("weight_g_idx", _INTEGERS, (1,), required=ordered),
    )
    return QuantizedForm(f"compressed-tensors {numbers}", parts, unpack, size)
