"""Functions by which the code of a model makes weights of scores, and contexts of weights, seen while they run.

Notation as in ``core.problem``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attention_service.models.passes.module_hooks import running_within

Kind = Literal["softmax", "dropout"]
_KINDS: Final[dict[Any, Kind]] = {
    torch.softmax: "softmax", Tensor.softmax: "softmax", nn.functional.softmax: "softmax",
    torch.dropout: "dropout", nn.functional.dropout: "dropout",
}  # fmt: skip
"""Functions that return weights: of scores, or of weights, some of which they drop in training."""
_PRODUCTS: Final = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm})
"""Functions that multiply weights by values, beside ``torch.einsum``."""


def _opened(function: Any) -> Any:
    """A function of ``torch.nn.functional`` whose own calls are seen too: it passes no override itself."""
    scope = function.__globals__ | {"has_torch_function": lambda _: False}
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_OPENED: Final[dict[Any, Any]] = {
    nn.functional.multi_head_attention_forward: _opened(nn.functional.multi_head_attention_forward)
}
"""Functions that make weights and multiply values by them, by those whose steps are seen."""


@dataclass(frozen=True)
class Sight:
    """The place in the code of an attention's module at which its weights are seen."""

    kind: Kind
    at: int
    """The call of this kind in a run of the module."""
    heads: int
    kv_heads: int
    """The heads of the values, if they are seen, else those of the queries."""
    value_dim: int | None
    """The width of the values of a head; None unless their product with the weights is seen."""
    runs: int = 1
    """The runs of the module in one pass."""
    square: bool = False
    """True if queries and keys are the same tokens."""

    @property
    def taps(self) -> tuple[str, ...]:
        """The taps that are seen."""
        return ("weights",) if self.value_dim is None else ("v", "weights", "context")

    def by_head(self, x: Tensor, heads: int | None = None) -> Tensor:
        """A tensor of rank 4, whose heads may be a part of its batch; one of another rank as it is.

        Of rank 5 are those of windows behind the heads ``[B, H, W, …]``, as in Hiera: each is a sequence.
        """
        if x.ndim == 5:
            return x.transpose(1, 2).flatten(0, 1)
        return x.view(-1, heads or self.heads, *x.shape[1:]) if x.ndim == 3 else x

    def is_over_pairs(self, weights: Tensor) -> bool:
        """True if weights by head have the shape ``[B, H, Q, K]`` of the trial, and not that of pieces of a text."""
        return weights.ndim == 4 and weights.shape[1] == self.heads


class Seeing(Protocol):
    """The use of the tensors of one run of a module: each is replaced by what is returned."""

    def weights(self, x: Tensor) -> Tensor:
        """Take the weights ``[B, H, Q, K]``."""

    def values(self, x: Tensor) -> Tensor:
        """Take the values ``[B, Hkv, K, V]`` that these multiply."""

    def context(self, x: Tensor) -> Tensor:
        """Take the context ``[B, H, Q, V]`` that they give."""


@contextmanager
def watching(sights: Mapping[nn.Module, Sight], begin: Callable[[nn.Module], Seeing]) -> Iterator[None]:
    """Call ``begin`` at each run of a module, and what it returns with what is seen there, until the block ends."""
    running: list[_FunctionWatch] = []

    with running_within(sights, lambda module: _FunctionWatch(sights[module], begin(module), running), running):
        yield


class SeeingFunctions(TorchFunctionMode):
    """Sees each function of PyTorch that a model calls, and those that its attention functions call."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function."""
        if (opened := _OPENED.get(function)) is None:
            return self.called(function, args, kwargs or {})
        with self:
            return opened(*args, **(kwargs or {}))

    def called(self, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run one function that opens no others."""
        raise NotImplementedError


def kind_of(function: Any) -> Kind | None:
    """The kind of a function that returns weights; None for another function."""
    return _KINDS.get(function)


@dataclass(frozen=True, eq=False)
class WeightProduct:
    """A product whose first factor may be weights."""

    first: Tensor
    second: Tensor
    run: Callable[[Tensor], Tensor]
    """The product of the first factor and what is given."""
    of_values: tuple[int, ...] | None = None
    """The dimensions of the second factor in the order of values ``[B, Hkv, K, V]``; None if that is theirs."""
    of_context: tuple[int, ...] | None = None
    """The same of the result, in the order of a context ``[B, H, Q, V]``."""


def product_of(function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> WeightProduct | None:
    """The product that a function makes; None for another function."""
    if function is torch.einsum:
        return _named_product(*args) if len(args) == 3 else None
    if function not in _PRODUCTS or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
        return None
    first, second = args
    return WeightProduct(first, second, lambda values: function(first, values, **options))


def _named_product(equation: Any, first: Any, second: Any) -> WeightProduct | None:
    """The product of ``bnij`` and ``b, n, j, d`` in some order, to ``b, n, i, d`` in some order, by any names."""
    if not isinstance(equation, str):
        return None
    inputs, _, result = equation.replace(" ", "").partition("->")
    names, _, of_second = inputs.partition(",")
    if len(names) != 4 or len(of_second) != 4:
        return None
    batch, head, query, key = tuple(names)
    (width,) = {*of_second} - {*names} or {""}
    values, context = (batch, head, key, width), (batch, head, query, width)
    if {*of_second} != {*values} or {*result} != {*context} or len(result) != 4:
        return None
    return WeightProduct(
        first, second, lambda values: torch.einsum(equation, first, values),
        tuple(map(of_second.index, values)), tuple(map(result.index, context)),
    )  # fmt: skip


def is_over(weights: Tensor, first: Tensor) -> bool:
    """True if the first factor of a product can be these weights, in whatever shape."""
    return first.ndim > 2 and first.shape[-2:] == weights.shape[-2:] and first.numel() == weights.numel()


class _FunctionWatch(SeeingFunctions):
    """Sees the functions that one run of a module calls."""

    def __init__(self, sight: Sight, seeing: Seeing, running: Sequence["_FunctionWatch"]) -> None:
        super().__init__()
        self._sight, self._seeing, self._running = sight, seeing, running
        self._calls = 0
        self._weights: Tensor | None = None
        """The weights whose product is still to come."""

    def called(self, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run one function, and let what it returns be seen."""
        sight, product = self._sight, None
        if self._running[-1] is not self:  # a module within it runs
            return function(*args, **options)
        if kind_of(function) == sight.kind:
            result: Tensor = function(*args, **options)
            self._calls += 1
            if self._calls - 1 != sight.at:
                return result
            changed = self._changed(self._seeing.weights, result, sight.heads)
            self._weights = changed if sight.value_dim is not None else None
            return changed
        if self._weights is not None:
            product = product_of(function, args, options)
        if product is None or self._weights is None or not is_over(self._weights, product.first):
            return function(*args, **options)
        self._weights = None
        values = self._changed(self._seeing.values, product.second, sight.kv_heads, product.of_values)
        return self._changed(self._seeing.context, product.run(values), sight.heads, product.of_context)

    def _changed(
        self, see: Callable[[Tensor], Tensor], x: Tensor, heads: int, order: tuple[int, ...] | None = None
    ) -> Tensor:
        given = self._sight.by_head(x, heads) if order is None else x.permute(order)
        changed = see(given)
        if changed is given:
            return x
        if x.ndim == 5:
            return changed.reshape(len(x), x.shape[2], *changed.shape[1:]).transpose(1, 2)
        return changed.reshape(x.shape) if order is None else changed.permute(*map(order.index, range(len(order))))
