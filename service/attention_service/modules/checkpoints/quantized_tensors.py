"""Quantized weights of safetensors files as the float matrices that they stand for.

A form says which tensors of a file make one weight, and how. What is computed afterwards is of float numbers, so that
edits, gradients and shared passes are as of any other model; activations are not rounded, whatever the form says.
Sources: the formats of compressed-tensors 0.20, bitsandbytes 0.50, GPTQ (its version 1 stores zero points less 1),
AWQ (its "gemm" order), torchao 0.18 and MLX, and the blocks of FP8 as DeepSeek V3 has them.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attention_service.modules.checkpoints.quantized_numbers import PACKED_BITS, scaled, spread, unlike, unpacked

QUANTIZATION: Final = "quantization_config", "quantization"
"""Names of the entry; the second is MLX's."""
Read = Callable[[str], Tensor]
"""Reads a tensor by its name."""
Shape = Callable[[str], Sequence[int]]
"""The shape of a tensor by its name."""
_BITS: Final = {"int4": 4, "int8": 8}
_AWQ_ORDER: Final = 0, 4, 1, 5, 2, 6, 3, 7
"""The nibble of a number of four bytes in which each of eight columns lies."""
_STATE: Final = "weight.quant_state.bitsandbytes__nf4"
_OF_ACTIVATIONS: Final = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale", "weight_format"}
)
"""Tensors of a module by which activations are rounded, which happens nowhere here."""
_TORCHAO: Final = {
    "Int8WeightOnlyConfig": "int8", "Int8DynamicActivationInt8WeightConfig": "int8",
    "Float8WeightOnlyConfig": "FP8", "Float8DynamicActivationFloat8WeightConfig": "FP8",
    "IntxWeightOnlyConfig": "", "Int8DynamicActivationIntxWeightConfig": "",
}  # fmt: skip
"""The configs of torchao whose weights are numbers of a byte each, and the words for these; of Intx it names them."""


@dataclass(frozen=True)
class QuantizedForm:
    """A way of storing weights."""

    label: str
    """The words of replies, such as ``GPTQ int4``."""
    main: str
    """The tensor of a module without which its weight is not stored so, such as ``qweight``."""
    parts: frozenset[str]
    """All tensors of a module that its weight is made of."""
    unpack: Callable[[str, Read], Tensor]
    """Returns the float32 weight of a module, by its prefix."""
    shape: Callable[[str, Shape, Read], Sequence[int]]
    """Returns the shape of the same; of AWQ and GPTQ with the numbers that fill up the last words."""

    def weights(self, names: Iterable[str]) -> dict[str, str]:
        """The weights that are stored so among tensors of these names, and the prefix of the module of each."""
        known = set(names)
        found = {}
        for name in known:
            prefix = name.removesuffix(self.main)
            if prefix != name and any(prefix + other in known for other in self.parts - {self.main}):
                found[f"{prefix}weight"] = prefix
        return found

    def hidden(self, weights: Mapping[str, str]) -> set[str]:
        """The tensors that belong to weights that are stored so, by what ``weights`` returns."""
        return {prefix + part for prefix in weights.values() for part in self.parts | _OF_ACTIVATIONS}


def quantization_of(config: Mapping[str, Any]) -> Any:
    """The entry of a config, or of its part for text, that says how weights are quantized; None without one."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    return next((part[entry] for part in parts for entry in QUANTIZATION if part.get(entry)), None)


def form_of(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """The form that a ``quantization_config`` states, or the reason for which it is not read."""
    bits = [stated.get(f"{own}load_in_{count}bit") for own in ("", "_") for count in (4, 8)]
    otherwise = "bitsandbytes" if any(bits) else "mlx" if {"group_size", "bits"} <= stated.keys() else None
    method = stated.get("quant_method") or otherwise
    read = _FORMS.get(str(method))
    return f"{str(method)[:80]} is none of {', '.join(_FORMS)}" if read is None else read(stated)


# ── the forms ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fp8(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """FP8 with a scale for each block of rows and columns, or for the whole."""
    block = stated.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(_is_size(each) for each in block)
    ):
        return f"its weight_block_size is {str(block)[:40]}; expected two sizes"

    def unpack(prefix: str, read: Read) -> Tensor:
        return scaled(read(f"{prefix}weight").float(), read(f"{prefix}weight_scale_inv"), prefix, block=block)

    return QuantizedForm("FP8", "weight", frozenset({"weight", "weight_scale_inv"}), unpack, _stored)


def _compressed(stated: Mapping[str, Any]) -> QuantizedForm | str:
    groups = stated.get("config_groups")
    kinds = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    entries = [kind for kind in kinds if isinstance(kind, Mapping)]
    if not entries or len(entries) != len(kinds):
        return "its config_groups do not say how weights are stored"
    numbers = {f"{entry.get('type', 'int')}{entry.get('num_bits', 8)}" for entry in entries}
    form = str(stated.get("format"))[:40]
    blocks = [entry.get("block_structure") for entry in entries if entry.get("strategy") == "block"]
    block = blocks[0] if blocks and isinstance(blocks[0], list) and all(map(_is_size, blocks[0])) else None
    if form in {"int-quantized", "float-quantized", "naive-quantized"} and numbers <= {"int8", "float8"}:
        parts = frozenset({"weight", "weight_scale", "weight_zero_point"})

        def plain(prefix: str, read: Read) -> Tensor:
            zero = _optional(read, f"{prefix}weight_zero_point")
            return scaled(read(f"{prefix}weight").float(), read(f"{prefix}weight_scale"), prefix, zero, block)

        label = "FP8" if numbers == {"float8"} else "int8"
        return QuantizedForm(f"compressed-tensors {label}", "weight", parts, plain, _stored)
    if form == "pack-quantized" and len(numbers) == 1 and numbers <= _BITS.keys():
        (name,) = numbers
        bits = _BITS[name]

        def packed(prefix: str, read: Read) -> Tensor:
            rows, columns = (int(size) for size in read(f"{prefix}weight_shape").tolist())
            stored = unpacked(read(f"{prefix}weight_packed"), bits)[:, :columns]
            zero = _optional(read, f"{prefix}weight_zero_point")
            if zero is not None:  # packed along the rows
                zero = unpacked(zero.T.contiguous(), bits)[:, :rows].T - 2.0 ** (bits - 1)
            order = _optional(read, f"{prefix}weight_g_idx")
            scale = read(f"{prefix}weight_scale")
            if order is not None and int(order.min()) >= 0:
                scale, zero = scale[:, order.long()], None if zero is None else zero[:, order.long()]
            return scaled(stored - 2.0 ** (bits - 1), scale, prefix, zero)

        def size(prefix: str, _: Shape, read: Read) -> Sequence[int]:
            return [int(each) for each in read(f"{prefix}weight_shape").tolist()]

        parts = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"})
        return QuantizedForm(f"compressed-tensors {name}", "weight_packed", parts, packed, size)
    return f"compressed-tensors of format {form} with {' and '.join(sorted(numbers))} are not read"


def _gptq(stated: Mapping[str, Any]) -> QuantizedForm | str:
    bits = stated.get("bits")
    if bits not in {2, 4, 8}:
        return f"GPTQ of {bits} bits is not read"
    width, offset = int(bits), 0 if stated.get("checkpoint_format") == "gptq_v2" else 1

    def unpack(prefix: str, read: Read) -> Tensor:
        stored = unpacked(read(f"{prefix}qweight").T.contiguous(), width).T
        scales = read(f"{prefix}scales").float()
        zeros = unpacked(read(f"{prefix}qzeros"), width)[:, : scales.shape[1]] + offset
        order = _optional(read, f"{prefix}g_idx")
        if order is None:
            order = torch.arange(len(stored)) // math.ceil(len(stored) / len(scales))
        if len(stored) != len(order) or int(order.max()) >= len(scales):
            raise unlike(prefix, "g_idx", order.shape, stored.shape)
        order = order.long()
        return ((stored - zeros[order]) * scales[order]).T.contiguous()

    def size(prefix: str, shape: Shape, _: Read) -> Sequence[int]:
        rows, columns = shape(f"{prefix}qweight")
        return columns, rows * (PACKED_BITS // width)

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    return QuantizedForm(f"GPTQ int{width}", "qweight", parts, unpack, size)


def _awq(stated: Mapping[str, Any]) -> QuantizedForm | str:
    bits, version = stated.get("bits"), str(stated.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        return f"AWQ of {bits} bits and version {version[:40]} is not read; 4 bits of version gemm are"

    def columns(x: Tensor) -> Tensor:
        nibbles = unpacked(x, 4)
        return nibbles.view(len(x), -1, 8)[:, :, list(_AWQ_ORDER)].reshape(len(x), -1)

    def unpack(prefix: str, read: Read) -> Tensor:
        stored, scales = columns(read(f"{prefix}qweight")), read(f"{prefix}scales").float()
        zeros = columns(read(f"{prefix}qzeros"))
        if len(stored) % len(scales) or scales.shape != zeros.shape:
            raise unlike(prefix, "scales", scales.shape, stored.shape)
        each = len(stored) // len(scales)
        return ((stored - zeros.repeat_interleave(each, 0)) * scales.repeat_interleave(each, 0)).T.contiguous()

    def size(prefix: str, shape: Shape, _: Read) -> Sequence[int]:
        rows, columns = shape(f"{prefix}qweight")
        return columns * 8, rows

    return QuantizedForm("AWQ int4", "qweight", frozenset({"qweight", "qzeros", "scales"}), unpack, size)


def _bitsandbytes(stated: Mapping[str, Any]) -> QuantizedForm | str:
    if stated.get("load_in_4bit") or stated.get("_load_in_4bit"):
        nf4 = stated.get("bnb_4bit_quant_type", "fp4") == "nf4"
        return _nf4() if nf4 else "its numbers of 4 bits are FP4; this server reads NF4"
    return _int8()


def _int8() -> QuantizedForm:
    def unpack(prefix: str, read: Read) -> Tensor:
        return read(f"{prefix}weight").float() * (read(f"{prefix}SCB").float() / 127)[:, None]

    parts = frozenset({"weight", "SCB"})
    return QuantizedForm("bitsandbytes int8", "weight", parts, unpack, _stored)


def _nf4() -> QuantizedForm:
    def unpack(prefix: str, read: Read) -> Tensor:
        state = json.loads(bytes(read(f"{prefix}{_STATE}").tolist()))
        stored = read(f"{prefix}weight").flatten().to(torch.uint8)
        levels = torch.stack([stored >> 4, stored & 15], 1).flatten().long()
        scales = read(f"{prefix}weight.absmax")
        if (codes := _optional(read, f"{prefix}weight.nested_quant_map")) is not None:
            whole = read(f"{prefix}weight.nested_absmax").float()
            each = whole.repeat_interleave(int(state["nested_blocksize"]))[: scales.numel()]
            scales = codes.float()[scales.long()] * each + float(state["nested_offset"])
        numbers = read(f"{prefix}weight.quant_map").float()[levels]
        numbers = numbers * scales.float().repeat_interleave(int(state["blocksize"]))[: numbers.numel()]
        shape = [int(size) for size in state["shape"]]
        return numbers[: math.prod(shape)].view(shape)

    def size(prefix: str, _: Shape, read: Read) -> Sequence[int]:
        return [int(each) for each in json.loads(bytes(read(f"{prefix}{_STATE}").tolist()))["shape"]]

    own = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = frozenset({"weight", _STATE, *(f"weight.{name}" for name in own)})
    return QuantizedForm("bitsandbytes NF4", "weight", parts, unpack, size)


def _torchao(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """Numbers of a byte each with scales of rows or groups, as torchao's safetensors files have them."""
    configs = dict(_torchao_configs(stated.get("quant_type")))
    unread = sorted(configs.keys() - _TORCHAO.keys())
    if unread or not configs:
        return f"torchao's {unread[0][:80] if unread else 'quant_type'} is not read; {', '.join(_TORCHAO)} are"
    words = set()
    for name, options in configs.items():
        dtype, packing = (_value(options.get(each)) for each in ("weight_dtype", "intx_packing_format"))
        if packing not in {None, "UNPACKED_TO_INT8"}:
            return f"torchao's intx_packing_format {str(packing)[:40]} is not read; UNPACKED_TO_INT8 is"
        words.add(_TORCHAO[name] or str(dtype or "int8")[:8])

    def unpack(prefix: str, read: Read) -> Tensor:
        zero, before = (_optional(read, f"{prefix}_weight_{part}") for part in ("zero_point", "act_pre_scale"))
        found = scaled(read(f"{prefix}_weight_qdata").float(), read(f"{prefix}_weight_scale"), prefix, zero)
        return found if before is None else found * before.float()  # which multiplies what the layer reads

    def size(prefix: str, shape: Shape, _: Read) -> Sequence[int]:
        return shape(f"{prefix}_weight_qdata")

    parts = frozenset(f"_weight_{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale"))
    return QuantizedForm(f"torchao {' and '.join(sorted(words))}", "_weight_qdata", parts, unpack, size)


def _torchao_configs(stated: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The configs in the entry ``quant_type``, by their names: one for all layers, or several by the layers' names."""
    if not isinstance(stated, Mapping):
        return
    name, options = str(stated.get("_type")), stated.get("_data")
    if name not in {"FqnToConfig", "ModuleFqnToConfig"} and isinstance(options, Mapping):
        yield name, options
        return
    for each in stated.values():
        yield from _torchao_configs(each)


def _value(stated: Any) -> Any:
    return stated.get("_data") if isinstance(stated, Mapping) else stated


def _mlx(stated: Mapping[str, Any]) -> QuantizedForm | str:
    """Groups of columns as scale · number + bias. Layers may have entries of their own, by their names."""
    entries = [stated, *(each for each in stated.values() if isinstance(each, Mapping))]
    for entry in entries:
        bits, group, mode = (entry.get(name, stated.get(name)) for name in ("bits", "group_size", "mode"))
        if bits not in {2, 4, 8} or not _is_size(group) or mode not in {None, "affine"}:
            return f"MLX of {bits} bits in groups of {group}, mode {mode}, is not read; 2, 4 and 8 bits, affine, are"

    def bits_of(prefix: str) -> int:
        own = stated.get(prefix.rstrip("."))
        return int((own if isinstance(own, Mapping) else {}).get("bits", stated["bits"]))

    def unpack(prefix: str, read: Read) -> Tensor:
        numbers = unpacked(read(f"{prefix}weight"), bits_of(prefix))
        biases = read(f"{prefix}biases")
        return scaled(numbers, read(f"{prefix}scales"), prefix) + spread(biases, numbers, prefix, None)

    def size(prefix: str, shape: Shape, _: Read) -> Sequence[int]:
        *rows, words = shape(f"{prefix}weight")
        return *rows, words * (PACKED_BITS // bits_of(prefix))

    return QuantizedForm(f"MLX int{stated['bits']}", "weight", frozenset({"weight", "scales", "biases"}), unpack, size)


_FORMS: Final[Mapping[str, Callable[[Mapping[str, Any]], QuantizedForm | str]]] = {
    "compressed-tensors": _compressed, "fp8": _fp8, "gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes,
    "torchao": _torchao, "mlx": _mlx,
}  # fmt: skip
"""Each ``quant_method`` that is read. MLX's files have none."""


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _stored(prefix: str, shape: Shape, _: Read) -> Sequence[int]:
    return shape(f"{prefix}weight")


def _optional(read: Read, name: str) -> Tensor | None:
    try:
        return read(name)
    except KeyError:
        return None
