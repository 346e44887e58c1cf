"""Control vectors as GGUF files: a tensor ``direction.N`` ``[d]`` for layer N, in float32.

llama.cpp adds it behind layer N, counted from 0, and takes no ``direction.0`` (``common_control_vector_load``). Other
entries are those of repeng: ``controlvector.model_hint``, the kind of model, and ``controlvector.layer_count``.
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attention_contract.errors import InvalidCheckpoint, InvalidRequest
from attention_service.modules.checkpoints.forms.gguf.gguf_header import FLOATS, GgufHeader, read_header

ARCHITECTURE: Final = "controlvector"
FIRST_LAYER: Final = 1
"""The first layer that files have: llama.cpp adds nothing behind layer 0."""
_DIRECTION: Final = re.compile(r"direction\.(0|[1-9]\d{0,3})")
_FILE: Final = "vector.gguf"


class ControlVector(NamedTuple):
    """The content of a file."""

    directions: dict[int, NDArray[np.float32]]
    """``[d]`` by layer."""
    model_hint: str | None


def read_control_vector(data: bytes, param: str) -> ControlVector:
    """Read a file. Raises InvalidRequest, for the field ``param``, for one that is no control vector."""
    _check_package(param)
    with TemporaryDirectory(prefix="attention-vector-") as folder:
        file = Path(folder) / _FILE
        file.write_bytes(data)
        try:
            header = read_header(file)
        except InvalidCheckpoint as fault:
            raise InvalidRequest.at(param, fault.detail.removeprefix("checkpoint: ")) from None
        _check(header, param)
        try:
            directions = _directions(file)
        except (ValueError, KeyError, IndexError, OverflowError, TypeError) as fault:
            raise InvalidRequest.at(param, f"the package gguf cannot read it: {str(fault)[:200]}") from None
    hint = header.of_model("model_hint")
    return ControlVector(dict(sorted(directions.items())), hint[:80] if isinstance(hint, str) else None)


def write_control_vector(directions: Mapping[int, NDArray[Any]], model_type: str | None) -> bytes:
    """Return the file of directions ``[d]`` by layer, from ``FIRST_LAYER`` on. Raises InvalidRequest without gguf."""
    _check_package("Accept")
    import gguf  # noqa: PLC0415  # the extra gguf

    with TemporaryDirectory(prefix="attention-vector-") as folder:
        file = Path(folder) / _FILE
        writer = gguf.GGUFWriter(file, ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", model_type or "unknown")
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(directions))
        for layer, direction in sorted(directions.items()):
            writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(direction, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file.read_bytes()


def _check(header: GgufHeader, param: str) -> None:
    """Raise InvalidRequest unless a file has directions of one width and nothing else."""
    if header.architecture != ARCHITECTURE:
        raise InvalidRequest.at(
            param, f"its general.architecture is {header.architecture[:80]!r}; expected {ARCHITECTURE!r}"
        )
    if not header.tensors:
        raise InvalidRequest.at(param, "it has no directions")
    for name, (kind, shape) in header.tensors.items():
        if _DIRECTION.fullmatch(name) is None:
            raise InvalidRequest.at(param, f"it has a tensor {name[:80]!r}; expected direction.N, with N a layer")
        if len(shape) != 1 or kind not in FLOATS:
            raise InvalidRequest.at(
                param, f"{name} has shape {[*shape]} and type {kind or 'unknown'}; expected one dimension and F32"
            )


def _directions(file: Path) -> dict[int, NDArray[np.float32]]:
    import gguf  # noqa: PLC0415  # the extra gguf

    stored = gguf.GGUFReader(file).tensors
    # Copied: the file, which is mapped, is removed.
    return {
        int(tensor.name.partition(".")[2]): np.array(
            gguf.dequantize(tensor.data, tensor.tensor_type), np.float32
        ).reshape(-1)
        for tensor in stored
    }


def _check_package(param: str) -> None:
    if find_spec("gguf") is None:
        raise InvalidRequest.at(
            param,
            "GGUF files are read and written by the package gguf, which this server lacks; install its extra "
            "(attention-service[gguf])",
        )
