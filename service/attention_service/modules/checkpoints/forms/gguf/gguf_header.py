"""Headers of GGUF files: their metadata and the types of their tensors, without the tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.store_files import open_regular, reason

Value = TypeVar("Value")

GGUF: Final = ".gguf"
"""The ending of their names."""
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_ENTRIES: Final = 2**22
"""The most entries of an array, and the most tensors."""
_ALIGNMENT: Final = 32
"""Bytes of which the beginning of the tensors is a multiple, unless ``general.alignment`` says otherwise."""
_MAX_KEPT_NUMBERS: Final = 2**12
"""The most numbers of an array that are kept: enough for one a layer, and less than one a token of a vocabulary."""
_REMEMBERED: Final = 1024
"""The headers, and reasons for which files have none, that are remembered."""


class _Type(NamedTuple):
    """A type of tensors."""

    name: str
    numbers: int
    """Numbers of a block."""
    bytes: int
    """Bytes of a block."""


_TYPES: Final = {
    0: _Type("F32", 1, 4), 1: _Type("F16", 1, 2), 2: _Type("Q4_0", 32, 18), 3: _Type("Q4_1", 32, 20),
    6: _Type("Q5_0", 32, 22), 7: _Type("Q5_1", 32, 24), 8: _Type("Q8_0", 32, 34), 10: _Type("Q2_K", 256, 84),
    11: _Type("Q3_K", 256, 110), 12: _Type("Q4_K", 256, 144), 13: _Type("Q5_K", 256, 176),
    14: _Type("Q6_K", 256, 210), 16: _Type("IQ2_XXS", 256, 66), 17: _Type("IQ2_XS", 256, 74),
    18: _Type("IQ3_XXS", 256, 98), 19: _Type("IQ1_S", 256, 50), 20: _Type("IQ4_NL", 32, 18),
    21: _Type("IQ3_S", 256, 110), 22: _Type("IQ2_S", 256, 82), 23: _Type("IQ4_XS", 256, 136),
    29: _Type("IQ1_M", 256, 56), 30: _Type("BF16", 1, 2), 34: _Type("TQ1_0", 256, 54),
    35: _Type("TQ2_0", 256, 66), 39: _Type("MXFP4", 32, 17),
}  # fmt: skip
"""Types of tensors, by number, that the package gguf dequantizes. Source of the blocks: its ``GGML_QUANT_SIZES``."""
_SMALLEST_TYPE: Final = _Type("", 8, 1)
"""Fewer bytes than a tensor of any type has, for types that are not read."""
_FILES: Final = {
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 21: "Q2_K_S",
    22: "IQ3_XS", 27: "IQ3_M", 29: "IQ2_M",
}  # fmt: skip
"""Mixtures of types, by the number of ``general.file_type``; other files are named by their commonest type."""
FLOATS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are no quantization."""


@dataclass(frozen=True)
class UnkeptArray:
    """An array of a file of which only the length is kept."""

    length: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    metadata: Mapping[str, Any]
    """Its entries. An array of texts, or of more than 4,096 numbers, such as those of a vocabulary, is not kept."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each tensor, the shape as PyTorch has it."""

    @property
    def architecture(self) -> str:
        """The name of its kind of model, by which its other entries are called."""
        named: str = self.metadata["general.architecture"]
        return named

    def of_model(self, name: str, default: Any = None) -> Any:
        """An entry about the model."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @property
    def form(self) -> str:
        """The name of its quantization, as in ``Q4_K_M``, or the dtype of a file without one."""
        sizes: Counter[str] = Counter()
        for kind, shape in self.tensors.values():
            sizes[kind] += prod(shape) if len(shape) > 1 else 0
        common = sizes.most_common(1)[0][0] if sizes else "F32"
        number = self.metadata.get("general.file_type")
        file = _FILES.get(number) if isinstance(number, int) else None
        mixture = file if file and file.startswith(common[:4]) else common
        return FLOATS.get(common, mixture)

    @property
    def unpacked_bytes(self) -> int:
        """Bytes of its tensors, as float32 if they are quantized."""
        width = 2 if self.form in {"float16", "bfloat16"} else 4
        return width * sum(prod(shape) for _, shape in self.tensors.values())


def read_header(file: Path) -> GgufHeader:
    """The header of a file, or the refusal of it, read anew once the file has changed. Raises InvalidCheckpoint."""
    try:
        seen = file.stat()
    except OSError as fault:
        raise _unreadable(file, fault) from fault
    header_or_fault = _read(file, seen.st_mtime_ns, seen.st_size)
    if isinstance(header_or_fault, GgufHeader):
        return header_or_fault
    raise _unreadable(file, header_or_fault) from header_or_fault


def _unreadable(file: Path, fault: Exception) -> InvalidCheckpoint:
    why = reason(fault) if isinstance(fault, OSError) else str(fault) or type(fault).__name__
    return InvalidCheckpoint.at("checkpoint", f"{file.name} is not a readable GGUF file: {why[:200]}")


@lru_cache(maxsize=_REMEMBERED)
def _read(file: Path, _changed: int, size: int) -> GgufHeader | OSError | ValueError:
    """The header of a file of this time and size, or why it has none."""
    try:
        # Read, and not mapped: a map of a file that is cut meanwhile ends the process.
        with os.fdopen(open_regular(file), "rb", buffering=2**18) as opened:
            return _HeaderReader(opened, size).header()
    except (OSError, ValueError) as fault:
        return fault.with_traceback(None)
    except struct.error as fault:
        return ValueError(str(fault))


class _Tensor(NamedTuple):
    """The entry of a tensor."""

    name: str
    type: _Type
    shape: tuple[int, ...]
    offset: int
    """Bytes before it, behind the header."""

    def check(self, most: int) -> None:
        """Raise ValueError if it does not fit into a file with ``most`` bytes behind the header."""
        if 0 in self.shape:
            raise ValueError(f"{self.name[:80]} has shape {[*self.shape]}, which has no number")
        end = self.offset + -(-prod(self.shape) // self.type.numbers) * self.type.bytes
        if end > most:
            raise ValueError(
                f"{self.name[:80]} of shape {[*self.shape]} ends beyond the file, which has {max(most, 0)} bytes of "
                "tensors"
            )


@dataclass
class _HeaderReader:
    """A file that is read from its beginning."""

    file: BinaryIO
    size: int
    """Its bytes. Nothing in its header may claim more."""

    def header(self) -> GgufHeader:
        magic, version, tensors, entries = self.unpacked("4sIQQ")
        if magic != b"GGUF" or version not in {2, 3}:
            raise ValueError("expected the first bytes GGUF, and version 2 or 3")
        if max(tensors, entries) > _MAX_ENTRIES:
            raise ValueError(f"it says {tensors} tensors and {entries} entries, more than {_MAX_ENTRIES}")
        metadata = _once("entry", ((self.text(), self.value(*self.unpacked("I"))) for _ in range(entries)))
        if not isinstance(metadata.get("general.architecture"), str):
            raise ValueError("it has no general.architecture that is a text")
        tensor_headers = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment")
        begin = self.file.tell()
        begin += -begin % (alignment if isinstance(alignment, int) and alignment > 0 else _ALIGNMENT)
        for header in tensor_headers:
            header.check(self.size - begin)
        return GgufHeader(
            metadata, _once("tensor", ((header.name, (header.type.name, header.shape)) for header in tensor_headers))
        )

    def taken(self, count: int) -> bytes:
        """The next bytes. Raises ValueError if the file has fewer."""
        data = self.file.read(count) if count <= self.size else b""
        if len(data) < count:
            raise ValueError("it ends inside its header")
        return data

    def unpacked(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.taken(struct.calcsize(f"<{form}")))

    def text(self) -> str:
        return self.taken(*self.unpacked("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.unpacked(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"an entry has type {kind}; expected 0 to 12")
        inner, count = self.unpacked("IQ")
        if count > _MAX_ENTRIES:
            raise ValueError(f"an array has {count} entries, more than {_MAX_ENTRIES}")
        if inner in _SCALARS:
            form = f"{count}{_SCALARS[inner]}"
            if count <= _MAX_KEPT_NUMBERS:
                return list(self.unpacked(form))
            self.taken(struct.calcsize(f"<{form}"))
            return UnkeptArray(count)
        if inner != _STRING:
            raise ValueError(f"an array has entries of type {inner}")
        for _ in range(count):  # a vocabulary
            self.taken(int.from_bytes(self.taken(8), "little"))
        return UnkeptArray(count)

    def tensor(self) -> "_Tensor":
        name = self.text()
        (rank,) = self.unpacked("I")
        if rank > 4:
            raise ValueError(f"{name[:80]} has {rank} dimensions; expected at most 4")
        shape = self.unpacked(f"{rank}Q")[::-1]
        kind, offset = self.unpacked("IQ")
        return _Tensor(name, _TYPES.get(kind, _SMALLEST_TYPE._replace(name=f"type {kind}")), shape, offset)


def _once(what: str, pairs: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """The pairs as a mapping. Raises ValueError for a name that is there twice."""
    mapping: dict[str, Value] = {}
    for name, value in pairs:
        if name in mapping:
            raise ValueError(f"it has the {what} {name[:80]} twice")
        mapping[name] = value
    return mapping
