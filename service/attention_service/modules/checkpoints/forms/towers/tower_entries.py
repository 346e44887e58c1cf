"""Entries of a config that timm or OpenCLIP wrote, each read as the type that it must have, or refused by its name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from attention_contract.errors import InvalidCheckpoint
from attention_service.modules.checkpoints.family import is_number

_LARGEST_SIDE: Final = 2**14
"""Pixels."""
_LARGEST_NUMBER: Final = 1e6


@dataclass(frozen=True)
class TowerEntries:
    """An object of a config. An entry that is absent, or null, has its default; each read raises InvalidCheckpoint."""

    stated: Mapping[str, Any]
    place: str
    """Its name in messages, such as ``model_args of config.json``."""

    def wrong(self, name: str, expected: str) -> InvalidCheckpoint:
        """The error for an entry of another type."""
        return InvalidCheckpoint.at(
            "checkpoint", f"{self.place} says {name} {str(self.stated.get(name))[:80]}; expected {expected}", entry=name
        )

    def object(self, name: str) -> "TowerEntries":
        """An object in it; an empty one where there is none."""
        value = self.stated.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return TowerEntries(value or {}, f"{name} of {self.place.rpartition(' of ')[2]}")

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.stated.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "text")
        return value or default

    def flag(self, name: str) -> bool:
        """A boolean, by default False."""
        value = self.stated.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def count(self, name: str, default: int, least: int = 1) -> int:
        """A whole number."""
        value = self.stated.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value < 2**31:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number of these bounds."""
        value = self.stated.get(name)
        if value is None:
            return default
        if not is_number(value) or not least <= value <= most:
            raise self.wrong(name, f"a number from {least} to {most}")
        return float(value)

    def three(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """A number for each of three colours, from a list of them, or from one for all."""
        value = self.stated.get(name)
        values = default if value is None else value if isinstance(value, list | tuple) else [value] * 3
        if len(values) != 3 or not all(is_number(member) and abs(member) <= _LARGEST_NUMBER for member in values):
            raise self.wrong(name, "three numbers")
        return tuple(map(float, values))

    def size(self, name: str, default: tuple[int, int]) -> tuple[int, int]:
        """Height and width in pixels, from one number or from a list that ends with both."""
        value = self.stated.get(name)
        sides = default if value is None else value[-2:] if isinstance(value, list | tuple) else [value] * 2
        if len(sides) != 2 or not all(type(side) is int and 1 <= side <= _LARGEST_SIDE for side in sides):
            raise self.wrong(name, f"a size in pixels of 1 to {_LARGEST_SIDE}")
        return sides[0], sides[1]
