"""Headers of GGUF files: their metadata and the types of their tensors, without the tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.store_files import open_regular, reason

GGUF: Final = ".gguf"
"""The ending of their names."""
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_MOST: Final = 2**22
"""The most entries of an array, and the most tensors."""
_LISTED: Final = 2**12
"""The most numbers of an array that are kept: enough for one a layer, and less than one a token of a vocabulary."""
_REMEMBERED: Final = 1024
"""The headers, and reasons for which files have none, that are remembered."""
_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types of tensors, by number, that the package gguf dequantizes."""
_FILES: Final = {
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 21: "Q2_K_S",
    22: "IQ3_XS", 27: "IQ3_M", 29: "IQ2_M",
}  # fmt: skip
"""Mixtures of types, by the number of ``general.file_type``; other files are named by their commonest type."""
FLOATS: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are no quantization."""


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    metadata: Mapping[str, Any]
    """Its entries. An array of texts, or of more than 4,096 numbers, such as those of a vocabulary, is its length."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type and shape of each tensor, the shape as PyTorch has it."""

    @property
    def architecture(self) -> str:
        """The name of its kind of model, by which its other entries are called."""
        return str(self.metadata["general.architecture"])

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
        file = _FILES.get(self.metadata.get("general.file_type", -1))
        mixture = file if file and file.startswith(common[:4]) else common
        return FLOATS.get(common, mixture)

    @property
    def float_bytes(self) -> int:
        """Bytes of its tensors as float32."""
        return 4 * sum(prod(shape) for _, shape in self.tensors.values())


def read_header(file: Path) -> GgufHeader:
    """The header of a file, or the refusal of it, read anew once the file has changed. Raises InvalidCheckpoint."""
    try:
        seen = file.stat()
    except OSError as fault:
        raise _unreadable(file, fault) from fault
    found = _read(file, seen.st_mtime_ns, seen.st_size)
    if isinstance(found, GgufHeader):
        return found
    raise _unreadable(file, found) from found


def _unreadable(file: Path, fault: Exception) -> InvalidCheckpoint:
    why = reason(fault) if isinstance(fault, OSError) else str(fault) or type(fault).__name__
    return InvalidCheckpoint.at("checkpoint", f"{file.name} is not a readable GGUF file: {why[:200]}")


@lru_cache(maxsize=_REMEMBERED)
def _read(file: Path, _changed: int, size: int) -> GgufHeader | OSError | ValueError:
    """The header of a file of this time and size, or why it has none."""
    try:
        # Read, and not mapped: a map of a file that is cut meanwhile ends the process.
        with os.fdopen(open_regular(file), "rb", buffering=2**18) as opened:
            return _Reader(opened, size).header()
    except (OSError, ValueError) as fault:
        return fault.with_traceback(None)
    except struct.error as fault:
        return ValueError(str(fault))


@dataclass
class _Reader:
    """A file that is read from its beginning."""

    file: BinaryIO
    size: int
    """Its bytes. Nothing in its header may claim more."""

    def header(self) -> GgufHeader:
        magic, version, tensors, entries = self.unpacked("4sIQQ")
        if magic != b"GGUF" or version not in {2, 3}:
            raise ValueError("expected the first bytes GGUF, and version 2 or 3")
        if max(tensors, entries) > _MOST:
            raise ValueError(f"it says {tensors} tensors and {entries} entries, more than {_MOST}")
        metadata = {self.text(): self.value(*self.unpacked("I")) for _ in range(entries)}
        if "general.architecture" not in metadata:
            raise ValueError("it has no general.architecture")
        return GgufHeader(metadata, dict(self.tensor() for _ in range(tensors)))

    def taken(self, count: int) -> bytes:
        """The next bytes. Raises ValueError if the file has fewer."""
        found = self.file.read(count) if count <= self.size else b""
        if len(found) < count:
            raise ValueError("it ends inside its header")
        return found

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
        if count > _MOST:
            raise ValueError(f"an array has {count} entries, more than {_MOST}")
        if inner in _SCALARS:
            form = f"{count}{_SCALARS[inner]}"
            if count <= _LISTED:
                return list(self.unpacked(form))
            self.taken(struct.calcsize(f"<{form}"))
            return count
        if inner != _STRING:
            raise ValueError(f"an array has entries of type {inner}")
        for _ in range(count):  # a vocabulary
            self.taken(int.from_bytes(self.taken(8), "little"))
        return count

    def tensor(self) -> tuple[str, tuple[str, tuple[int, ...]]]:
        name = self.text()
        (rank,) = self.unpacked("I")
        if rank > 4:
            raise ValueError(f"{name[:80]} has {rank} dimensions; expected at most 4")
        shape = self.unpacked(f"{rank}Q")[::-1]
        kind, _ = self.unpacked("IQ")
        return name, (_TYPES.get(kind, f"type {kind}"), shape)
