"""The record of one run of a model: the shapes that its modules were given and returned, and its output.

What is asked of a short run at the load of a model is a function of its record, so that one run answers all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Size, Tensor, nn

from attention_service.models.passes.module_hooks import first_of, noting_returns


class ModuleCall(NamedTuple):
    """One call of a module."""

    module: nn.Module
    given: Sequence[Size]
    """The shapes of the tensors that it was given by place, and of its ``hidden_states``."""
    made: Size | None
    """The shape of the first entry of its output; None if that is no tensor."""


class RunRecord(NamedTuple):
    """One run."""

    calls: Sequence[ModuleCall]
    """In the order in which they returned."""
    output: Any

    def given(self, module: nn.Module) -> Size:
        """The shape of the first tensor that a module was given, at its first call. Raises StopIteration."""
        return next(call.given[0] for call in self.calls if call.module is module)


class RecordedRuns:
    """Runs of one model of which the last is kept as a record."""

    last: RunRecord

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self._model, self._run = model, run

    def __call__(self, arguments: Mapping[str, Tensor], **more: Any) -> Any:
        """Run the model once. Returns its output."""
        calls: list[ModuleCall] = []

        def note(module: nn.Module, args: Sequence[Any], options: Mapping[str, Any], output: Any) -> None:
            given = [*args, options.get("hidden_states")]
            made = first_of(output)
            shapes = [x.shape for x in given if isinstance(x, Tensor)]
            calls.append(ModuleCall(module, shapes, made.shape if isinstance(made, Tensor) else None))

        with noting_returns(self._model.modules(), note):
            output = self._run(arguments, **more)
        self.last = RunRecord(calls, output)
        return output
