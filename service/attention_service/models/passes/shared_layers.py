"""Passes over copies of a text that differ from one layer on: the layers before it run once, for all copies.

A pass without changes keeps the state before each layer. A pass that begins at a layer gets that state, and the layers
before it answer with what they returned. A short trial shows for each layer that such a pass has the numbers of a whole
one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers.activations import NewGELUActivation

from attention_service.models.passes.attention_places import AttentionPlace
from attention_service.models.passes.module_hooks import before, first_of, noting_returns, replaced, with_first
from attention_service.models.passes.unrun_models import NOT_RUNNING
from attention_transformers.model_layers import LayerKey

_ROUNDINGS: Final = 64
"""Difference of two runs that count as equal, in roundings of the dtype relative to the largest number."""
_COARSE_TOLERANCE: Final = 0.02
"""The same of dtypes with few digits."""


@dataclass(eq=False)
class KeptStates:
    """The states of one pass without changes."""

    before: dict[int, Tensor] = field(default_factory=dict)
    """``[B, L, d_model]`` before each layer."""
    returned: dict[int, Any] = field(default_factory=dict)
    """The output of each layer, in the form that it has."""

    @property
    def last(self) -> Tensor:
        """``[B, L, d_model]`` behind the last layer."""
        state: Tensor = first_of(self.returned[max(self.returned)])
        return state


@dataclass(frozen=True, eq=False)
class Resumed:
    """A pass over copies of the texts of a pass before, of which only some layers run."""

    kept: KeptStates
    """The states of the pass before."""
    first: int
    """The layer to begin at, in the stack; the number of layers to run none."""
    copies: int = 1
    states: Tensor | None = None
    """``[copies · B, L, d_model]`` before the first layer, if they are not the kept ones."""
    end: int | None = None
    """The layer from which on all return what they returned before; None if they run."""


class SharedLayers:
    """The layers of one model, if they are one stack."""

    def __init__(self, model: nn.Module, places: Sequence[AttentionPlace]) -> None:
        """``places``: all attentions of the model."""
        self._blocks = _stack(model, places)
        at = {id(block): index for index, block in enumerate(self._blocks)}
        self._index: dict[LayerKey, int] = {place.key: at[id(place.layer)] for place in places if self._blocks}
        self._able: dict[int, bool] = {}

    @property
    def count(self) -> int:
        """The number of layers; 0 of a model whose layers are no one stack."""
        return len(self._blocks)

    def first(self, layers: Iterable[LayerKey]) -> int:
        """The place in the stack of the first of these layers; 0 if it is unknown."""
        return min((self._index.get(layer, 0) for layer in layers), default=0)

    @contextmanager
    def keeping(self) -> Iterator[KeptStates]:
        """Keep the state before each layer of the pass that runs until the block ends."""
        kept, number = KeptStates(), {block: at for at, block in enumerate(self._blocks)}

        def returned(block: nn.Module, _: Any, __: Any, output: Any) -> None:
            kept.returned[number[block]] = output

        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):
                stack.callback(before(block, partial(_keep, kept.before, index)))
            stack.enter_context(noting_returns(self._blocks, returned))
            yield kept

    @contextmanager
    def resuming(self, resumed: Resumed) -> Iterator[None]:
        """Run some layers of the pass until the block ends, and let the others return what they returned before."""
        kept, first, states = resumed.kept, resumed.first, resumed.states
        with ExitStack() as stack:
            if first < self.count:
                stack.enter_context(self.beginning(kept, first, resumed.copies, states))
                if resumed.end is not None:
                    stack.enter_context(self.ending(kept, resumed.end))
            else:
                stack.enter_context(self.ending(kept, 0, states))
            yield

    @contextmanager
    def beginning(self, kept: KeptStates, first: int, copies: int, states: Tensor | None = None) -> Iterator[None]:
        """Begin the pass over so many copies at a layer, until the block ends.

        states ``[copies · B, L, d_model]``: those before that layer, if they are not the kept ones.
        """
        with ExitStack() as stack:
            for index in range(first):
                stack.callback(replaced(self._blocks[index], partial(_constant, kept.returned[index])))
            state = kept.before[first]
            shape = (copies * len(state), *state.shape[1:])
            many = state.expand(shape) if len(state) == 1 else state.repeat(copies, *(1 for _ in shape[1:]))
            many = many if states is None else states
            stack.callback(before(self._blocks[first], lambda _: many))
            for module in self._blocks[first].modules() if many.stride(0) == 0 and copies > 1 else ():
                if next(module.children(), None) is None:
                    stack.callback(replaced(module, partial(_once, module.forward)))
            for module in (module for block in self._blocks[first:] for module in block.modules()):
                if type(module) is NewGELUActivation:  # the same formula by eight operations over large states
                    stack.callback(replaced(module, partial(gelu, approximate="tanh")))
            yield

    @contextmanager
    def ending(self, kept: KeptStates, first: int, states: Tensor | None = None) -> Iterator[None]:
        """Let the layers from the first one on return what they returned before, until the block ends.

        states ``[copies · B, L, d_model]``: those behind the last layer, if they are not the kept ones.
        """
        with ExitStack() as stack:
            for index in range(first, self.count):
                output = kept.returned[index]
                if states is not None and index == self.count - 1:
                    output = with_first(output, states)
                stack.callback(replaced(self._blocks[index], partial(_constant, output)))
            yield

    def unable(self, layers: Iterable[int], run: Callable[[int], Tensor]) -> int | None:
        """The first of these layers at which no pass can begin with the numbers of a whole one; None if there is none.

        Short trials show it, once for each layer. run: a pass over so many copies of a short text; returns the
        predictions ``[copies, V]`` of its last token.
        """
        firsts = [*layers]
        if not self._blocks:
            return next(iter(firsts), None)
        if untried := [first for first in firsts if first not in self._able]:
            # Of two texts too: what layers hand on beside states would fit all copies of one text.
            able = self._tried(untried, run, 1)
            able = self._tried(sorted(able), run, 2) if able else able
            self._able |= {first: first in able for first in untried}
        return next((first for first in firsts if not self._able[first]), None)

    def _tried(self, firsts: Iterable[int], run: Callable[[int], Tensor], texts: int) -> set[int]:
        """Return the layers at which a pass over two copies of so many texts can begin."""
        able: set[int] = set()
        try:
            with self.keeping() as kept:
                run(texts)
            if len(kept.before) < self.count or len(kept.returned) < self.count:
                return able
            whole = run(2 * texts)
        except NOT_RUNNING:
            return able
        most = min(_ROUNDINGS * torch.finfo(whole.dtype).eps, _COARSE_TOLERANCE) * whole.abs().max()
        for first in firsts:
            try:
                with self.beginning(kept, first, 2):
                    begun = run(2 * texts)
            except NOT_RUNNING:
                continue
            if bool((whole - begun).abs().max() <= most):
                able.add(first)
        return able


def _keep(states: dict[int, Tensor], index: int, state: Tensor) -> None:
    states[index] = state.detach()


def _stack(model: nn.Module, places: Sequence[AttentionPlace]) -> list[nn.Module]:
    """The layers of the one list that has all attentions of a model, each layer one; none if there is no such list."""
    if not places:
        return []
    layers = [place.layer for place in places]
    own = [place.module for place in places]
    if len({*map(id, layers)}) < len(layers) or len({*map(id, own)}) < len(own) or any(map(_is_moved, places)):
        return []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and {*map(id, layers)} <= {*map(id, module)}:
            return [*module]
    return []


def _is_moved(place: AttentionPlace) -> bool:
    """True if the states around an attention are not ``[B, L, d_model]`` of one text, or its layer is itself."""
    return bool(place.turn) or place.time_first or place.layer is place.module


def _constant(output: Any, *_: Any, **__: Any) -> Any:
    return output


def _once(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a module, computed for one of several equal copies."""
    if options or len(args) != 1 or not isinstance(args[0], Tensor):
        return forward(*args, **options)
    [state] = args
    if state.ndim < 2 or state.stride(0) or len(state) == 1:
        return forward(state)
    result = forward(state[:1])
    return result.expand(len(state), *result.shape[1:]) if isinstance(result, Tensor) else forward(state)
