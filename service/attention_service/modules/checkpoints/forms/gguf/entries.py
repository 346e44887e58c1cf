"""Entries of a GGUF file about its model, each counted as read when it is taken."""

import math
from collections.abc import Collection
from typing import Any, Final

from attention_service.modules.checkpoints.forms.gguf.gguf_header import GgufHeader

_REQUIRED: Final = object()


class UnreadableGguf(ValueError):
    """The reason for which a GGUF file is no model of this server."""


class GgufEntries:
    """The entries and tensors of a file, by their names without its architecture. ``read``: the entries taken so far.

    What a model computes may depend on any entry, so that those that nobody took are told (``unread``).
    """

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.read: set[str] = set()

    @property
    def tensors(self) -> Collection[str]:
        """The names of the tensors."""
        return self.header.tensors

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """An entry. Raises UnreadableGguf without it, if it has no default."""
        self.read.add(name)
        value = self.header.of_model(name)
        if value is None:
            if default is _REQUIRED:
                raise UnreadableGguf(f"it has no entry {self.header.architecture}.{name}")
            return default
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """An entry that is a number. An array of one number many times, as for every layer, is that number."""
        value = self.take(name, default)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise UnreadableGguf(f"its {self._named(name)} differs from layer to layer, which its class has not")
            value = value[0]
        if value is not default and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise UnreadableGguf(f"its {self._named(name)} is no number")
        if isinstance(value, float) and not math.isfinite(value):
            raise UnreadableGguf(f"its {self._named(name)} is {value}; expected a finite number")
        return value

    def count(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> Any:
        """An entry that is a whole number."""
        value = self.number(name, default)
        if value is not default and (not isinstance(value, int) or value < least):
            raise UnreadableGguf(f"its {self._named(name)} is {value}; expected a whole number of at least {least}")
        return value

    def layers(self, name: str = "block_count", default: Any = _REQUIRED) -> Any:
        """An entry that is a number of layers, of which each has a tensor."""
        layers = self.count(name, default)
        if layers > len(self.tensors):
            raise UnreadableGguf(f"its {self._named(name)} is {layers}, and it has {len(self.tensors)} tensors")
        return layers

    def by_layer(self, name: str, layers: int) -> list[int]:
        """An entry that is a whole number above zero for each layer: one for all, or an array with one for each."""
        value = self.take(name)
        numbers = value if isinstance(value, list) else [value] * layers
        if len(numbers) != layers or not all(type(number) is int and number > 0 for number in numbers):
            raise UnreadableGguf(
                f"its {self._named(name)} is {str(value)[:80]}; expected a whole number above zero, or one for each of "
                f"its {layers} layers"
            )
        return numbers

    def text(self, name: str, default: str) -> str:
        """An entry that is a text."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise UnreadableGguf(f"its {self._named(name)} is {str(value)[:80]}; expected a text")
        return value

    def flag(self, name: str) -> bool:
        """An entry that is true or false, by default false."""
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise UnreadableGguf(f"its {self._named(name)} is {str(value)[:80]}; expected true or false")
        return value

    def skip(self, *names: str) -> None:
        """Count entries as read that say nothing of their own for this architecture."""
        self.read.update(names)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor, as PyTorch has it. Raises UnreadableGguf without it."""
        if tensor not in self.header.tensors:
            raise UnreadableGguf(f"it has no tensor {tensor}")
        return self.header.tensors[tensor][1]

    def rows(self, tensor: str, dimension: int = 0) -> int:
        """A size of a tensor."""
        shape = self.shape(tensor)
        if dimension >= len(shape):
            raise UnreadableGguf(f"its tensor {tensor} has {len(shape)} dimensions; expected more than {dimension}")
        return shape[dimension]

    def has(self, tensor: str) -> bool:
        """True if its first layer, or the file, has a tensor."""
        return tensor in self.header.tensors or f"blk.0.{tensor}" in self.header.tensors

    @property
    def unread(self) -> list[str]:
        """The entries about the model that nobody took, by their whole names, sorted."""
        start = f"{self.header.architecture}."
        names = (name for name in self.header.metadata if name.startswith(start))
        return sorted(name for name in names if name.removeprefix(start) not in self.read)

    def _named(self, name: str) -> str:
        return f"{self.header.architecture}.{name}"
