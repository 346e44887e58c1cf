"""The two ways of taking a model's attention, by one interface: it is computed here, or observed in the model."""

from contextlib import AbstractContextManager
from typing import Literal

from torch import nn

from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.growing_rotations import GrowingRotations
from attention_service.models.passes.layer_turns import LayerTurns
from attention_service.models.passes.module_taps import NOTHING_BESIDE, ModuleTaps

Way = Literal["computed", "observed"]


class AttentionWay:
    """The attentions of one model, in the passes that ask of them. The defaults are those of an observed model."""

    way: Way = "observed"
    turns: LayerTurns
    rotations: GrowingRotations

    def taps_of(self, module: nn.Module) -> frozenset[str] | None:
        """The taps of an attention that can be asked for; None for all of its spec."""
        raise NotImplementedError

    def taps_beside(self, module: nn.Module) -> ModuleTaps:
        """The taps that the module of an attention makes beside its softmax: none is seen."""
        return NOTHING_BESIDE

    def calls_of(self, module: nn.Module) -> int:
        """The calls of a module that are one attention over values side by side."""
        return 1

    def running(self, attention_pass: AttentionPass) -> AbstractContextManager[AttentionPass]:
        """Let the model's runs until the block ends belong to a pass."""
        raise NotImplementedError

    def restart(self) -> None:
        """Count the calls of shared modules anew, for another pass over the model, and forget the texts before."""
        self.turns.restart()
        self.rotations.restart()

    def remove(self) -> None:
        """Leave the model as it was: an observed one was not changed."""
