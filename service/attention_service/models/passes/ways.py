"""The two ways of taking a model's attention, by one interface: it is computed here, or observed in the model."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from torch import nn

from attention_service.models.passes.attention_pass import AttentionPass
from attention_service.models.passes.growing_rotations import GrowingRotations
from attention_service.models.passes.module_taps import NOTHING_BESIDE, ModuleTaps
from attention_transformers.model_layers import AttentionModule, LayerKey

Way = Literal["computed", "observed"]


class LayerTurns:
    """The layers of the calls of attention modules, in the order of one pass."""

    def __init__(self, modules: Sequence[tuple[AttentionModule, tuple[LayerKey, ...]]]) -> None:
        """``modules``: each with the keys of its layers, in the order in which they run."""
        self._keys = {id(one.module): keys for one, keys in modules}
        self._modules = {key: one.module for one, keys in modules for key in keys}
        self._calls: dict[int, int] = {}
        self._noted: list[nn.Module] | None = None

    def restart(self) -> None:
        """Count anew, for another pass over the model."""
        self._calls.clear()
        if self._noted is not None:
            self._noted.clear()

    @contextmanager
    def noting(self) -> Iterator[list[nn.Module]]:
        """Note the modules of the calls of a pass, in their order, until the block ends. Yields those of the last."""
        self._noted = noted = list[nn.Module]()
        try:
            yield noted
        finally:
            self._noted = None

    def module_of(self, layer: LayerKey) -> nn.Module:
        """The module that attends in a layer."""
        return self._modules[layer]

    def layer_of(self, module: nn.Module) -> LayerKey:
        """The layer of a call, which counts as one if several layers share the module."""
        if self._noted is not None:
            self._noted.append(module)
        keys = self._keys[id(module)]
        if len(keys) == 1:
            return keys[0]
        number = self._calls[id(module)] = self._calls.get(id(module), -1) + 1
        return keys[number % len(keys)]


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
        if self.rotations.limit is not None:
            self.rotations.restart()

    def remove(self) -> None:
        """Leave the model as it was: an observed one was not changed."""
