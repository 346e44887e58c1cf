"""Tensors from files and into files, by suffix: ``.npy``, ``.npz``, ``.safetensors`` and ``.json``.

A file with several tensors names them by the request field that they stand for; ``inputs.npz:q`` names another member.
``-`` is standard input, in any of these formats; the content says which. As an output, ``-`` is standard output, in
safetensors; ``-.npy``, ``-.npz`` and ``-.json`` choose another format.
"""

import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson
import typer
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from attention_contract.base import WireModel
from attention_contract.tensor_files import DTYPE_NAMES
from attention_contract.tensors import DTYPES, from_buffer
from attention_contract.wire import to_json, to_safetensors

SUFFIXES = (".npy", ".npz", ".safetensors", ".json")
_BROKEN = (ValueError, SafetensorError, KeyError, EOFError, BadZipFile, zlib.error, NotImplementedError)
"""Errors of the libraries for a file whose content does not fit its suffix; the last, for an unusual zip."""


def read(source: str, field: str) -> Any:
    """Read the tensor that a file holds for a request field."""
    source, member = _member(source)
    content = _load(source, field)
    if _has_members(content):
        if member is None:
            member = field if field in content or len(content) > 1 else next(iter(content), field)
        if member not in content:
            names = _in_order(content)
            held = (
                f"holds {', '.join(map(repr, names))}; choose one, as in {source}:{names[0]}" if names else "is empty"
            )
            raise _bad(field, f"{source} has no {member!r}; it {held}")
        content = content[member]
    if content is None:
        raise _bad(field, f"{source} holds null where a tensor is expected")
    return content


def read_all(source: str, field: str) -> dict[str, Any]:
    """Read every tensor of a file, by name."""
    content = _load(source, field)
    if not _has_members(content):
        raise _bad(field, f"{source} holds one tensor without a name; expected .npz, .safetensors or a JSON object")
    return dict(content)


def read_json(text: str, field: str) -> Any:
    """Read JSON from the option itself, or from the file that it names."""
    try:
        content = text.encode() if text.lstrip().startswith(("{", "[")) else _bytes(text)
        return orjson.loads(content)
    except OSError as fault:
        raise _bad(field, f"{text}: expected JSON or a file of it: {fault.strerror}") from None
    except orjson.JSONDecodeError as fault:
        raise _bad(field, f"not JSON: {fault}") from None


def read_object(text: str, field: str) -> dict[str, Any]:
    """Read a JSON object from the option itself, or from the file that it names."""
    content = read_json(text, field)
    if not isinstance(content, dict):
        raise _bad(field, f"expected a JSON object, got {type(content).__name__}")
    return content


def _member(source: str) -> tuple[str, str | None]:
    path, colon, member = source.rpartition(":")
    return (path, member) if colon and Path(path).suffix in SUFFIXES else (source, None)


def _in_order(content: Mapping[str, Any]) -> list[str]:
    """Return the names of a file's tensors, a number in them in its place: layer 10 comes after layer 9."""
    return sorted(
        content, key=lambda name: [part.zfill(9) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )


def _has_members(content: Any) -> bool:
    """Return True if the content maps names to tensors; an object with a dtype and a shape is a tensor itself."""
    return isinstance(content, Mapping) and not {"dtype", "shape"} <= set(content)


def is_source(text: str) -> bool:
    """Return True if a text names a file, or standard input; it is told by its suffix, also if there is none."""
    return text == "-" or Path(text).suffix in SUFFIXES or os.path.exists(text)


def read_inputs(source: str, field: str) -> dict[str, Any]:
    """Read the inputs of a command: every tensor of a file by name, or its only tensor as the query.

    The output of an earlier reply, in a file without a query, is the query too.
    """
    content = _load(source, field)
    if not _has_members(content):
        return {"query": content}
    if "query" in content:
        return dict(content)
    chief = "output" if "output" in content else next(iter(content)) if len(content) == 1 else None
    if chief is None:
        held = ", ".join(map(repr, _in_order(content)))
        raise _bad(field, f"{source} holds {held or 'nothing'}, but no 'query' and no 'output'")
    return {"query": content[chief]}


def _load(source: str, field: str) -> Any:
    suffix = Path(source).suffix
    try:
        if source == "-" or suffix in SUFFIXES:
            content = _bytes(source)
            suffix = _format(content) if source == "-" else suffix
        if suffix == ".npy":
            return np.load(BytesIO(content), allow_pickle=False)
        if suffix == ".npz":
            with np.load(BytesIO(content), allow_pickle=False) as archive:
                return dict(archive)
        if suffix == ".safetensors":
            return {
                name: from_buffer(bytes(tensor["data"]), DTYPES[DTYPE_NAMES[tensor["dtype"]]], tuple(tensor["shape"]))
                for name, tensor in deserialize(content)  # type: ignore[no-untyped-call]
            }
        if suffix == ".json":
            return orjson.loads(content)
    except OSError as fault:
        raise _bad(field, f"{source}: {fault.strerror or fault}") from None
    except _BROKEN as fault:
        raise _bad(field, f"{source} does not read as {suffix}: {fault}") from None
    raise _bad(field, f"{source}: expected a file that ends in {', '.join(SUFFIXES)}, or - for standard input")


def _format(content: bytes) -> str:
    """Recognize the format of standard input by its first bytes, and return its suffix."""
    if content.startswith(b"\x93NUMPY"):
        return ".npy"
    if content.startswith(b"PK\x03\x04"):
        return ".npz"
    # Eight bytes of length, and a JSON header of that length.
    header = int.from_bytes(content[:8], "little")
    return ".safetensors" if content[8:9] == b"{" and header <= len(content) - 8 else ".json"


def _bytes(source: str) -> bytes:
    if source != "-":
        return Path(source).read_bytes()
    content = sys.stdin.buffer.read()
    if not content:
        raise OSError(None, "standard input is empty; only one option can read it")
    return content


def _bad(field: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"--{field.replace('_', '-')}")


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


_PIPE = "-"


def to_pipe(path: Path | None) -> bool:
    """Return True if the path stands for standard output."""
    return path is not None and str(path) in {_PIPE, *(f"{_PIPE}{suffix}" for suffix in SUFFIXES)}


def ending_in(*suffixes: str, pipe: bool = False) -> Callable[[Path | None], Path | None]:
    """Return an option's callback that checks the path to write to before anything is asked."""

    def check(path: Path | None) -> Path | None:
        if path is None or (pipe and to_pipe(path)):
            return path
        if path.suffix.lower() not in suffixes:
            raise typer.BadParameter(f"expected a file that ends in {' or '.join(suffixes)}; got {path}")
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.absolute().parent}")
        return path

    return check


writable = ending_in(*SUFFIXES, pipe=True)


def tensors(value: Any) -> dict[str, NDArray[Any]]:
    """Return every tensor of a reply, or of a part of it, by its dotted name."""
    return dict(_walk(value.model_dump(by_alias=True) if isinstance(value, WireModel) else value, ""))


def _walk(value: Any, path: str) -> list[tuple[str, NDArray[Any]]]:
    if isinstance(value, np.ndarray):
        return [(path, value)]
    if isinstance(value, Mapping):
        return [
            named_tensor
            for key, item in value.items()
            for named_tensor in _walk(item, f"{path}.{key}" if path else str(key))
        ]
    return []


def write(path: Path, reply: WireModel | Mapping[str, NDArray[Any]], chief: str | None = None) -> None:
    """Write a reply, or tensors by name.

    .safetensors and .json hold all of a reply, .npz its tensors, and .npy its chief or only tensor.
    """
    suffix = (str(path).removeprefix(_PIPE) or ".safetensors") if to_pipe(path) else path.suffix
    if suffix == ".json":
        content = to_json(reply)
    elif suffix != ".safetensors":
        content = _numpy_file(path, suffix, tensors(reply), chief)
    elif isinstance(reply, WireModel):
        content = b"".join(to_safetensors(reply, "reply"))
    else:
        content = save({name: np.ascontiguousarray(array) for name, array in reply.items()})
    if to_pipe(path):
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        path.write_bytes(content)


def _numpy_file(path: Path, suffix: str, given: Mapping[str, NDArray[Any]], chief: str | None) -> bytes:
    bfloat16 = DTYPES["bfloat16"]  # which numpy's files do not know
    arrays = {name: array.astype(np.float32) if array.dtype == bfloat16 else array for name, array in given.items()}
    file = BytesIO()
    if suffix == ".npz":
        np.savez(file, **arrays)  # type: ignore[arg-type]
        return file.getvalue()
    if chief not in arrays and len(arrays) == 1:
        chief = next(iter(arrays))
    if chief not in arrays:
        raise typer.BadParameter(f"{path} holds one tensor; the reply has {', '.join(arrays)}: write .npz instead")
    np.save(file, arrays[chief])
    return file.getvalue()
