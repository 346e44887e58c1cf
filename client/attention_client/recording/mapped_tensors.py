"""Tensors of a safetensors file that stay on the disk until they are read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from attention_contract.errors import Unreadable
from attention_contract.recording_tensors import Sliceable
from attention_contract.tensors import Array


class MappedTensors(Mapping[str, Array]):
    """The tensors of a file by name. ``tensors[name]`` reads one whole, ``part(name)[1, :4]`` a slice of it alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = cast("Any", safe_open(path, framework="np"))
        except SafetensorError as fault:
            raise Unreadable(f"{path} is not a readable safetensors file: {fault}") from None
        self._names = tuple(self._file.keys())

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata."""
        return self._file.metadata() or {}

    def part(self, name: str) -> Sliceable:
        """A tensor that reads the slices that it is asked for. Raises KeyError."""
        self._check(name)
        return cast("Sliceable", self._file.get_slice(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, read from the header. Raises KeyError."""
        self._check(name)
        return tuple(self._file.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Array:
        self._check(name)
        return cast("Array", self._file.get_tensor(name))

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own test would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _check(self, name: str) -> None:
        if name not in self._names:
            raise KeyError(name)
