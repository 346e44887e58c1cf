"""The layer of each call of an attention module, of a model whose layers may share modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from attention_transformers.model_layers import AttentionModule, LayerKey


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
