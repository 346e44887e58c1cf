"""Peak memory by phases, in each of which named tensors are held together."""

from collections.abc import Mapping
from dataclasses import dataclass

ROUNDING = 4096
"""Bytes for what is too small to count: scalars, indices, flags of rows."""


@dataclass(frozen=True)
class Phase:
    """Bytes held at the same time during one step of a computation."""

    name: str
    tensors: Mapping[str, int]
    """Bytes by name."""

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.tensors.values())


def peak_of(phases: tuple[Phase, ...]) -> int:
    """Bytes of the largest phase, and a page for what is too small to count."""
    return max(phase.bytes for phase in phases) + ROUNDING
