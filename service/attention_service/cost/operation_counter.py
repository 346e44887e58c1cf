"""Count the operations that PyTorch's dispatcher starts: bytes read and written, and elementary functions.

The convention. An operation counts if it does work; views, allocations and looks at a shape do none. It reads each
tensor that it is given once: an expanded dimension as a single element, the same tensor twice as one, by an index the
picked elements. It writes its answer, or what it changes in place. PyTorch's fused kernel is a single operation: it
reads queries, keys, values and a mask, and writes the context and one number for each query. An elementary function
counts by element: exp, log, tanh, sigmoid, roots, sin, cos and powers that are not whole. A softmax takes one for each
score, the fused kernel one for each pair that it looks at.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from math import prod
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from attention_service.cost import cuda_kernels


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
    products: int = 0
    """FLOPs of matrix products: 2·m·k·n for [m, k] by [k, n]."""
    half_products: int = 0
    """FLOPs of products whose result has a half type."""

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @classmethod
    def sum(cls, counts: "Iterable[Traffic]") -> "Traffic":
        """Add up counts."""
        return cls(*map(sum, zip(*(x.numbers for x in counts), strict=True)))

    @property
    def numbers(self) -> tuple[int, ...]:
        """All counts, in order."""
        counts = self.read, self.written, self.transcendentals, self.operations
        return (*counts, self.products, self.half_products)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic.sum((self, other))

    def __sub__(self, other: "Traffic") -> "Traffic":
        return self + other.times(-1)

    def times(self, factor: float) -> "Traffic":
        """Scale every count."""
        return Traffic(*(round(factor * number) for number in self.numbers))


SectionT = TypeVar("SectionT", bound=Hashable)


class OperationCounter(Generic[SectionT]):
    """Sums of the operations that it is shown, by section. ``enter`` one first."""

    def __init__(self) -> None:
        self._sums: dict[SectionT, list[float]] = {}  # whole, unless a few blocks stand for others not quite alike
        self._here = [0.0] * 6
        self._times: float = 1

    @property
    def counted(self) -> dict[SectionT, Traffic]:
        """The sums of each section."""
        return {section: Traffic(*map(round, sums)) for section, sums in self._sums.items()}

    @contextmanager
    def repeated(self, times: int | Fraction) -> Iterator[None]:
        """Multiply the counts of every operation in this block."""
        before = self._times
        self._times = int(before * times) if (before * times) % 1 == 0 else float(before * times)
        yield
        self._times = before

    def enter(self, section: SectionT) -> None:
        """Go on counting in this section."""
        self._here = self._sums.setdefault(section, [0.0] * 6)

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
        here, times = self._here, self._times
        here[0] += times * read
        here[1] += times * sum(map(_extent, made))
        if kind.functions is not None:
            here[2] += times * kind.functions(args, made)
        here[3] += times
        if kind.on_gpu is not None:
            call = kind.on_gpu(args, kwargs)
            here[2] += times * call.pairs
            here[4] += times * call.products
            here[5] += times * call.products * (call.q.itemsize == 2)
        if kind.products is not None:
            products = times * kind.products(args, made)
            here[4] += products
            here[5] += products * (made[0].itemsize == 2)


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
Calls = Callable[[Sequence[Any], Mapping[str, Any]], cuda_kernels.Called]


@dataclass(frozen=True)
class _Kind:
    """Facts about an operator that do not depend on its arguments."""

    name: str
    fills: bool
    picks: bool
    overwrites: bool
    functions: Functions | None
    products: Functions | None
    on_gpu: Calls | None
    """A kernel of attention on a GPU."""


@cache
def _kind(func: Any) -> _Kind | None:
    """None for an operator that does no work."""
    name = func._schema.name.removeprefix("aten::")
    if func.is_view or name in _IDLE:
        return None
    on_gpu = partial(cuda_kernels.Called, name) if name in cuda_kernels.KERNELS else None
    sets = name in _FILLS, name in _PICKS, name in _OVERWRITES
    return _Kind(name, *sets, _FUNCTIONS.get(name), _PRODUCTS.get(name), on_gpu)


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


def _multiplied(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """The depth of a product is the width of its first factor, which is the second argument where a sum is added to."""
    return 2 * made[0].numel() * int(args[-2].shape[-1])


def _attended(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    q, k, v = args[:3]
    causal = len(args) > 4 and args[4]
    return 2 * _fused_pairs(q, k, causal=causal) * int(q.shape[3] + v.shape[3])


def _attended_back(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """The scores again, and two products for each of the forward pass."""
    _, q, k, v = args[:4]
    return 2 * _fused_pairs(q, k, causal=args[7]) * int(3 * q.shape[3] + 2 * v.shape[3])


_PRODUCTS: Final[dict[str, Functions]] = {
    **dict.fromkeys(("mm", "bmm", "addmm"), _multiplied),
    _FUSED: _attended,
    f"{_FUSED}_backward": _attended_back,
}
