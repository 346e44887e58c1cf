"""States of a text that a model keeps in its modules instead of in its past: of recurrences, offsets of positions."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

Held = Sequence[Tensor | None]
"""The states of one text."""


class _State(NamedTuple):
    module: nn.Module
    name: str
    first: Tensor | None
    """Its value before any text."""


class ModuleStates:
    """The attributes of a model's modules that belong to the text of the last pass.

    They are found by a pass: the tensors that it has set.
    """

    def __init__(self, model: nn.Module) -> None:
        self._possible: list[_State] | None = [
            _State(module, name, value)
            for module in model.modules()
            for name, value in vars(module).items()
            if value is None or isinstance(value, Tensor)
        ]
        """The attributes that a pass could set; None once one has shown which it sets."""
        self._changing: list[_State] = []

    def learn(self) -> None:
        """Find what the pass before has set, the first time. It is one that keeps a past."""
        if self._possible is not None:
            changed = [slot for slot in self._possible if getattr(slot.module, slot.name, None) is not slot.first]
            self._changing = [slot for slot in changed if isinstance(getattr(slot.module, slot.name, None), Tensor)]
            self._possible = None

    def take(self) -> Held:
        """Return the states of the text of the last pass, and leave the modules as before any."""
        held: list[Tensor | None] = []
        for slot in self._changing:
            held.append(getattr(slot.module, slot.name))
            setattr(slot.module, slot.name, slot.first)
        return held

    def give(self, held: Held) -> None:
        """Restore the module states of a text before its next pass."""
        for slot, value in zip(self._changing, held, strict=False):
            setattr(slot.module, slot.name, value)
