"""The states that each module of a model is given and returns in one short run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from torch import Tensor, nn

from attention_service.models.passes.module_hooks import noting_calls, noting_returns

_STATE_ARGUMENTS: Final = ("hidden_states", "inputs_embeds", "x", "input")
"""The names of states among the arguments of modules."""


@dataclass
class ModuleTraces:
    """The states of one run."""

    given: dict[nn.Module, Tensor] = field(default_factory=dict)
    """The first tensor that each module was given, at its first call."""
    made: dict[nn.Module, Tensor] = field(default_factory=dict)
    """The first tensor that each module returned."""
    ended: dict[nn.Module, Tensor] = field(default_factory=dict)
    """The same at its last call, of a module that several layers share."""
    returned: dict[nn.Module, Any] = field(default_factory=dict)
    """All that it returned."""
    begun: dict[nn.Module, int] = field(default_factory=dict)
    """The number of calls that had begun or ended before its first call began."""
    done: dict[nn.Module, int] = field(default_factory=dict)
    """The same before its first call ended."""
    rows: set[nn.Module] = field(default_factory=set)
    """The modules that return the states of all texts one behind the other, which are seen as those of each text."""


@contextmanager
def traced(modules: Iterable[nn.Module]) -> Iterator[ModuleTraces]:
    """Keep what these modules are given and return until the block ends."""
    traces = ModuleTraces()
    moments = count()

    def begin(module: nn.Module, *_: Any) -> None:
        traces.begun.setdefault(module, next(moments))

    def note(module: nn.Module, args: Sequence[Any], options: Mapping[str, Any], output: Any) -> None:
        several = output if isinstance(output, tuple | list) else output.values() if isinstance(output, dict) else ()
        first = next(iter(several), None) if several else output
        if isinstance(first, Tensor):
            traces.ended[module] = first.detach().clone()
        if module in traces.returned:
            return
        traces.returned[module] = output
        traces.done[module] = next(moments)
        named = [options[name] for name in _STATE_ARGUMENTS if name in options]
        given = next((x for x in (*args, *named) if isinstance(x, Tensor)), None)
        if given is not None:
            traces.given[module] = given.detach().clone()
        if isinstance(first, Tensor):
            traces.made[module] = traces.ended[module]

    modules = [*modules]
    with noting_calls(modules, begin), noting_returns(modules, note):
        yield traces
