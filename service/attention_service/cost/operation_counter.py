"""Count the operations that PyTorch's dispatcher starts: bytes read and written, and elementary functions.

The convention. An operation counts if it does work; views, allocations and looks at a shape do none. It reads each
tensor that it is given once: an expanded dimension as a single element, the same tensor twice as one, by an index the
picked elements. It writes its answer, or what it changes in place. PyTorch's fused kernel is a single operation: it
reads queries, keys, values and a mask, and writes the context and one number for each query. An elementary function
counts by element: exp, log, tanh, sigmoid, roots, sin, cos and powers that are not whole. A softmax takes one for each
score, the fused kernel one for each pair that it looks at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any, Final

from torch import Tensor


@dataclass(frozen=True)
class Traffic:
    """The work of one pass."""

    read: int = 0
    """Bytes."""
    written: int = 0
    """Bytes."""
    transcendentals: int = 0
    """Elementary functions (exp, log, tanh, roots, sin, cos, powers that are not whole), by element."""
    operations: int = 0
    """Operations that do work; on a GPU, launched kernels."""

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read + other.read,
            self.written + other.written,
            self.transcendentals + other.transcendentals,
            self.operations + other.operations,
        )

    def __sub__(self, other: "Traffic") -> "Traffic":
        return self + other.times(-1)

    def times(self, factor: float) -> "Traffic":
        """Scale every count."""
        counts = self.read, self.written, self.transcendentals, self.operations
        return Traffic(*(round(factor * each) for each in counts))


class OperationCounter:
    """Sums of the operations that it is shown."""

    def __init__(self) -> None:
        self._read: float = 0  # whole, unless a few blocks stand for others that are not quite alike
        self._written: float = 0
        self._functions: float = 0
        self._operations: float = 0
        self._times: float = 1
        self.at: dict[str, Traffic] = {}
        """The sums before the first operation on tensors of each name."""

    @property
    def counted(self) -> Traffic:
        """The sums so far."""
        return Traffic(round(self._read), round(self._written), round(self._functions), round(self._operations))

    @contextmanager
    def repeated(self, times: int | Fraction) -> Iterator[None]:
        """Multiply the counts of every operation in this block."""
        before = self._times
        self._times = int(before * times) if (before * times) % 1 == 0 else float(before * times)
        yield
        self._times = before

    def mark(self, name: str) -> None:
        """Note the sums before tensors of this name are made."""
        self.at.setdefault(name, self.counted)

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Add one operation, once it has run."""
        kind = _kind(func)
        if kind is None:
            return
        given = [*_tensors(args), *_tensors(kwargs.values())]
        made = [*_tensors((out,))]
        if kind.name == "_to_copy" and args[0].device != made[0].device:
            return  # between the host and a device
        if kind.name == "copy_" and _alias(given[0]) == _alias(given[1]):
            return  # onto itself, as ``x[i] += y`` ends
        read = 0 if kind.fills else sum(map(_extent, _distinct(given)))
        if kind.picks:
            read += _extent(made[0]) - _extent(args[0])
        if kind.overwrites:
            read -= _extent(args[0])
        target = kwargs.get("out")
        if target is not None and _alias(target) not in map(_alias, _tensors(args)):
            read -= _extent(target)
        times = self._times
        self._read += times * read
        self._written += times * sum(map(_extent, made))
        self._operations += times
        if kind.functions is not None:
            self._functions += times * kind.functions(args, made)


def _tensors(values: Any) -> Iterator[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _distinct(tensors: list[Tensor]) -> Sequence[Tensor]:
    return tensors if len(tensors) < 2 else [*{_alias(x): x for x in tensors}.values()]


def _alias(x: Tensor) -> tuple[Any, ...]:
    """The same for two names of one tensor."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


def _extent(x: Tensor) -> int:
    """Bytes of a tensor; an expanded dimension counts as one element."""
    if x.is_contiguous():
        return x.numel() * x.itemsize
    sizes = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
    return prod(sizes) * x.itemsize


Functions = Callable[[Sequence[Any], Sequence[Tensor]], int]


@dataclass(frozen=True)
class _Kind:
    """Facts about an operator that do not depend on its arguments."""

    name: str
    fills: bool
    picks: bool
    overwrites: bool
    functions: Functions | None


@cache
def _kind(func: Any) -> _Kind | None:
    """None for an operator that does no work."""
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name in _IDLE:
        return None
    return _Kind(name, name in _FILLS, name in _PICKS, name in _OVERWRITES, _FUNCTIONS.get(name))


def _each(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    return made[0].numel()


def _powers(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    whole = isinstance(args[1], int | float) and float(args[1]).is_integer()
    return 0 if whole else made[0].numel()


def _fused_pairs(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """Pairs whose weights the fused kernel computes; with ``is_causal``, those up to the diagonal."""
    queries, keys = q.shape[2], k.shape[2]
    square = min(queries, keys)
    pairs = square * (square + 1) // 2 + (queries - square) * keys if causal else queries * keys
    return q.shape[0] * q.shape[1] * pairs


_IDLE: Final = {
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "lift_fresh", "is_same_size",
    "_local_scalar_dense", "resize_", "promote_types", "_unsafe_view", "_reshape_alias",
}  # fmt: skip
_FILLS: Final = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
"""Operators that look at the shape of their tensor alone."""
_PICKS: Final = {"index_select", "index", "gather", "embedding"}
_OVERWRITES: Final = {"fill_", "zero_", "copy_", "random_", "normal_"}
"""Operators that change a tensor in place without reading it."""
_ELEMENTARY: Final = (
    "exp", "exp_", "exp2", "exp2_", "log", "log_", "tanh", "tanh_", "sqrt", "sqrt_", "rsqrt", "sin", "cos", "erf",
    "sigmoid", "sigmoid_", "elu", "elu_backward", "_softmax", "linalg_vector_norm",
)  # fmt: skip
_FUSED: Final = "_scaled_dot_product_flash_attention_for_cpu"
_FUNCTIONS: Final[dict[str, Functions]] = {
    **dict.fromkeys(_ELEMENTARY, _each),
    "pow": _powers,
    "pow_": _powers,
    "logsumexp": lambda args, made: int(args[0].numel() + made[0].numel()),
    "log_sigmoid_forward": lambda args, made: 2 * made[0].numel(),
    _FUSED: lambda args, made: _fused_pairs(args[0], args[1], causal=len(args) > 4 and args[4]),
    f"{_FUSED}_backward": lambda args, made: _fused_pairs(args[1], args[2], causal=args[7]),
}
"""Elementary functions by operator."""
