"""The outputs of the attentions of a model's layers: what edits of ``output`` change. No vLLM in here.

The module that holds a layer's kernel returns what its last projection has made. Hooks are there while a request edits
an output, and in the trial at start.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from attention_service.core.edits import BoundEdit, apply, begun_at, narrowed
from attention_service.core.problem import Selection

OutputHook = Callable[[int, Tensor], None]
"""Is given a layer and its output ``[T, D]``, which it may change."""


class AttentionOutputs:
    """The modules that hold the kernels of layers."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        """``modules``: by layer."""
        self._modules = modules

    @classmethod
    def of(cls, model: nn.Module, kernels: Mapping[int, nn.Module]) -> "AttentionOutputs":
        """Find the modules that have these kernels as children."""
        layers = {id(kernel): layer for layer, kernel in kernels.items()}
        holders = (
            (layers[id(child)], module)
            for module in model.modules()
            for child in module.children()
            if id(child) in layers
        )
        return cls(dict(holders))

    def hooked(self, layers: Iterable[int], hook: OutputHook) -> AbstractContextManager[object]:
        """Call a hook with the outputs of these layers until the context ends."""
        stack = ExitStack()
        for layer in layers:

            def seen(_: nn.Module, __: Any, output: Tensor, layer: int = layer) -> None:
                hook(layer, output)

            if layer in self._modules:
                stack.callback(self._modules[layer].register_forward_hook(seen).remove)
        return stack

    def trial(self, layers: Sequence[int]) -> "OutputTrial":
        """Watch the passes of the self-test."""
        return OutputTrial({layer: self._modules[layer] for layer in layers if layer in self._modules}, layers)


class OutputTrial:
    """Finds out whether the output of each layer's module is that of its last projection."""

    def __init__(self, modules: Mapping[int, nn.Module], layers: Sequence[int]) -> None:
        """``layers``: those that should be seen."""
        self._modules, self._layers = modules, layers
        self._projected: dict[int, Any] = {}
        self._widths: dict[int, int] = {}
        self._fault: str | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> "OutputTrial":
        """Set the hooks."""
        for layer, module in self._modules.items():
            for child in module.children():
                self._hooks.callback(child.register_forward_hook(self._seeing(layer)).remove)
            self._hooks.callback(module.register_forward_hook(self._comparing(layer)).remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self._projected.clear()

    def verdict(self) -> Mapping[int, int] | str:
        """Return the width of each layer's output, or the reason why outputs are not edited."""
        if self._fault is not None:
            return self._fault
        if missing := [layer for layer in self._layers if layer not in self._widths]:
            return f"the outputs of layers {missing} were not seen"
        return self._widths

    def _seeing(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def seen(child: nn.Module, _: Any, output: Any) -> None:
            # A projection that leaves its sum over the ranks to others has no output of the layer.
            summed = getattr(child, "reduce_results", True)
            self._projected[layer] = (output[0] if isinstance(output, tuple) else output) if summed else None

        return seen

    def _comparing(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def seen(_: nn.Module, __: Any, output: Any) -> None:
            projected: Tensor | None = self._projected.get(layer)
            if projected is None or output is not projected or projected.ndim != 2:
                self._fault = self._fault or f"the output of layer {layer} is not that of its last projection"
            else:
                self._widths[layer] = projected.shape[1]

        return seen


def edit_output(output: Tensor, edits: Sequence[BoundEdit], first: int, begin: int) -> None:
    """Edit the output ``[Q, D]`` of one text's tokens, in place.

    ``first``: the position of the first of them; ``begin``: the first token that is edited.
    """
    places = range(first, first + output.shape[0])
    own = narrowed(edits, Selection(queries=places), 1, 1)
    if begin:
        own = begun_at(own, begin, places, places)
    if own:
        output.copy_(apply(own, "output", output[None].float())[0].to(output.dtype))
