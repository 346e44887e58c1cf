"""A trial of a model that computes its attention itself: where its weights can be seen.

Softmax and dropout are watched in a short run, and what one returned is an attention's weights if the model returns it
too (``output_attentions``), or, where it returns none of that size, if the same module multiplies values by it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from attention_contract.errors import InvalidCheckpoint
from attention_service.models.passes.module_hooks import within_calls
from attention_service.models.passes.observed.own_functions import (
    Kind,
    SeeingFunctions,
    Sight,
    WeightProduct,
    is_over,
    kind_of,
    product_of,
    watching,
)

_WEIGHT_TOLERANCE: Final = 1e-6
"""The largest difference of weights that are the same, relative to the largest."""


@dataclass(eq=False)
class _Candidate:
    """A result of a function that may be weights."""

    kind: Kind
    at: int
    weights: Tensor
    multiplied: Tensor | None = None
    """The first factor of the next product that has the sizes of weights."""
    product: WeightProduct | None = None
    """The product itself."""


@dataclass(eq=False)
class _ModuleRun:
    """One run of a module."""

    module: nn.Module
    calls: dict[Kind, int] = field(default_factory=dict)
    candidates: list[_Candidate] = field(default_factory=list)
    windows: int | None = None
    """The windows of all sequences, if its states are a grid ``[B·W, rows, columns, width]``."""

    def take(self, kind: Kind, tensor: Tensor) -> None:
        """Note what a function returned."""
        at = self.calls.get(kind, 0)
        self.calls[kind] = at + 1
        if tensor.ndim in {3, 4, 5} and tensor.is_floating_point():
            self.candidates.append(_Candidate(kind, at, tensor.detach().clone()))

    def multiply(self, product: WeightProduct) -> None:
        """Note a product."""
        for candidate in self.candidates:
            if candidate.product is None and is_over(candidate.weights, product.first):
                candidate.product, candidate.multiplied = product, product.first.detach().clone()


class _Listening(SeeingFunctions):
    """Notes functions of the innermost module that has parameters."""

    def __init__(self, runs: Sequence[_ModuleRun]) -> None:
        super().__init__()
        self._stack = runs

    def called(self, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run one function, and note it."""
        result = function(*args, **options)
        if not self._stack:
            return result
        if (kind := kind_of(function)) is not None:
            self._stack[-1].take(kind, result)
        elif (product := product_of(function, args, options)) is not None:
            self._stack[-1].multiply(product)
        return result


@contextmanager
def _listening(model: nn.Module) -> Iterator[list[_ModuleRun]]:
    """Note the runs of modules until the block ends, in the order in which they began."""
    runs, stack = list[_ModuleRun](), list[_ModuleRun]()

    def enter(module: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        state = args[0] if args else options.get("hidden_states")
        stack.append(_ModuleRun(module, windows=len(state) if isinstance(state, Tensor) and state.ndim == 4 else None))
        runs.append(stack[-1])

    def leave() -> None:
        stack.pop()

    learned = [module for module in model.modules() if any(True for _ in module.parameters())]
    with within_calls(learned, enter, leave), _Listening(stack):
        yield runs


def try_sights(model: nn.Module, run: Callable[[bool], Any], batch: int) -> dict[nn.Module, Sight]:
    """Return where the weights of each attention are seen, in the order in which they run.

    ``run`` is a short run of the model, with the weights in its output if it is given True; ``batch``: the number of
    its sequences.
    """
    with torch.no_grad(), _listening(model) as runs:
        try:
            output = run(True)
        except InvalidCheckpoint:  # it may take no output_attentions
            runs.clear()
            output = run(False)
    returned = [own for own in _attentions(output) if own.ndim == 4 and bool((own >= 0).all())]
    every = [candidate.weights for called in runs for candidate in called.candidates]
    other = [own for own in returned if not any(_is_returned(matrix, own) for matrix in every)]
    sights: dict[nn.Module, Sight] = {}
    expected: dict[nn.Module, list[Tensor]] = {}
    for called in runs:
        sighted = _sight(called.candidates, returned, other, called.windows or batch)
        if sighted is not None:
            sight, weights = sighted
            sights.setdefault(called.module, sight)
            expected.setdefault(called.module, []).append(sight.by_head(weights))
    again: dict[nn.Module, list[Tensor]] = {module: [] for module in sights}
    with torch.no_grad(), watching(sights, lambda module: _Kept(again[module])):
        run(False)
    return {
        module: replace(sight, runs=len(again[module]))
        for module, sight in sights.items()
        if len(expected[module]) == len(again[module]) and all(map(_equal, expected[module], again[module]))
    }


class _Kept:
    """Keeps the weights of the runs of a module."""

    def __init__(self, kept: list[Tensor]) -> None:
        self._kept = kept

    def weights(self, x: Tensor) -> Tensor:
        """Keep weights."""
        self._kept.append(x.clone())
        return x

    def values(self, x: Tensor) -> Tensor:
        """Leave values."""
        return x

    def context(self, x: Tensor) -> Tensor:
        """Leave a context."""
        return x


def _attentions(output: Any) -> Iterator[Tensor]:
    """The weights that a model returns, those of the models within it too."""
    for name, value in output.items() if isinstance(output, Mapping) else ():
        if "attentions" in name:
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _attentions(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence):
        for member in value:
            yield from _tensors(member)


def _sight(
    candidates: Sequence[_Candidate], returned: Sequence[Tensor], other: Sequence[Tensor], batch: int
) -> tuple[Sight, Tensor] | None:
    """The first softmax, or else the first dropout, whose result is the weights of an attention.

    ``other``: the tensors among those ``returned`` that no function made, such as scores in the place of weights. A
    model may return the weights of some attentions alone, as Swin does those of the last one of each stage.
    """
    ordered = sorted(candidates, key=lambda candidate: (candidate.kind != "softmax", candidate.at))
    multiplied = [
        candidate
        for candidate in ordered
        if candidate.multiplied is not None and _equal(candidate.weights, candidate.multiplied)
    ]
    known = [candidate for candidate in ordered if any(_is_returned(candidate.weights, own) for own in returned)]
    unreturned = [candidate for candidate in multiplied if not any(is_over(candidate.weights, own) for own in other)]
    chosen = next(iter([*known, *unreturned]), None)
    return None if chosen is None else (_seen(chosen, batch, multiplied=chosen in multiplied), chosen.weights)


def _seen(candidate: _Candidate, batch: int, *, multiplied: bool) -> Sight:
    """The sight of weights, which of rank 3 have the sequences beside the heads."""
    weights, product = candidate.weights, candidate.product
    heads = weights.shape[1] if weights.ndim > 3 else weights.shape[0] // batch
    square = weights.shape[-2] == weights.shape[-1]
    sight = Sight(candidate.kind, candidate.at, heads, heads, None, square=square)
    if product is None or not multiplied:
        return sight
    values = product.second if product.of_values is None else product.second.permute(product.of_values)
    if values.ndim not in {3, weights.ndim} or values.shape[-2] != weights.shape[-1]:
        return sight
    return replace(sight, kv_heads=values.shape[1] if values.ndim > 3 else heads, value_dim=values.shape[-1])


def _is_returned(weights: Tensor, own: Tensor) -> bool:
    """True if a model returns these weights, or their mean over heads in the place of each head's, as WavLM does."""
    if not is_over(weights, own):
        return False
    return _equal(weights, own) or _equal(weights.reshape(own.shape).mean(1, keepdim=True).expand(own.shape), own)


def _equal(weights: Tensor, other: Tensor) -> bool:
    if weights.numel() != other.numel():
        return False
    return bool((weights.reshape(other.shape) - other).abs().max() <= _WEIGHT_TOLERANCE * other.abs().max())
