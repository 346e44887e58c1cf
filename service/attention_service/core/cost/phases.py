"""Peak memory as an account: named tensors that come and go, and the phases in which they are held together."""

from collections.abc import Mapping
from dataclasses import dataclass

ROUNDING = 4096
"""Bytes for what is too small to count: scalars, indices, flags of rows."""


@dataclass(frozen=True)
class Phase:
    """What is held at a time while one step of a computation runs."""

    name: str
    tensors: Mapping[str, int]
    """Bytes by name."""

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(self.tensors.values())


class Ledger:
    """Tensors as they are made and freed, step by step in the order of the computation."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._largest: dict[str, Phase] = {}

    def hold(self, **tensors: int) -> None:
        """From now on these are there, beside those of the same names."""
        for name, size in tensors.items():
            if size:
                self.held[name] = self.held.get(name, 0) + size

    def drop(self, *names: str) -> None:
        """From now on these are gone."""
        for name in names:
            self.held.pop(name, None)

    def lessen(self, name: str, size: int) -> None:
        """So many bytes of it are gone."""
        self.hold(**{name: -size})
        if not self.held.get(name, 0):
            self.drop(name)

    def rename(self, name: str, to: str) -> None:
        """The same bytes under another name."""
        self.hold(**{to: self.held.pop(name, 0)})

    def phase(self, name: str, **working: int) -> None:
        """A step during which ``working`` is held beside all that is there; of several of a name the largest counts."""
        tensors = dict(self.held)
        for each, size in working.items():
            if size:
                tensors[each] = tensors.get(each, 0) + size
        step = Phase(name, tensors)
        before = self._largest.get(name)
        if before is None or before.bytes < step.bytes:
            self._largest[name] = step

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In the order in which they begin."""
        return tuple(self._largest.values())


def peak_of(phases: tuple[Phase, ...]) -> int:
    """Bytes of the largest phase, and a page for what is too small to count."""
    return max(phase.bytes for phase in phases) + ROUNDING
